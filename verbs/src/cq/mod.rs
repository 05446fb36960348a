//! Completion queues: where all the queue pairs made on one tell what became of their requests.
//!
//! The queue itself ([`CqInner`]) is shared with its queue pairs and outlives them. The *poller*, [`CompletionQueue`], is unique: it alone takes completions,
//! and knows by its `table` to which ring each belongs. Queue pairs come and go through a registry behind a lock, which the poller looks at only when it
//! meets a completion that it does not know, or when told that a queue pair has gone.
//!
//! Two kinds of queue (`kind`) are polled each in its way: `classic` by arrays of completions, `extended` by a call for each. What a completion confirms is found in one way for both
//! (`spot`), and given to users by one type (`poll`). The commonest case, that of the very request which is next on the ring at hand, is one comparison of `wr_id`.

mod any;
mod classic;
mod describe;
mod extended;
mod held;
mod kind;
mod make;
mod members;
#[cfg(all(test, doorbell_loom))]
mod model;
mod poll;
mod shared;
mod size;
mod spot;
mod table;
mod wait;

use core::mem::ManuallyDrop;
use core::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use doorbell_verbs_sys as sys;

pub use any::BestCompletionQueue;
pub use describe::CompletionQueueDescription;
pub(crate) use kind::Entry;
use kind::Machinery;
pub use kind::{Classic, CqKind, Extended};
pub use make::ExtendedCompletionQueueBuilder;
use members::Members;
pub use poll::Completions;
pub(crate) use spot::Retired;
pub(crate) use table::Attachment;
use table::{Registry, Table};
pub use wait::Notify;

use crate::context::ContextInner;
use crate::error::{CompletionQueueError, check};
use crate::event::channel::{ChannelInner, CqId};
use crate::qp::{QpObject, Queue, Ring};
use crate::raw::Lender;
use crate::sync::MutexGuard;

/// How many completions one poll takes at most.
const BATCH: usize = 32;

/// A completion queue and the right to poll it (ibv_create_cq(3); IBTA vol 1, 10.2.6). It is not `Clone`: a queue has one poller.
///
/// It is [`Classic`], as [`Context::completion_queue`](crate::Context::completion_queue) makes it, or [`Extended`], as
/// [`Context::extended_completion_queue`](crate::Context::extended_completion_queue) does. What is written for `CompletionQueue<Q>` with [`Q: CqKind`](CqKind) serves both.
pub struct CompletionQueue<Q: CqKind = Classic> {
    poller: Poller<Q>,
}

/// What taking completions changes.
pub struct Poller<Q: Machinery> {
    inner: Arc<CqInner>,
    own: Q::Own,
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
    members: Members,
    /// The thread that has a poll of it open, or 0; of an extended queue alone.
    polled_by: AtomicUsize,
    lender: Lender,
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

    /// Whether the calling thread has a poll of it open.
    pub(crate) fn is_polled_here(&self) -> bool {
        self.polled_by.load(Ordering::Relaxed) == this_thread()
    }

    /// Keeps a queue pair that is to be destroyed until the queue is next polled, or gone.
    #[cold]
    pub(crate) fn postpone(&self, object: QpObject) {
        self.registry().postpone(object);
        self.members.tell();
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.members.registry()
    }
}

/// A number that no other thread has now. Never 0.
#[inline(always)]
fn this_thread() -> usize {
    thread_local!(static MARK: u8 = const { 0 });
    MARK.with(|mark| core::ptr::from_ref(mark).addr())
}

impl<Q: CqKind> CompletionQueue<Q> {
    fn new(inner: CqInner, own: Q::Own) -> Self {
        let none = Arc::new(Ring::new(1, Queue::Receive, 0));
        Self {
            poller: Poller {
                own,
                inner: Arc::new(inner),
                table: Table::default(),
                ring: Arc::as_ptr(&none),
                key: spot::NO_KEY,
                series: 0,
                none,
                draining: 0,
                settling: false,
            },
        }
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
    pub fn poll(&mut self) -> Result<Completions<'_, Q>, CompletionQueueError> {
        Q::look(&mut self.poller)?;
        Ok(Completions::new(Q::cursor(&mut self.poller)))
    }
}

impl<Q: Machinery> Poller<Q> {
    /// Brings the table up to date, if queue pairs have gone.
    #[inline(always)]
    fn settle(&mut self) {
        if self.inner.members.is_told() {
            self.bury();
        }
    }

    /// Drops what queue pairs now gone had in flight, and forgets their rings.
    #[cold]
    fn bury(&mut self) {
        self.inner.members.hear();
        self.destroy_postponed();
        let (departed, draining) = self.inner.registry().settle(&mut self.table);
        self.draining += draining;
        self.settling |= self.draining != 0 || self.table.shared.has_gone();
        // It may have been one of those.
        (self.ring, self.key) = (Arc::as_ptr(&self.none), spot::NO_KEY);
        // Outside the lock: this deregisters memory.
        drop(departed);
    }

    /// Destroys queue pairs that were dropped while this thread had a poll open.
    fn destroy_postponed(&self) {
        let postponed = self.inner.registry().take_postponed();
        // Outside the lock, which this takes.
        drop(postponed);
    }

    /// The queue has been seen empty after queue pairs had gone: none of their completions is left in it, and none is to be yielded when there is `nothing` more.
    #[cold]
    fn drained(&mut self, nothing: bool) {
        self.inner.registry().release(core::mem::take(&mut self.draining));
        if nothing {
            self.table.shared.forget();
        }
        self.settling = self.table.shared.has_gone();
    }

    #[cold]
    fn failed(&self, verb: &'static str, result: i32) -> CompletionQueueError {
        CompletionQueueError::Poll {
            verb,
            device: self.inner.context.name.clone(),
            result,
        }
    }
}

// SAFETY: `ring` is one of the poller's own; the rest is Send and Sync.
unsafe impl<Q: Machinery<Own: Send>> Send for Poller<Q> {}
// SAFETY: as above; shared access only reads counts.
unsafe impl<Q: Machinery<Own: Sync>> Sync for Poller<Q> {}

impl core::fmt::Debug for CqInner {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("CqInner").field("id", &self.id).finish_non_exhaustive()
    }
}

impl<Q: CqKind> core::fmt::Debug for CompletionQueue<Q> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("id", &self.id())
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

impl<Q: CqKind> Drop for CompletionQueue<Q> {
    fn drop(&mut self) {
        Q::close(&mut self.poller);
        self.poller.destroy_postponed();
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
        let result = match self.lender {
            Some(_) => Ok(()),
            // SAFETY: the last reference: the poller and every queue pair on it are gone.
            None => check(unsafe { (self.context.api.destroy_cq)(self.raw) }),
        };
        match result {
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
