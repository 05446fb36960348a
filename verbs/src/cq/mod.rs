//! Completion queues: where all the queue pairs made on one tell what became of their requests.
//!
//! The queue itself ([`CqInner`]) is shared with its queue pairs and outlives them. The *poller*, [`CompletionQueue`], is unique: it alone takes completions,
//! and knows by its `table` to which ring each belongs. Queue pairs come and go through a registry behind a lock, which the poller looks at only when it
//! meets a completion that it does not know, or when told that a queue pair has gone.

mod poll;
mod shared;
mod size;
mod table;
mod wait;

use core::mem::ManuallyDrop;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, Ordering};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use doorbell_verbs_sys::{self as sys, inline};

pub use poll::Completions;
pub(crate) use table::Attachment;
use table::{Registry, Table};
pub use wait::Notify;

use crate::context::{Context, ContextInner};
use crate::error::{CompletionQueueError, check};
use crate::event::CompletionChannel;
use crate::event::channel::{ChannelInner, CqId};
use crate::qp::{Queue, Ring};

/// How many completions one call of ibv_poll_cq asks for.
const BATCH: usize = 32;

/// What the device writes into, behind one entry that it doesn't.
type Written = [sys::ibv_wc; BATCH + 1];

/// A completion queue and the right to poll it. It is not `Clone`: a queue has one poller.
pub struct CompletionQueue {
    poller: Poller,
}

/// What taking completions changes.
struct Poller {
    inner: Arc<CqInner>,
    /// The last completion that is done with, and the last that the device wrote: all between are to be yielded.
    last: *const sys::ibv_wc,
    end: *const sys::ibv_wc,
    /// Where they lie: room for BATCH of them and one before, from a box.
    completions: NonNull<sys::ibv_wc>,
    table: Table,
    /// The ring that was at hand last, and its key, in the upper half: one in the table, or `none`.
    ring: *const Ring,
    key: u64,
    /// 0 when the completion taken last is done with. Else one more than the requests that it confirms, its own not among them, as far as their slots follow one another.
    series: u64,
    /// A ring that nothing is ever posted to.
    none: Arc<Ring>,
    /// Entries to be released when the queue is next seen empty: gone queue pairs may have had as many completions in it.
    draining: u32,
    /// Whether something is to be done when the queue is next seen empty.
    settling: bool,
}

/// The queue, as its queue pairs hold it.
pub(crate) struct CqInner {
    raw: *mut sys::ibv_cq,
    pub(crate) context: ManuallyDrop<Arc<ContextInner>>,
    /// What its events call it.
    id: CqId,
    /// What tells of its completions.
    channel: ManuallyDrop<Option<Arc<ChannelInner>>>,
    registry: Mutex<Registry>,
    /// Whether the registry tells of queue pairs gone.
    departed: AtomicBool,
}

// SAFETY: `raw` is only passed to verbs, which may be called from any thread; the rest is Send and Sync.
unsafe impl Send for CqInner {}
// SAFETY: as above.
unsafe impl Sync for CqInner {}

impl CqInner {
    pub(crate) fn raw(&self) -> *mut sys::ibv_cq {
        self.raw
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.registry().capacity()
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        // Its holders don't panic between two writes; after one that did elsewhere it is consistent.
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CompletionQueue {
    pub(crate) fn new(
        context: &Context,
        entries: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<Self, CompletionQueueError> {
        let channel = channel.map(CompletionChannel::inner);
        if channel.is_some_and(|channel| !channel.is_of(context)) {
            return Err(CompletionQueueError::ForeignChannel {
                device: context.name().to_owned(),
            });
        }
        let context = context.inner();
        let cqe = size::checked(context, entries)?;
        let id = CqId::next();
        if let Some(channel) = channel {
            channel.enlist(id);
        }
        let raw_channel = channel.map_or(core::ptr::null_mut(), |channel| channel.raw());
        // SAFETY: context and channel are live, and of one device; the user pointer is a number.
        let raw = unsafe { (context.api.create_cq)(context.raw, cqe, id.to_context(), raw_channel, 0) };
        if raw.is_null() {
            if let Some(channel) = channel {
                channel.strike(id);
            }
            return Err(CompletionQueueError::Create {
                device: context.name.clone(),
                entries,
                error: io::Error::last_os_error(),
            });
        }
        // SAFETY: just made, live.
        let capacity = u32::try_from(unsafe { (*raw).cqe }).unwrap_or(entries);
        let inner = CqInner {
            raw,
            context: ManuallyDrop::new(Arc::clone(context)),
            id,
            channel: ManuallyDrop::new(channel.map(Arc::clone)),
            registry: Mutex::new(Registry::new(capacity)),
            departed: AtomicBool::new(false),
        };
        // SAFETY: all-zero is a valid value of this struct of integers; so every entry is initialised, however much of it a provider writes.
        let completions: Box<Written> = Box::new(unsafe { core::mem::zeroed() });
        let completions = NonNull::from(Box::leak(completions)).cast();
        let none = Arc::new(Ring::new(1, Queue::Receive, 0));
        Ok(Self {
            poller: Poller {
                inner: Arc::new(inner),
                last: completions.as_ptr(),
                end: completions.as_ptr(),
                completions,
                table: Table::default(),
                ring: Arc::as_ptr(&none),
                key: poll::NO_KEY,
                series: 0,
                none,
                draining: 0,
                settling: false,
            },
        })
    }

    pub(crate) fn inner(&self) -> &Arc<CqInner> {
        &self.poller.inner
    }

    /// How many entries it has: as many as asked for, or more.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.inner().capacity()
    }

    /// How many of its entries no queue pair has reserved.
    #[must_use]
    pub fn unreserved(&self) -> u32 {
        self.poller.inner.registry().free()
    }

    /// The requests that have completed (ibv_poll_cq(3)), at most 32 completions and all the unsignalled requests that they confirm, in the order of each
    /// queue; without blocking.
    ///
    /// Completions that the iterator has not yielded when it is dropped are yielded by the next call. As soon as one is yielded its slot is free: a loop may
    /// poll and post in turn.
    ///
    /// # Errors
    /// When the device cannot be polled any more.
    #[inline]
    pub fn poll(&mut self) -> Result<Completions<'_>, CompletionQueueError> {
        if self.poller.last == self.poller.end {
            if self.poller.inner.departed.load(Ordering::Acquire) {
                self.poller.bury();
            }
            self.fetch()?;
        }
        Ok(Completions::new(&mut self.poller))
    }

    #[inline(always)]
    fn fetch(&mut self) -> Result<(), CompletionQueueError> {
        let poller = &mut self.poller;
        let before = poller.completions.as_ptr();
        // SAFETY: the queue is live, and there is room for BATCH entries behind the first.
        let result = unsafe { inline::poll_cq(poller.inner.raw, BATCH as i32, before.add(1)) };
        // Negative: failed. One comparison sees to both this and a provider that counts wrongly.
        let fetched = result.cast_unsigned() as usize;
        if fetched > BATCH {
            return Err(self.poll_failed(result));
        }
        poller.last = before;
        // SAFETY: no more than there is room for.
        poller.end = unsafe { before.add(fetched) };
        if poller.settling {
            poller.drained(fetched);
        }
        Ok(())
    }

    #[cold]
    fn poll_failed(&self, result: i32) -> CompletionQueueError {
        CompletionQueueError::Poll {
            device: self.poller.inner.context.name.clone(),
            result,
        }
    }
}

impl Poller {
    /// Drops what queue pairs now gone had in flight, and forgets their rings.
    #[cold]
    fn bury(&mut self) {
        self.inner.departed.store(false, Ordering::Relaxed);
        let (departed, draining) = self.inner.registry().settle(&mut self.table);
        self.draining += draining;
        self.settling |= self.draining != 0 || self.table.shared.has_gone();
        // It may have been one of those.
        (self.ring, self.key) = (Arc::as_ptr(&self.none), poll::NO_KEY);
        // Outside the lock: this deregisters memory.
        drop(departed);
    }

    /// The queue has been polled since queue pairs have gone. Once it is seen empty none of their completions is left in it; and once nothing was fetched, none is to be
    /// yielded either.
    #[cold]
    fn drained(&mut self, fetched: usize) {
        if fetched == BATCH {
            return;
        }
        self.inner.registry().release(core::mem::take(&mut self.draining));
        if fetched == 0 {
            self.table.shared.forget();
        }
        self.settling = self.table.shared.has_gone();
    }
}

// SAFETY: the completions are its own; the rest is Send and Sync.
unsafe impl Send for Poller {}
// SAFETY: as above; shared access only reads counts.
unsafe impl Sync for Poller {}

impl Drop for Poller {
    fn drop(&mut self) {
        let completions = self.completions.cast::<Written>();
        // SAFETY: from a box, by `new`; freed once.
        drop(unsafe { Box::from_raw(completions.as_ptr()) });
    }
}

impl core::fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("id", &self.id())
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // Rings that never came to the table belong to their queue pairs alone from now on.
        let arrivals = self.poller.inner.registry().close();
        drop(arrivals);
    }
}

impl Drop for CqInner {
    fn drop(&mut self) {
        if let Some(channel) = &*self.channel {
            // SAFETY: the queue is live, and was made with this id.
            unsafe { channel.dismiss(self.id, self.raw) };
        }
        // SAFETY: the last reference: the poller and every queue pair on it are gone.
        let result = unsafe { (self.context.api.destroy_cq)(self.raw) };
        match check(result) {
            // SAFETY: dropped once, here; not used after.
            Ok(()) => unsafe {
                ManuallyDrop::drop(&mut self.channel);
                ManuallyDrop::drop(&mut self.context);
            },
            Err(error) => {
                tracing::error!(device = %self.context.name, %error, "ibv_destroy_cq failed; queue, channel and context are leaked");
            }
        }
    }
}
