//! Staging a batch: requests are written into the queue's forms, counted, and given to the provider by one doorbell, or taken back.
//!
//! What changes with every request is the form that comes next, and how many *turns* are left: how many requests may be staged before something has to be looked
//! after, be it that the queue may be full or that a request must be signalled. So one count, going down, is the only check that a request in the middle of a
//! batch costs; everything else waits for it to pass zero.

use core::ffi::{c_int, c_uint};
use core::mem::ManuallyDrop;
use std::io;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::backend::{QpHandle, WorkQueue, WqeSlot, WqeSlots};
use super::connected::UdLimits;
use super::post_error::{Reason, Refused, RefusedBatch, RefusedBy};
use super::ring::Ring;
use crate::memory::{Buffers, TiedWindows};
use crate::wr::payload::{Limits, Payload};

/// The poster's side of one queue.
pub(crate) struct Poster<L: WorkQueue> {
    /// The form of the next request to be posted.
    next: *mut WqeSlot<L::Wr>,
    /// Turns left for requests to be staged; one too few, `u64::MAX`, when one could not be taken.
    slots_left: u64,
    ring: Arc<Ring>,
    qp: *mut sys::ibv_qp,
    /// Which request the provider has refused, as it said in the last call that failed; null before it is made. Here, as a stack frame for it would cost as
    /// much as the rest of a call.
    bad_wr: *mut L::Wr,
    pub(super) limits: Limits,
    pub(super) ud: UdLimits,
    /// The position at which something has to be looked after: the smaller of the two below. `checkpoint - left` is the position of the next request to be staged.
    checkpoint: u64,
    /// The position that would be one too many: the tail when last looked at, plus the depth.
    full_at: u64,
    /// The position whose request is signalled in any case: `interval` after the last one signalled.
    signal_at: u64,
    interval: u64,
    /// The ring's.
    depth: u64,
    wqe_slots: WqeSlots<L::Wr>,
    /// Why the batch being built is refused, if it is.
    rejection: Option<Box<Rejection>>,
    /// The memory windows that go with the queue pair.
    pub(super) tied_windows: TiedWindows,
}

struct Rejection {
    reason: Reason,
    /// The position of the refused request.
    at: u64,
    /// The poster's, as it was then.
    signal_at: u64,
    /// The buffers of the refused request and those after it.
    buffers: Vec<Buffers>,
}

/// Which requests of a queue are signalled without being asked to.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SignalPolicy {
    /// None: the device signals each.
    None,
    /// One at least every half queue: when the queue is full, a completion is on its way, and frees at least half of it.
    EveryHalfQueue,
}

// SAFETY: `qp` is only passed to verbs, which may be called from any thread; forms and ring are Send.
unsafe impl<L: WorkQueue> Send for Poster<L> {}
// SAFETY: shared access only reads counters.
unsafe impl<L: WorkQueue> Sync for Poster<L> {}

impl<L: WorkQueue> Poster<L> {
    /// # Safety
    /// `qp` is live as long as the poster is used; the poster is the ring's only one; `key` is the ring's in its completion queue.
    pub(crate) unsafe fn new(
        qp: *mut sys::ibv_qp,
        ring: Arc<Ring>,
        key: u32,
        limits: Limits,
        signalling: SignalPolicy,
    ) -> Self {
        let depth = u64::from(ring.depth());
        // SAFETY: the poster holds the ring as long as the forms, in whatever order it drops them: forms don't look at it then.
        let forms = unsafe { WqeSlots::new(&ring, limits.max_sge, key, L::new_wr) };
        let interval = match signalling {
            SignalPolicy::None => u64::MAX / 2,
            SignalPolicy::EveryHalfQueue => (depth / 2).max(1),
        };
        let mut poster = Self {
            next: forms.at(0),
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
            wqe_slots: forms,
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

    /// The form of the next request to be posted.
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

    /// Takes the turn of the next request. False when something has to be looked after before: `make_room` is to follow.
    #[inline(always)]
    pub(crate) fn try_take_slot(&mut self) -> bool {
        let (left, none) = self.slots_left.overflowing_sub(1);
        self.slots_left = left;
        !none
    }

    /// Posts one request, `write`n into a form.
    ///
    /// # Safety
    /// It has its turn. `write` writes the request of its line completely, with none to follow, with `payload`, which keeps
    /// to the queue pair's limits, and does not panic; inline data stays readable until this returns.
    #[inline(always)]
    pub(crate) unsafe fn post_one<P: Payload>(
        &mut self,
        payload: P,
        write: impl FnOnce(QpHandle<'_>, *mut WqeSlot<L::Wr>, &P),
    ) -> Result<(), Refused> {
        // SAFETY: there is room, so that the slot and the form are the poster's; both live as long as it. The queue pair is live. The buffers are owned by the
        // ring from here on, which keeps them until completed, or until the queue pair is destroyed.
        let result = unsafe {
            L::begin_one(self.qp());
            let form = self.next;
            write(self.qp(), form, &payload);
            self.next = (*form).next_slot;
            (*(*form).buffers).set(payload.into_buffers().into_head());
            // Before the device may complete it.
            self.ring.publish_one();
            L::ring_doorbell(QpHandle::new(&self.qp), form, &mut self.bad_wr)
        };
        if result == 0 {
            return Ok(());
        }
        Err(self.reclaim_unposted_one(result))
    }

    /// Posts one signalled request that the provider has a `call` of its own for, which is given the request's identity, and returns 0 or an errno value.
    pub(super) fn post_by_verb(
        &mut self,
        verb: &'static str,
        buffers: Buffers,
        call: impl FnOnce(*mut sys::ibv_qp, u64) -> c_int,
    ) -> Result<(), Refused> {
        if !self.try_take_slot() && self.take_slot_at_checkpoint(0).is_none() {
            return Err(self.reject_one(None, buffers));
        }
        self.note_signaled();
        let form = self.next;
        // SAFETY: it has its turn, so that the slot and the form are the poster's; both live as long as it.
        let wr_id = unsafe {
            self.next = (*form).next_slot;
            (*(*form).buffers).set(buffers.into_head());
            L::wr_id(&(*form).wr)
        };
        // Before the device may complete it.
        self.ring.publish_one();
        let result = call(self.qp, wr_id);
        if result == 0 {
            return Ok(());
        }
        // The provider does not name the request, but there is only one.
        self.bad_wr = form.cast();
        let mut refused = self.reclaim_unposted_one(result);
        if let Reason::Device { verb: named, .. } = &mut refused.reason {
            *named = verb;
        }
        Err(refused)
    }

    /// Refuses one request that was posted by itself.
    #[cold]
    #[inline(never)]
    pub(super) fn reject_one(&mut self, reason: Option<Reason>, buffers: Buffers) -> Refused {
        self.reject_next(reason, buffers);
        self.reject_batch()
    }

    /// Takes back the request just posted, which the provider did not accept.
    #[cold]
    #[inline(never)]
    fn reclaim_unposted_one(&mut self, result: c_int) -> Refused {
        self.reclaim_unposted(self.wqe_slots.previous(self.next), result)
    }

    /// Sets the checkpoint, and the turns left until then for requests of `position` and after.
    #[inline(always)]
    fn set_checkpoint(&mut self, position: u64) {
        self.checkpoint = self.full_at.min(self.signal_at);
        self.slots_left = self.checkpoint - position;
    }

    /// The request that has just taken its turn is signalled: the next one that must be is an interval away.
    #[inline(always)]
    pub(super) fn note_signaled(&mut self) {
        let next = self.checkpoint - self.slots_left;
        self.signal_at = next - 1 + self.interval;
        self.set_checkpoint(next);
    }

    /// Requests from `head` on are forgotten: the counters are as if they had never been staged.
    fn rewind_to(&mut self, head: u64) {
        // If one of them was signalled, it is not known which was before it: the next one is, to be safe.
        if self.signal_at >= head.saturating_add(self.interval) {
            self.signal_at = head;
        }
        self.full_at = self.ring.retired() + self.depth;
        self.set_checkpoint(head);
    }

    /// Looks after what has to be before the next request, whose turn `take_turn` could not take, and takes it. Gives the `flags` that were asked for, and those that it
    /// needs besides; `None` when the queue is full, or the batch refused.
    #[inline(always)]
    pub(super) fn take_slot_at_checkpoint(&mut self, flags: c_uint) -> Option<c_uint> {
        let position = self.checkpoint;
        self.full_at = self.ring.retired() + self.depth;
        // Not in a batch refused: `refuse_next` has seen to that.
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

    /// Refuses the next request, for `reason` or because the queue is full, and so the batch. Keeps its buffers for the refusal, or those of any request after it.
    #[cold]
    #[inline(never)]
    pub(super) fn reject_next(&mut self, reason: Option<Reason>, buffers: Buffers) {
        let at = self.checkpoint - self.slots_left;
        let depth = self.ring.depth();
        let signal_at = self.signal_at;
        let refusal = self.rejection.get_or_insert_with(|| {
            Box::new(Rejection {
                reason: reason.unwrap_or(Reason::QueueFull { depth }),
                at,
                signal_at,
                buffers: Vec::new(),
            })
        });
        refusal.buffers.push(buffers);
        // No request passes by the quick way until the refusal is given, nor because it must be signalled.
        (self.checkpoint, self.slots_left, self.signal_at) = (at, 0, u64::MAX);
    }

    /// Takes back what was staged, because `refuse_next` has refused one of the batch. None is begun any more.
    #[cold]
    #[inline(never)]
    fn reject_batch(&mut self) -> Refused {
        let head = self.head();
        let refusal = self.rejection.take().expect("refuse_next has left one");
        let mut buffers = self.unstage(head, refusal.at);
        buffers.extend(refusal.buffers);
        self.signal_at = refusal.signal_at;
        self.rewind_to(head);
        Box::new(RefusedBatch {
            queue: RefusedBy::QueueOf(self.ring.qpn(), self.ring.queue()),
            index: (refusal.at - head) as usize,
            reason: refusal.reason,
            posted: 0,
            buffers,
        })
    }

    /// Takes back what the provider did not accept of the requests just posted, of which `first` is the first: from that at `bad` on.
    #[cold]
    #[inline(never)]
    fn reclaim_unposted(&mut self, first: *mut WqeSlot<L::Wr>, result: c_int) -> Refused {
        let error = match result {
            errno if errno > 0 => io::Error::from_raw_os_error(errno),
            _ => io::Error::last_os_error(),
        };
        let end = self.head();
        // As many as fill the queue end where they began.
        let count = match self.wqe_slots.distance(first, self.next) {
            0 => self.ring.mask() + 1,
            count => count,
        };
        // A provider that names no request of this chain leaves open which it took: then they all stay in flight, where nothing can touch them.
        let bad = self
            .wqe_slots
            .find(core::mem::replace(&mut self.bad_wr, core::ptr::null_mut()));
        let accepted = if L::REPORTS_BAD_WR {
            bad.map(|form| self.wqe_slots.distance(first, form))
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
        Box::new(RefusedBatch {
            queue: RefusedBy::QueueOf(self.ring.qpn(), self.ring.queue()),
            index: posted,
            reason: Reason::Device { verb: L::VERB, error },
            posted,
            buffers,
        })
    }

    /// Takes the buffers of `from..to` out of their slots.
    fn unstage(&mut self, from: u64, to: u64) -> Vec<Buffers> {
        // SAFETY: all of them were put there by staging, are not published (or no more), and are taken once: the caller forgets them.
        (from..to)
            .map(|position| unsafe { self.ring.take_back(position) })
            .collect()
    }
}

/// A batch being built: what it has staged of a poster's queue. Dropped before [`finish`](Self::finish), by an unwinding panic, it takes all back.
pub(crate) struct Staging<'q, L: WorkQueue> {
    pub(super) poster: &'q mut Poster<L>,
    /// The form of the next request. Once the batch is refused, that of its first: it ends as if it were empty.
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

    /// How many requests are staged.
    pub(crate) fn len(&self) -> u64 {
        self.poster.checkpoint - self.poster.slots_left - self.poster.head()
    }

    /// Gives all that was staged to the provider: one doorbell.
    #[inline(always)]
    pub(crate) fn finish(self) -> Result<(), Refused> {
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
    /// Gives what was staged up to `next` to the provider, which is at least one request.
    #[inline(always)]
    fn post_staged(&mut self, next: *mut WqeSlot<L::Wr>) -> Result<(), Refused> {
        let first = self.next;
        let last = self.wqe_slots.previous(next);
        self.next = next;
        // Before the device may complete them.
        self.ring.publish(self.checkpoint - self.slots_left);
        // SAFETY: the queue pair is live. Each of these forms was written as staging requires; their buffers are owned by the ring, which keeps them until completed,
        // or until the queue pair is destroyed.
        let result = unsafe {
            L::end_chain(last);
            L::ring_doorbell(QpHandle::new(&self.qp), first, &mut self.bad_wr)
        };
        if result == 0 {
            return Ok(());
        }
        Err(self.reclaim_unposted(first, result))
    }

    /// Finishes a batch that ends where it began: a refused one, an empty one, or one that fills the queue.
    #[cold]
    #[inline(never)]
    fn finish_empty_or_full(&mut self) -> Result<(), Refused> {
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

    /// Takes back all of a batch, because the closure that builds it has panicked.
    #[cold]
    #[inline(never)]
    fn discard(&mut self) {
        // SAFETY: begun in `Staging::new`, and neither completed nor aborted.
        unsafe { L::abort(self.qp()) };
        let (head, next) = (self.head(), self.checkpoint - self.slots_left);
        drop(self.unstage(head, next));
        if let Some(refusal) = self.rejection.take() {
            self.signal_at = refusal.signal_at;
        }
        self.rewind_to(head);
    }
}

impl<L: WorkQueue> Drop for Staging<'_, L> {
    /// Only an unwinding panic in the closure that builds the batch comes here.
    #[inline(always)]
    fn drop(&mut self) {
        self.poster.discard();
    }
}

/// Stages a request, `write`n into the form at `next`, and keeps its payload's buffers. `next` becomes the form of the next one.
///
/// # Safety
/// It has its turn, and the payload keeps to the queue pair's limits. `write` writes the request of its line completely, with `payload`, and does not panic.
/// Inline data stays readable until the batch is finished.
#[inline(always)]
pub(crate) unsafe fn push<L: WorkQueue, P: Payload>(
    poster: &mut Poster<L>,
    next: &mut *mut WqeSlot<L::Wr>,
    payload: P,
    write: impl FnOnce(QpHandle<'_>, *mut WqeSlot<L::Wr>, &P),
) {
    let form = *next;
    write(poster.qp(), form, &payload);
    // SAFETY: the slots of `head..full_at` are the poster's, and so are their forms: by contract this is one of them.
    unsafe {
        *next = (*form).next_slot;
        (*(*form).buffers).set(payload.into_buffers().into_head());
    }
}
