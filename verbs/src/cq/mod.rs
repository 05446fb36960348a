//! Completion queues (CQ): all queue pairs created on a CQ report their work completions there.
//!
//! The queue ([`CqInner`]) outlives its queue pairs. The *poller*, [`CompletionQueue`], is unique:
//! its `table` maps completions to rings of queue pairs, which attach and detach through a registry
//! behind a lock, read only at an unknown completion or a changed flag.
//!
//! `ring_cursor` finds the requests that a completion confirms. Fast path: a completion of the
//! request that is next on the ring used last costs one comparison of `wr_id`.
//!
//! No model: compared only with the calling thread's own id.

mod any;
mod classic;
mod create;
mod describe;
mod extended;
mod held_completion;
mod kind;
mod locked_registry;
#[cfg(all(test, doorbell_loom))]
mod model;
mod poll;
mod ring_cursor;
mod shared;
mod size;
mod table;
mod wait;

use core::mem::ManuallyDrop;
use core::sync::atomic::{AtomicUsize, Ordering};
use std::collections::VecDeque;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

pub use any::BestCompletionQueue;
pub use create::ExtendedCompletionQueueBuilder;
pub use describe::CompletionQueueDescription;
pub(crate) use kind::Entry;
use kind::PollBackend;
pub use kind::{ClassicCq, CqKind, ExtendedCq};
use locked_registry::LockedRegistry;
pub use poll::Completions;
pub(crate) use ring_cursor::Retired;
pub(crate) use table::Attachment;
use table::{Registry, Table};
pub use wait::Notify;

use crate::context::ContextInner;
use crate::error::{CompletionQueueError, check};
use crate::event::channel::{ChannelInner, CqId};
use crate::qp::{QpObject, QueueKind, Ring};
use crate::raw::Lender;
use crate::sync::MutexGuard;

/// Completions taken by one poll at most.
const BATCH: usize = 32;

/// The right to poll a completion queue (ibv_create_cq(3); IBTA vol 1, 10.2.6); it has one poller.
///
/// [`Context::completion_queue`](crate::Context::completion_queue) creates a [`ClassicCq`],
/// [`Context::extended_completion_queue`](crate::Context::extended_completion_queue) an
/// [`ExtendedCq`]; [`Q: CqKind`](CqKind) serves both.
#[doc(alias("ibv_cq", "ibv_create_cq", "ibv_destroy_cq", "ibv_cq_ex"))]
pub struct CompletionQueue<Q: CqKind = ClassicCq> {
    poller: Poller<Q>,
}

/// The state that polling changes.
pub struct Poller<Q: PollBackend> {
    inner: Arc<CqInner>,
    state: Q::PollState,
    table: Table,
    /// The ring used last: one in the table, or `empty_ring`. `key` is its key, in the upper half.
    ring: *const Ring,
    key: u64,
    /// 0 when the completion taken last confirms no more requests; else 1 plus the unsignaled
    /// requests before its own still to confirm, as far as their slots are contiguous.
    unsignaled_left: u64,
    /// A ring that nothing is ever posted to.
    empty_ring: Arc<Ring>,
    /// Entries of destroyed queue pairs, each with the value of `taken` at which they are released,
    /// if no poll finds the queue empty before.
    entries_to_release: VecDeque<(u64, u32)>,
    /// Whether `drain` must run after each poll.
    drain_pending: bool,
    /// Completions taken by polls with `drain_pending`, or fewer.
    taken: u64,
}

pub(crate) struct CqInner {
    raw: *mut sys::ibv_cq,
    pub(crate) context: ManuallyDrop<Arc<ContextInner>>,
    /// The queue's `cq_context`, by which events name it.
    id: CqId,
    channel: ManuallyDrop<Option<Arc<ChannelInner>>>,
    registry: LockedRegistry,
    /// The thread that has a poll open (extended queues only), or 0.
    polled_by: AtomicUsize,
    lender: Lender,
}

// SAFETY: `raw` is only passed to verbs, which any thread may call; the rest is Send and Sync.
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

    pub(crate) fn is_polled_here(&self) -> bool {
        self.polled_by.load(Ordering::Relaxed) == this_thread()
    }

    /// Defers the destruction of a queue pair until the queue is next polled or dropped.
    #[cold]
    pub(crate) fn defer_destroy(&self, object: QpObject) {
        self.registry().defer_destroy(object);
        self.registry.set_changed();
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock()
    }
}

/// An identifier that no other live thread has. Never 0.
#[inline(always)]
fn this_thread() -> usize {
    thread_local!(static MARK: u8 = const { 0 });
    MARK.with(|mark| core::ptr::from_ref(mark).addr())
}

impl<Q: CqKind> CompletionQueue<Q> {
    fn new(inner: CqInner, state: Q::PollState) -> Self {
        let empty_ring = Arc::new(Ring::new(1, QueueKind::Receive, 0));
        Self {
            poller: Poller {
                state,
                inner: Arc::new(inner),
                table: Table::default(),
                ring: Arc::as_ptr(&empty_ring),
                key: ring_cursor::NO_KEY,
                unsignaled_left: 0,
                empty_ring,
                entries_to_release: VecDeque::new(),
                drain_pending: false,
                taken: 0,
            },
        }
    }

    pub(crate) fn inner(&self) -> &Arc<CqInner> {
        &self.poller.inner
    }

    /// How many entries the queue has: as many as requested, or more.
    #[doc(alias = "cqe")]
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.inner().capacity()
    }

    /// How many entries no queue pair has reserved.
    #[must_use]
    pub fn unreserved(&self) -> u32 {
        self.poller.inner.registry().free()
    }

    /// Polls for completed requests without blocking (ibv_poll_cq(3)): at most 32 completions, and
    /// all the unsignaled requests that they confirm, in the order of each queue.
    ///
    /// Completions that the iterator has not yielded when it is dropped are yielded by the next
    /// call. A yielded request's slot is free at once, so a loop may alternate polling and posting.
    ///
    /// # Errors
    /// When the device cannot be polled any more.
    #[doc(alias = "ibv_poll_cq")]
    #[inline]
    #[doc(alias("ibv_start_poll", "ibv_next_poll", "ibv_end_poll"))]
    pub fn poll(&mut self) -> Result<Completions<'_, Q>, CompletionQueueError> {
        Q::refill(&mut self.poller)?;
        Ok(Completions::new(Q::cursor(&mut self.poller)))
    }
}

impl<Q: PollBackend> Poller<Q> {
    #[inline(always)]
    fn sync_table(&mut self) {
        if self.inner.registry.has_changed() {
            self.process_departures();
        }
    }

    /// Drops the buffers that destroyed queue pairs had in flight, and their rings.
    #[cold]
    fn process_departures(&mut self) {
        self.inner.registry.clear_changed();
        self.destroy_deferred();
        let mut registry = self.inner.registry();
        // As many as are in the queue now at most, which go first.
        let until = self.taken + u64::from(registry.capacity());
        let (departed, entries_to_release) = registry.apply_changes(&mut self.table, until);
        drop(registry);
        if entries_to_release != 0 {
            self.entries_to_release.push_back((until, entries_to_release));
        }
        self.drain_pending = self.has_departed();
        // The ring used last may be one of them.
        (self.ring, self.key) = (Arc::as_ptr(&self.empty_ring), ring_cursor::NO_KEY);
        // Outside the lock: this deregisters memory.
        drop(departed);
    }

    fn destroy_deferred(&self) {
        let deferred = self.inner.registry().take_deferred();
        // Outside the lock, which their destruction takes.
        drop(deferred);
    }

    fn has_departed(&self) -> bool {
        !self.entries_to_release.is_empty() || self.table.shared.has_detached()
    }

    /// After a poll that took `taken` completions or more, the last in the queue if `emptied`;
    /// those of earlier polls have been yielded. Releases what waits for the completions of
    /// destroyed queue pairs: a queue in steady use may never be found empty.
    #[cold]
    fn drain(&mut self, taken: u64, emptied: bool) {
        let taken_until = if emptied { u64::MAX } else { self.taken };
        let yielded_until = if taken == 0 { taken_until } else { self.taken };
        while let Some((until, entries)) = self.entries_to_release.front()
            && *until <= taken_until
        {
            self.inner.registry().release(*entries);
            self.entries_to_release.pop_front();
        }
        self.table.shared.drop_detached(yielded_until);
        self.drain_pending = self.has_departed();
        self.taken += taken;
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

// SAFETY: `ring` points into the poller's own table; the rest is Send and Sync.
unsafe impl<Q: PollBackend<PollState: Send>> Send for Poller<Q> {}
// SAFETY: as above; shared access only reads counts.
unsafe impl<Q: PollBackend<PollState: Sync>> Sync for Poller<Q> {}

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
        self.poller.destroy_deferred();
        // Rings that never reached the table now belong to their queue pairs alone.
        let arrivals = self.poller.inner.registry().close();
        drop(arrivals);
    }
}

impl Drop for CqInner {
    fn drop(&mut self) {
        if let Some(channel) = &*self.channel {
            // SAFETY: the queue is live, and was created with this id.
            unsafe { channel.ack_and_unregister_cq(self.id, self.raw) };
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
