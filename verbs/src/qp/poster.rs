//! The producer side of a work queue: writes requests into WQE slots, and posts or reclaims them.
//!
//! *Slots left* are the requests that may be staged before the next *checkpoint*, where the queue
//! may be full or a signal due: the fast path checks no more than one decrement.

use core::ffi::{c_int, c_uint};
use core::mem::ManuallyDrop;
use std::io;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::backend::{QpHandle, Receives, WorkQueue, WqeSlot, WqeSlots};
use super::connected::UdLimits;
use super::post_error::{PostError, PostTarget, RejectReason, RejectedBatch};
use super::ring::{QueueKind, Ring};
use crate::memory::{Buffers, TiedWindows};
use crate::wr::payload::{Limits, Payload};

// fields: one queue's state of posting, used on the fast path or at a checkpoint
pub(crate) struct Poster<L: WorkQueue> {
    next: *mut WqeSlot<L::Wr>,
    /// Slots that may be filled before the checkpoint; `u64::MAX` after an attempt that found none.
    slots_left: u64,
    pub(super) ring: Arc<Ring>,
    qp: *mut sys::ibv_qp,
    /// `bad_wr`: the request that the provider rejected in the last failed call; initialised to
    /// null. Kept here, as a stack frame for it would cost as much as the rest of a call.
    bad_wr: *mut L::Wr,
    pub(super) limits: Limits,
    pub(super) ud: UdLimits,
    /// The smaller of the two below; the next request's position is `checkpoint - slots_left`.
    checkpoint: u64,
    /// The first position beyond the queue: the tail as last read, plus the depth.
    full_at: u64,
    /// The position whose request is always signaled: `interval` after the last signaled one.
    signal_at: u64,
    interval: u64,
    depth: u64,
    wqe_slots: WqeSlots<L::Wr>,
    rejection: Option<Box<Rejection>>,
    pub(super) tied_windows: TiedWindows,
}

struct Rejection {
    reason: RejectReason,
    at: u64,
    /// `signal_at` of the poster at that moment.
    signal_at: u64,
    /// The buffers of the rejected request and of those after it.
    buffers: Vec<Buffers>,
}

/// Selective signaling: which requests the library signals by itself.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SignalPolicy {
    /// None: every request has a completion (`sq_sig_all`, receives).
    None,
    /// When the queue is full, a completion is in flight that frees at least half of it.
    EveryHalfQueue,
}

impl Poster<Receives> {
    /// Of a queue pair whose receives are posted elsewhere: it has no slot.
    pub(super) fn of_no_queue(qp: *mut sys::ibv_qp) -> Self {
        let ring = Arc::new(Ring::new(0, QueueKind::Receive, 0));
        let limits = Limits {
            max_inline: 0,
            max_sge: 1,
        };
        // SAFETY: the ring is fresh; without a slot nothing is posted, so `qp` is not accessed.
        unsafe { Self::new(qp, ring, 0, limits, SignalPolicy::None) }
    }
}

// SAFETY: `qp` is only passed to verbs, which any thread may call; slots and ring are Send.
unsafe impl<L: WorkQueue> Send for Poster<L> {}
// SAFETY: shared access only reads counters.
unsafe impl<L: WorkQueue> Sync for Poster<L> {}

impl<L: WorkQueue> Poster<L> {
    /// # Safety
    /// `qp` outlives the poster, the ring's only one; `key` is the ring's in its completion queue.
    pub(crate) unsafe fn new(
        qp: *mut sys::ibv_qp,
        ring: Arc<Ring>,
        key: u32,
        limits: Limits,
        signaling: SignalPolicy,
    ) -> Self {
        let depth = u64::from(ring.depth());
        // SAFETY: the poster holds the ring as long as the slots, whose drop does not access it.
        let wqes = unsafe { WqeSlots::new(&ring, limits.max_sge, key, L::new_wr) };
        let interval = match signaling {
            SignalPolicy::None => u64::MAX / 2,
            SignalPolicy::EveryHalfQueue => (depth / 2).max(1),
        };
        let mut poster = Self {
            next: wqes.at(0),
            slots_left: 0,
            ring,
            qp,
            bad_wr: core::ptr::null_mut(),
            limits,
            ud: UdLimits::default(),
            checkpoint: 0,
            full_at: depth,
            signal_at: interval - 1,
            interval,
            depth,
            wqe_slots: wqes,
            rejection: None,
            tied_windows: TiedWindows::default(),
        };
        poster.set_checkpoint(0);
        poster
    }

    #[inline(always)]
    pub(super) fn qp(&self) -> QpHandle<'_> {
        QpHandle::new(&self.qp)
    }

    pub(super) fn first(&self) -> *mut WqeSlot<L::Wr> {
        self.next
    }

    pub(crate) fn head(&self) -> u64 {
        self.ring.head()
    }

    pub(crate) fn in_flight(&self) -> u32 {
        self.ring.in_flight()
    }

    pub(crate) fn depth(&self) -> u32 {
        self.ring.depth()
    }

    /// False at a checkpoint: `take_slot_at_checkpoint` must follow.
    #[inline(always)]
    pub(crate) fn try_take_slot(&mut self) -> bool {
        let (left, none) = self.slots_left.overflowing_sub(1);
        self.slots_left = left;
        !none
    }

    /// Posts one request, which `write` writes into its slot.
    ///
    /// # Safety
    /// A slot was taken. `write` writes the whole work request, without successor, with `payload`,
    /// which keeps to the limits, and does not panic; inline data is readable until this returns.
    #[inline(always)]
    pub(crate) unsafe fn post_one<P: Payload>(
        &mut self,
        payload: P,
        write: impl FnOnce(QpHandle<'_>, *mut WqeSlot<L::Wr>, &P),
    ) -> Result<(), PostError> {
        // SAFETY: a slot was taken, so that the WQE slot and its buffer slot are the poster's; both
        // live as long as it. The queue pair is live. The buffers are owned by the ring from here
        // on, which keeps them until completed, or until the queue pair is destroyed.
        let result = unsafe {
            L::begin_one(self.qp());
            let wqe = self.next;
            write(self.qp(), wqe, &payload);
            self.next = (*wqe).next_slot;
            (*(*wqe).buffers).set(payload.into_buffers().into_head());
            // Before the doorbell: the device may complete it at once.
            self.ring.publish_one();
            L::ring_doorbell(QpHandle::new(&self.qp), wqe, &mut self.bad_wr)
        };
        if result == 0 {
            return Ok(());
        }
        Err(self.reclaim_unposted_one(result))
    }

    /// Posts one signaled request by a verb of its own: `call` gets the wr_id, returns an errno.
    pub(super) fn post_by_verb(
        &mut self,
        verb: &'static str,
        buffers: Buffers,
        call: impl FnOnce(*mut sys::ibv_qp, u64) -> c_int,
    ) -> Result<(), PostError> {
        if !self.try_take_slot() && self.take_slot_at_checkpoint(0).is_none() {
            return Err(self.reject_one(None, buffers));
        }
        self.note_signaled();
        let wqe = self.next;
        // SAFETY: a slot was taken: WQE slot and buffer slot are the poster's, and live as long.
        let wr_id = unsafe {
            self.next = (*wqe).next_slot;
            (*(*wqe).buffers).set(buffers.into_head());
            L::wr_id(&(*wqe).wr)
        };
        // Before the device may complete it.
        self.ring.publish_one();
        let result = call(self.qp, wr_id);
        if result == 0 {
            return Ok(());
        }
        // The provider does not report the rejected request, but there is only one.
        self.bad_wr = wqe.cast();
        let mut rejected = self.reclaim_unposted_one(result);
        if let RejectReason::Device { verb: named, .. } = &mut rejected.reason {
            *named = verb;
        }
        Err(rejected)
    }

    #[cold]
    #[inline(never)]
    pub(super) fn reject_one(&mut self, reason: Option<RejectReason>, buffers: Buffers) -> PostError {
        self.reject_next(reason, buffers);
        self.reject_batch()
    }

    #[cold]
    #[inline(never)]
    fn reclaim_unposted_one(&mut self, result: c_int) -> PostError {
        self.reclaim_unposted(self.wqe_slots.previous(self.next), result)
    }

    #[inline(always)]
    fn set_checkpoint(&mut self, position: u64) {
        self.checkpoint = self.full_at.min(self.signal_at);
        self.slots_left = self.checkpoint - position;
    }

    /// The request that took the last slot is signaled: the next forced one is an interval away.
    #[inline(always)]
    pub(super) fn note_signaled(&mut self) {
        let next = self.checkpoint - self.slots_left;
        self.signal_at = next - 1 + self.interval;
        self.set_checkpoint(next);
    }

    /// Rewinds to `head`: the counters are as if later requests had never been staged.
    fn rewind_to(&mut self, head: u64) {
        // The last signaled request before them may be unknown: signal the next one.
        if self.signal_at >= head.saturating_add(self.interval) {
            self.signal_at = head;
        }
        self.full_at = self.ring.retired() + self.depth;
        self.set_checkpoint(head);
    }

    /// Re-reads the tail and decides whether the request must be signaled: `flags`, perhaps with
    /// `IBV_SEND_SIGNALED`, or `None` when the queue is full or the batch is rejected.
    #[inline(always)]
    pub(super) fn take_slot_at_checkpoint(&mut self, flags: c_uint) -> Option<c_uint> {
        let position = self.checkpoint;
        self.full_at = self.ring.retired() + self.depth;
        // Never in a rejected batch: `reject_next` sets `signal_at` out of reach.
        let must = position == self.signal_at;
        if position == self.full_at || !must && self.rejection.is_some() {
            self.slots_left = 0;
            return None;
        }
        if must || flags & sys::IBV_SEND_SIGNALED != 0 {
            self.signal_at = position + self.interval;
        }
        self.set_checkpoint(position + 1);
        Some(if must { flags | sys::IBV_SEND_SIGNALED } else { flags })
    }

    /// Rejects the batch for `reason` or a full queue; keeps buffers of this and later requests.
    #[cold]
    #[inline(never)]
    pub(super) fn reject_next(&mut self, reason: Option<RejectReason>, buffers: Buffers) {
        let at = self.checkpoint - self.slots_left;
        let depth = self.ring.depth();
        let signal_at = self.signal_at;
        let rejection = self.rejection.get_or_insert_with(|| {
            Box::new(Rejection {
                reason: reason.unwrap_or(RejectReason::QueueFull { depth }),
                at,
                signal_at,
                buffers: Vec::new(),
            })
        });
        rejection.buffers.push(buffers);
        // No request takes the fast path, nor is one signaled, until the rejection is returned.
        (self.checkpoint, self.slots_left, self.signal_at) = (at, 0, u64::MAX);
    }

    /// Reclaims the staged requests of a rejected batch, which the provider has aborted.
    #[cold]
    #[inline(never)]
    fn reject_batch(&mut self) -> PostError {
        let head = self.head();
        let rejection = self.rejection.take().expect("reject_next has left one");
        let mut buffers = self.unstage(head, rejection.at);
        buffers.extend(rejection.buffers);
        self.signal_at = rejection.signal_at;
        self.rewind_to(head);
        Box::new(RejectedBatch {
            queue: PostTarget::QueuePair(self.ring.qpn(), self.ring.queue()),
            index: (rejection.at - head) as usize,
            reason: rejection.reason,
            posted: 0,
            buffers,
        })
    }

    /// Reclaims the requests from `first` on that the provider did not accept: from `bad_wr` on.
    #[cold]
    #[inline(never)]
    fn reclaim_unposted(&mut self, first: *mut WqeSlot<L::Wr>, result: c_int) -> PostError {
        let error = match result {
            errno if errno > 0 => io::Error::from_raw_os_error(errno),
            _ => io::Error::last_os_error(),
        };
        let end = self.head();
        // A batch that fills the queue ends at the slot where it began.
        let count = match self.wqe_slots.distance(first, self.next) {
            0 => self.ring.mask() + 1,
            count => count,
        };
        // Without a report of this chain it is unknown which were accepted: all stay in flight.
        let bad = self
            .wqe_slots
            .find(core::mem::replace(&mut self.bad_wr, core::ptr::null_mut()));
        let accepted = if L::REPORTS_BAD_WR {
            bad.map(|wqe| self.wqe_slots.distance(first, wqe))
                .filter(|&accepted| accepted < count)
                .unwrap_or(count)
        } else {
            0
        };
        let head = end - count + accepted;
        self.ring.publish(head);
        self.next = self.wqe_slots.at(head);
        let buffers = self.unstage(head, end);
        self.rewind_to(head);
        let posted = accepted as usize;
        Box::new(RejectedBatch {
            queue: PostTarget::QueuePair(self.ring.qpn(), self.ring.queue()),
            index: posted,
            reason: RejectReason::Device { verb: L::VERB, error },
            posted,
            buffers,
        })
    }

    fn unstage(&mut self, from: u64, to: u64) -> Vec<Buffers> {
        // SAFETY: put there by staging, not published (any more), taken once: the caller rewinds.
        (from..to)
            .map(|position| unsafe { self.ring.reclaim(position) })
            .collect()
    }
}

/// A batch being built, discarded when dropped before [`finish`](Self::finish) by a panic.
pub(crate) struct Staging<'q, L: WorkQueue> {
    pub(super) poster: &'q mut Poster<L>,
    /// The slot of the next request; that of the first once the batch is rejected.
    pub(super) next: *mut WqeSlot<L::Wr>,
}

impl<'q, L: WorkQueue> Staging<'q, L> {
    #[inline(always)]
    pub(crate) fn new(poster: &'q mut Poster<L>) -> Self {
        let next = poster.next;
        // SAFETY: the queue pair is live; a batch that was begun before was completed or aborted.
        unsafe { L::begin(poster.qp()) };
        Self { poster, next }
    }

    pub(crate) fn len(&self) -> u64 {
        self.poster.checkpoint - self.poster.slots_left - self.poster.head()
    }

    /// Posts all staged requests: one doorbell.
    #[inline(always)]
    pub(crate) fn finish(self) -> Result<(), PostError> {
        let mut this = ManuallyDrop::new(self);
        let next = this.next;
        let poster = &mut *this.poster;
        if next == poster.next {
            return poster.finish_empty_or_full();
        }
        poster.post_staged(next)
    }
}

impl<L: WorkQueue> Poster<L> {
    #[inline(always)]
    fn post_staged(&mut self, next: *mut WqeSlot<L::Wr>) -> Result<(), PostError> {
        let first = self.next;
        let last = self.wqe_slots.previous(next);
        self.next = next;
        // Before the doorbell: the device may complete them at once.
        self.ring.publish(self.checkpoint - self.slots_left);
        // SAFETY: the queue pair is live. These slots were written as staging requires; the ring
        // owns their buffers until completed, or until the queue pair is destroyed.
        let result = unsafe {
            L::end_chain(last);
            L::ring_doorbell(QpHandle::new(&self.qp), first, &mut self.bad_wr)
        };
        if result == 0 {
            return Ok(());
        }
        Err(self.reclaim_unposted(first, result))
    }

    /// A batch that ends at the slot where it began: rejected, empty, or filling the queue.
    #[cold]
    #[inline(never)]
    fn finish_empty_or_full(&mut self) -> Result<(), PostError> {
        let empty = self.checkpoint - self.slots_left == self.head();
        if empty || self.rejection.is_some() {
            // SAFETY: begun in `Staging::new`, and neither completed nor aborted.
            unsafe { L::abort(self.qp()) };
        }
        if self.rejection.is_some() {
            return Err(self.reject_batch());
        }
        if empty {
            return Ok(());
        }
        self.post_staged(self.next)
    }

    #[cold]
    #[inline(never)]
    fn discard(&mut self) {
        // SAFETY: begun in `Staging::new`, and neither completed nor aborted.
        unsafe { L::abort(self.qp()) };
        let (head, next) = (self.head(), self.checkpoint - self.slots_left);
        drop(self.unstage(head, next));
        if let Some(rejection) = self.rejection.take() {
            self.signal_at = rejection.signal_at;
        }
        self.rewind_to(head);
    }
}

impl<L: WorkQueue> Drop for Staging<'_, L> {
    /// Reached only when the closure that builds the batch unwinds.
    #[inline(always)]
    fn drop(&mut self) {
        self.poster.discard();
    }
}

/// Stages a request, which `write` writes at `next`, keeps its buffers, and advances `next`.
///
/// # Safety
/// A slot was taken, and the payload keeps to the limits. `write` writes the whole work request,
/// with `payload`, and does not panic. Inline data is readable until the batch is finished.
#[inline(always)]
pub(crate) unsafe fn push<L: WorkQueue, P: Payload>(
    poster: &mut Poster<L>,
    next: &mut *mut WqeSlot<L::Wr>,
    payload: P,
    write: impl FnOnce(QpHandle<'_>, *mut WqeSlot<L::Wr>, &P),
) {
    let wqe = *next;
    write(poster.qp(), wqe, &payload);
    // SAFETY: by contract this is one of the WQE slots of `head..full_at`, the poster's.
    unsafe {
        *next = (*wqe).next_slot;
        (*(*wqe).buffers).set(payload.into_buffers().into_head());
    }
}
