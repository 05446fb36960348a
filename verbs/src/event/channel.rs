//! Completion channels: sleeping until completions come (IBTA vol 1, 10.10; ibv_get_cq_event(3)).
//!
//! A thread that reads the channel also reads events of other threads' queues: they are *recorded*
//! by queue, and each waiter takes its own ([`leader`](super::leader)).

use core::ffi::c_void;
use core::mem::ManuallyDrop;
use core::num::NonZeroUsize;
use core::sync::atomic::{AtomicUsize, Ordering};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use doorbell_verbs_sys as sys;

use super::leader::{EventSource, LeaderFollowers};
use crate::context::{Context, ContextInner};
use crate::error::{EventError, check};
use crate::raw::Lender;
use crate::wait::{Deadline, readable, set_nonblocking};

/// Events of one queue acknowledged by one call: acknowledging takes a lock (ibv_get_cq_event(3)).
const ACK_BATCH: u32 = 64;

/// Identifies a completion queue in events: unique in the process, and never reused.
#[doc(alias = "cq_context")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CqId(NonZeroUsize);

impl CqId {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        // 2^64 queues cannot be created.
        Self(NonZeroUsize::new(NEXT.fetch_add(1, Ordering::Relaxed)).unwrap_or(NonZeroUsize::MAX))
    }

    pub(crate) fn to_context(self) -> *mut c_void {
        core::ptr::without_provenance_mut(self.0.get())
    }

    /// The queue with this `cq_context`; `None` for one that this crate did not create.
    pub(crate) fn from_context(context: *mut c_void) -> Option<Self> {
        NonZeroUsize::new(context.addr()).map(Self)
    }
}

impl core::fmt::Display for CqId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}

/// A completion channel (ibv_create_comp_channel(3)): reports which of its completion queues has
/// completions, once per [arming](crate::CompletionQueue::arm). Clones are the same channel.
///
/// For one queue see [`CompletionQueue::wait`](crate::CompletionQueue::wait); to serve many:
///
/// ```no_run
/// use doorbell_verbs::{CompletionChannel, CompletionQueue, EventError, Notify};
///
/// fn serve(channel: &CompletionChannel, queues: &mut [CompletionQueue]) -> Result<(), EventError> {
///     loop {
///         for cq in &mut *queues {
///             // Arm first, then poll: a completion between the two is found by the poll, a later one raises an event.
///             cq.arm(Notify::Any)?;
///             while cq.poll()?.map(drop).count() > 0 {}
///         }
///         channel.wait(None)?;
///     }
/// }
/// ```
///
/// [`wait`](Self::wait) returns the queue's id. In an event loop of your own, watch the descriptor
/// ([`AsFd`]), which must not be read nor made blocking, and call [`try_next`](Self::try_next)
/// until it returns `None`.
#[doc(alias("ibv_comp_channel", "ibv_create_comp_channel", "ibv_destroy_comp_channel"))]
#[derive(Clone)]
pub struct CompletionChannel {
    inner: Arc<ChannelInner>,
}

pub(crate) struct ChannelInner {
    raw: *mut sys::ibv_comp_channel,
    context: ManuallyDrop<Arc<ContextInner>>,
    pub(super) waiters: LeaderFollowers<Record>,
    lender: Lender,
}

// SAFETY: only verbs get `raw`, from any thread; its `fd` is constant; the rest is Send and Sync.
unsafe impl Send for ChannelInner {}
// SAFETY: as above.
unsafe impl Sync for ChannelInner {}

#[derive(Default)]
pub(crate) struct Record {
    queues: HashMap<CqId, QueueRecord>,
    /// Queues with an event that no waiter has been given, oldest first.
    unreported: VecDeque<CqId>,
}

#[derive(Default)]
struct QueueRecord {
    event_count: u64,
    unacknowledged: u32,
    unreported: bool,
}

impl Record {
    pub(crate) fn next(&mut self) -> Option<CqId> {
        let id = self.unreported.pop_front()?;
        if let Some(queue) = self.queues.get_mut(&id) {
            queue.unreported = false;
        }
        Some(id)
    }

    fn event_count(&self, id: CqId) -> u64 {
        self.queues.get(&id).map_or(0, |queue| queue.event_count)
    }

    /// Whether queue `id` has had more than `seen` events; if so, takes its unreported one.
    pub(crate) fn take_event_since(&mut self, id: CqId, seen: u64) -> Option<()> {
        let queue = self.queues.get_mut(&id).filter(|queue| queue.event_count != seen)?;
        if core::mem::take(&mut queue.unreported) {
            self.unreported.retain(|other| *other != id);
        }
        Some(())
    }

    /// Adds an event of queue `id`. Returns how many of its events to acknowledge now.
    fn add(&mut self, id: Option<CqId>) -> u32 {
        let Some((id, queue)) = id.and_then(|id| Some((id, self.queues.get_mut(&id)?))) else {
            // Its queue is being destroyed, which waits for this acknowledgement.
            return 1;
        };
        queue.event_count += 1;
        queue.unacknowledged += 1;
        if !core::mem::replace(&mut queue.unreported, true) {
            self.unreported.push_back(id);
        }
        if queue.unacknowledged < ACK_BATCH {
            return 0;
        }
        core::mem::take(&mut queue.unacknowledged)
    }
}

impl CompletionChannel {
    pub(crate) fn new(context: &Context) -> Result<Self, EventError> {
        let context = context.inner();
        let failed = |error| EventError::CreateChannel {
            device: context.name.clone(),
            error,
        };
        // SAFETY: the context is live.
        let raw = unsafe { (context.api.create_comp_channel)(context.raw) };
        if raw.is_null() {
            return Err(failed(io::Error::last_os_error()));
        }
        // SAFETY: just created on this device.
        unsafe { Self::adopt(context, raw, None) }.map_err(failed)
    }

    /// # Safety
    /// `raw` is a live channel of this device without queues; only the lender, if any, destroys it.
    pub(crate) unsafe fn adopt(
        context: &Arc<ContextInner>,
        raw: *mut sys::ibv_comp_channel,
        lender: Lender,
    ) -> io::Result<Self> {
        let inner = ChannelInner {
            raw,
            context: ManuallyDrop::new(Arc::clone(context)),
            waiters: LeaderFollowers::default(),
            lender,
        };
        set_nonblocking(inner.fd())?;
        Ok(Self { inner: Arc::new(inner) })
    }

    pub(crate) fn inner(&self) -> &Arc<ChannelInner> {
        &self.inner
    }

    /// Sleeps until a queue has an event (ibv_get_cq_event(3)); `None` when `timeout` expired. A
    /// signal does not end it.
    ///
    /// The queue may be empty again, if another thread has polled it since.
    ///
    /// # Errors
    /// When the channel cannot be read: the device is gone.
    #[doc(alias("ibv_get_cq_event", "ibv_ack_cq_events"))]
    pub fn wait(&self, timeout: impl Into<Option<Duration>>) -> Result<Option<CqId>, EventError> {
        self.inner.wait(Deadline::after(timeout), Record::next)
    }

    /// The next queue that has an event, without blocking; `None` also if another thread gets it.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    #[doc(alias("ibv_get_cq_event", "ibv_ack_cq_events"))]
    pub fn try_next(&self) -> Result<Option<CqId>, EventError> {
        self.inner.try_find(&mut Record::next)
    }
}

impl ChannelInner {
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is live as long as `self`, and owns its descriptor.
        unsafe { BorrowedFd::borrow_raw((*self.raw).fd) }
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_comp_channel {
        self.raw
    }

    pub(crate) fn is_of(&self, context: &Context) -> bool {
        self.context.raw == context.inner().raw
    }

    pub(crate) fn register_cq(&self, id: CqId) {
        self.waiters
            .with(|record| record.queues.insert(id, QueueRecord::default()));
    }

    pub(crate) fn unregister_cq(&self, id: CqId) {
        self.waiters.with(|record| record.queues.remove(&id));
    }

    /// Removes a queue to be destroyed; acknowledges its events, which ibv_destroy_cq waits for.
    ///
    /// # Safety
    /// `cq` is live, and its `cq_context` is `id`.
    pub(crate) unsafe fn ack_and_unregister_cq(&self, id: CqId, cq: *mut sys::ibv_cq) {
        let removed = self.waiters.with(|record| {
            record.unreported.retain(|other| *other != id);
            record.queues.remove(&id)
        });
        let Some(queue) = removed else { return };
        if queue.unacknowledged > 0 {
            // SAFETY: the queue is live, and has had as many events that were not acknowledged.
            unsafe { (self.context.api.ack_cq_events)(cq, queue.unacknowledged) };
        }
    }

    pub(crate) fn event_count(&self, id: CqId) -> u64 {
        self.waiters.with(|record| record.event_count(id))
    }

    pub(super) fn failed(&self, error: io::Error) -> EventError {
        EventError::Wait {
            verb: "ibv_get_cq_event",
            device: self.context.name.clone(),
            error,
        }
    }

    pub(super) fn try_find<T>(&self, find: &mut impl FnMut(&mut Record) -> Option<T>) -> Result<Option<T>, EventError> {
        self.waiters.try_find(self, find)
    }

    pub(crate) fn wait<T>(
        &self,
        deadline: Deadline,
        find: impl FnMut(&mut Record) -> Option<T>,
    ) -> Result<Option<T>, EventError> {
        self.waiters.wait(self, deadline, find)
    }
}

impl EventSource<Record> for ChannelInner {
    type Error = EventError;

    fn read(&self, record: &mut Record) -> (bool, Result<(), EventError>) {
        let mut any = false;
        let result = loop {
            let (mut cq, mut context) = (core::ptr::null_mut(), core::ptr::null_mut());
            // SAFETY: the channel is live, and both may be written.
            if unsafe { (self.context.api.get_cq_event)(self.raw, &mut cq, &mut context) } != 0 {
                break io::Error::last_os_error();
            }
            any = true;
            let acknowledged = record.add(CqId::from_context(context));
            if acknowledged > 0 {
                // SAFETY: a queue lives at least until its events are acknowledged: these were not.
                unsafe { (self.context.api.ack_cq_events)(cq, acknowledged) };
            }
        };
        match result.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => (any, Ok(())),
            _ => (any, Err(self.failed(result))),
        }
    }

    fn sleep(&self, deadline: Deadline) -> Result<(), EventError> {
        match readable(self.fd(), deadline) {
            Ok(_) => Ok(()),
            Err(error) => Err(self.failed(error)),
        }
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.fd()
    }
}

impl AsRawFd for CompletionChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl core::fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("CompletionChannel")
            .field("device", &self.inner.context.name)
            .field("fd", &self.as_raw_fd())
            .finish_non_exhaustive()
    }
}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        let result = match self.lender {
            Some(_) => Ok(()),
            // SAFETY: the last reference: queues on it hold one until destroyed (or leak it).
            None => check(unsafe { (self.context.api.destroy_comp_channel)(self.raw) }),
        };
        match result {
            // SAFETY: dropped once, here; not used after.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.context) },
            Err(error) => {
                tracing::error!(device = %self.context.name, %error, "ibv_destroy_comp_channel failed; channel and context are leaked");
            }
        }
    }
}
