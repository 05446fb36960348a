//! Staging a batch: requests are written into the queue's forms, counted, and given to the provider by one doorbell, or taken back.
//!
//! What changes with every request ([`Cursor`]) is two words that live in registers: the form that comes next, and how many requests may be staged before
//! something has to be looked after, be it that the queue may be full or that a request must be signalled. So one count, going down, is the only check that a
//! request in the middle of a batch costs; everything else waits for it to reach zero.

use core::ffi::{c_int, c_uint};
use core::mem::ManuallyDrop;
use std::io;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::backend::{Form, Forms, Line};
use super::refused::{Reason, Refused, RefusedBatch};
use super::ring::Ring;
use crate::memory::Buffers;
use crate::wr::payload::{Limits, Payload};

/// The poster's side of one queue.
pub(crate) struct Poster<L: Line> {
    /// Of the next request.
    cursor: Cursor<L>,
    ring: Arc<Ring>,
    qp: *mut sys::ibv_qp,
    /// Which request the provider has refused, as it said in the last call that failed; null before it is made. Here, as a stack frame for it would cost as
    /// much as the rest of a call.
    bad: *mut L::Request,
    pub(super) limits: Limits,
    /// The position at which something has to be looked after: the smaller of the two below. `checkpoint - left` is the position of the next request.
    checkpoint: u64,
    /// The position that would be one too many: the tail when last looked at, plus the depth.
    full_at: u64,
    /// The position whose request is signalled in any case: `interval` after the last one signalled.
    signal_at: u64,
    interval: u64,
    forms: Forms<L::Request>,
    /// Why the batch being built is refused, if it is.
    refusal: Option<Box<Refusal>>,
}

/// Where the next request goes.
#[repr(C)]
pub(crate) struct Cursor<L: Line> {
    /// Its form. While a batch is being refused, that of the batch's first request: it ends as if it were empty.
    next: *mut Form<L::Request>,
    /// How many requests may be staged before something has to be looked after.
    left: u64,
}

impl<L: Line> Clone for Cursor<L> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<L: Line> Copy for Cursor<L> {}

impl<L: Line> Cursor<L> {
    /// Whether the next request may simply be staged, if it fits the queue pair's limits.
    #[inline(always)]
    pub(super) fn has_left(&self) -> bool {
        self.left != 0
    }
}

struct Refusal {
    reason: Reason,
    /// The position of the refused request.
    at: u64,
    /// The buffers of the refused request and those after it.
    buffers: Vec<Buffers>,
}

/// Which requests of a queue are signalled without being asked to.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Signalling {
    /// None: the device signals each.
    Never,
    /// One at least every half queue: when the queue is full, a completion is on its way, and frees at least half of it.
    EveryHalf,
}

// SAFETY: `qp` is only passed to verbs, which may be called from any thread; forms and ring are Send.
unsafe impl<L: Line> Send for Poster<L> {}
// SAFETY: shared access only reads counters.
unsafe impl<L: Line> Sync for Poster<L> {}

impl<L: Line> Poster<L> {
    /// # Safety
    /// `qp` is live as long as the poster is used; the poster is the ring's only one; `key` is the ring's in its completion queue.
    pub(crate) unsafe fn new(
        qp: *mut sys::ibv_qp,
        ring: Arc<Ring>,
        key: u32,
        limits: Limits,
        signalling: Signalling,
    ) -> Self {
        let depth = u64::from(ring.depth());
        // SAFETY: the poster holds the ring as long as the forms, in whatever order it drops them: forms don't look at it then.
        let forms = unsafe { Forms::new(&ring, limits.max_sge, key, L::request) };
        let interval = match signalling {
            Signalling::Never => u64::MAX / 2,
            Signalling::EveryHalf => (depth / 2).max(1),
        };
        let mut poster = Self {
            cursor: Cursor {
                next: forms.at(0),
                left: 0,
            },
            ring,
            qp,
            bad: core::ptr::null_mut(),
            limits,
            checkpoint: 0,
            full_at: depth,
            signal_at: interval - 1,
            interval,
            forms,
            refusal: None,
        };
        poster.cursor.left = poster.count_from(0);
        poster
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

    /// Takes the place of the next request of a queue to which nothing is being staged. False when something has to be looked after before.
    #[inline(always)]
    pub(crate) fn take_turn(&mut self) -> bool {
        let (left, none) = self.cursor.left.overflowing_sub(1);
        self.cursor.left = left;
        !none
    }

    /// Posts one request, `write`n into a form. Returns what the provider said.
    ///
    /// # Safety
    /// `take_turn` returned true for it. `write` writes the request of its line completely, with none to follow, with `payload`, which keeps to the queue pair's limits, and does not panic;
    /// inline data stays readable until this returns. If the result is not 0, `take_back_one` is called next.
    #[inline(always)]
    pub(crate) unsafe fn post_one<P: Payload>(
        &mut self,
        payload: P,
        write: impl FnOnce(*mut sys::ibv_qp, *mut Form<L::Request>, &P),
    ) -> c_int {
        // SAFETY: there is room, so that the slot and the form are the poster's; both live as long as it. The queue pair is live. The buffers are owned by the
        // ring from here on, which keeps them until completed, or until the queue pair is destroyed.
        unsafe {
            let form = self.cursor.next;
            write(self.qp, form, &payload);
            self.cursor.next = (*form).following;
            *(*(*form).slot).get() = payload.into_buffers().into_head();
            // Before the device may complete it.
            self.ring.publish_one();
            L::ring(self.qp, form, &mut self.bad)
        }
    }

    /// Takes back the request just posted, if the provider did not accept it: `result` is what [`post_one`](Self::post_one) returned.
    #[cold]
    #[inline(never)]
    pub(crate) fn take_back_one(&mut self, result: c_int) -> Refused {
        self.take_back(self.forms.before(self.cursor.next), result)
    }

    /// Sets the checkpoint, and says how many requests may be staged until then, the next one being that of `position`.
    #[inline(always)]
    fn count_from(&mut self, position: u64) -> u64 {
        self.checkpoint = self.full_at.min(self.signal_at);
        self.checkpoint - position
    }

    /// The request before the cursor, of which `left` is the count, is signalled: the next one that must be is an interval away. Returns the new count.
    #[inline(always)]
    fn signalled(&mut self, left: u64) -> u64 {
        let next = self.checkpoint - left;
        self.signal_at = next - 1 + self.interval;
        self.count_from(next)
    }

    /// Requests from `head` on are forgotten: the counters are as if they had never been staged.
    fn forget_from(&mut self, head: u64) {
        // If one of them was signalled, it is not known which was before it: the next one is, to be safe.
        if self.signal_at >= head.saturating_add(self.interval) {
            self.signal_at = head;
        }
        self.full_at = self.ring.retired() + u64::from(self.ring.depth());
        self.cursor.left = self.count_from(head);
    }

    /// Looks after what has to be, for the request that is next at `cursor`, and that does not pass for `reason`, if there is one. Says with which flags it may
    /// be staged after all; else its buffers, and those of all after it, are to be kept with the refusal.
    pub(super) fn reconsider(&mut self, cursor: &mut Cursor<L>, reason: Option<Reason>) -> Option<c_uint> {
        if self.refusal.is_some() {
            return None;
        }
        let position = self.checkpoint - cursor.left;
        self.full_at = self.ring.retired() + u64::from(self.ring.depth());
        let full = || Reason::QueueFull {
            depth: self.ring.depth(),
        };
        if let Some(reason) = reason.or_else(|| (position == self.full_at).then(full)) {
            self.refusal = Some(Box::new(Refusal {
                reason,
                at: position,
                buffers: Vec::new(),
            }));
            // No request passes by the quick way, and the batch ends as if it were empty, until the refusal is given.
            self.checkpoint = position;
            *cursor = Cursor {
                next: self.cursor.next,
                left: 0,
            };
            return None;
        }
        let flags = if position == self.signal_at {
            sys::IBV_SEND_SIGNALED
        } else {
            0
        };
        // At least one until the checkpoint: the request at hand, if it is signalled here, moves it when staged.
        self.checkpoint = self.full_at.min(self.signal_at.max(position + 1));
        cursor.left = self.checkpoint - position;
        Some(flags)
    }

    /// Keeps the buffers of a request that `reconsider` has refused.
    pub(super) fn keep(&mut self, buffers: Buffers) {
        if let Some(refusal) = &mut self.refusal {
            refusal.buffers.push(buffers);
        }
    }

    /// Takes back what was staged, because one of the batch was refused here, whose refusal this is.
    fn refuse(&mut self, refusal: Refusal) -> Refused {
        let head = self.head();
        let mut buffers = self.unstage(head, refusal.at);
        buffers.extend(refusal.buffers);
        self.forget_from(head);
        Box::new(RefusedBatch {
            index: (refusal.at - head) as usize,
            reason: refusal.reason,
            posted: 0,
            buffers,
        })
    }

    /// Takes back what the provider did not accept of the requests just posted, of which `first` is the first: from that at `bad` on.
    #[cold]
    #[inline(never)]
    fn take_back(&mut self, first: *mut Form<L::Request>, result: c_int) -> Refused {
        let error = match result {
            errno if errno > 0 => io::Error::from_raw_os_error(errno),
            _ => io::Error::last_os_error(),
        };
        let end = self.head();
        // As many as fill the queue end where they began.
        let count = match self.forms.between(first, self.cursor.next) {
            0 => self.ring.mask() + 1,
            count => count,
        };
        // A provider that names no request of this chain leaves open which it took: then they all stay in flight, where nothing can touch them.
        let accepted = self
            .forms
            .find(core::mem::replace(&mut self.bad, core::ptr::null_mut()))
            .map(|form| self.forms.between(first, form))
            .filter(|&accepted| accepted < count)
            .unwrap_or(count);
        let head = end - count + accepted;
        self.ring.publish(head);
        self.cursor.next = self.forms.at(head);
        let buffers = self.unstage(head, end);
        self.forget_from(head);
        let posted = accepted as usize;
        Box::new(RefusedBatch {
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
pub(crate) struct Staging<'q, L: Line> {
    pub(super) poster: &'q mut Poster<L>,
    pub(super) cursor: Cursor<L>,
}

impl<'q, L: Line> Staging<'q, L> {
    #[inline(always)]
    pub(crate) fn new(poster: &'q mut Poster<L>) -> Self {
        let cursor = poster.cursor;
        Self { poster, cursor }
    }

    /// As [`new`](Self::new), for a request that did not pass by the short way, perhaps because `take_turn` returned false.
    pub(crate) fn restarted(poster: &'q mut Poster<L>) -> Self {
        if poster.cursor.left == u64::MAX {
            poster.cursor.left = 0;
        }
        Self::new(poster)
    }

    /// How many requests are staged.
    pub(crate) fn len(&self) -> u64 {
        self.poster.checkpoint - self.cursor.left - self.poster.head()
    }

    /// Gives all that was staged to the provider: one doorbell.
    #[inline(always)]
    pub(crate) fn finish(self) -> Result<(), Refused> {
        let mut this = ManuallyDrop::new(self);
        let cursor = this.cursor;
        let poster = &mut *this.poster;
        if cursor.next == poster.cursor.next {
            return poster.finish_unusual(cursor.left);
        }
        poster.hand_over(cursor)
    }
}

impl<L: Line> Poster<L> {
    /// Gives what was staged up to `cursor` to the provider, which is at least one request.
    #[inline(always)]
    fn hand_over(&mut self, cursor: Cursor<L>) -> Result<(), Refused> {
        let first = self.cursor.next;
        let last = self.forms.before(cursor.next);
        self.cursor = cursor;
        // Before the device may complete them.
        self.ring.publish(self.checkpoint - cursor.left);
        // SAFETY: the queue pair is live. Each of these forms was written as staging requires; their buffers are owned by the ring, which keeps them until completed,
        // or until the queue pair is destroyed.
        let result = unsafe {
            L::end(last);
            L::ring(self.qp, first, &mut self.bad)
        };
        if result == 0 {
            return Ok(());
        }
        Err(self.take_back(first, result))
    }

    /// Finishes a batch that ends where it began: a refused one, an empty one, or one that fills the queue.
    #[cold]
    #[inline(never)]
    fn finish_unusual(&mut self, left: u64) -> Result<(), Refused> {
        if let Some(refusal) = self.refusal.take() {
            return Err(self.refuse(*refusal));
        }
        if self.checkpoint - left == self.head() {
            self.cursor.left = left;
            return Ok(());
        }
        self.hand_over(Cursor {
            next: self.cursor.next,
            left,
        })
    }

    /// Takes back all of a batch that was staged up to `left`, because the closure that builds it has panicked.
    #[cold]
    #[inline(never)]
    fn abandon(&mut self, left: u64) {
        let (head, next) = (self.head(), self.checkpoint - left);
        drop(self.unstage(head, next));
        self.refusal = None;
        self.forget_from(head);
    }
}

impl<L: Line> Drop for Staging<'_, L> {
    /// Only an unwinding panic in the closure that builds the batch comes here.
    #[inline(always)]
    fn drop(&mut self) {
        self.poster.abandon(self.cursor.left);
    }
}

/// Stages the next request, with `flags` (`ibv_send_flags`), `write`n into a form: takes its place at `cursor` and keeps its payload's buffers.
///
/// # Safety
/// `cursor.left` is not 0, and the payload keeps to the queue pair's limits. `write` writes the request of its line completely, with `payload`, and does not panic.
/// Inline data stays readable until the batch is finished.
#[inline(always)]
pub(crate) unsafe fn push<L: Line, P: Payload>(
    poster: &mut Poster<L>,
    cursor: &mut Cursor<L>,
    payload: P,
    signalled: bool,
    write: impl FnOnce(*mut sys::ibv_qp, *mut Form<L::Request>, &P),
) {
    cursor.left -= 1;
    if signalled {
        cursor.left = poster.signalled(cursor.left);
    }
    let form = cursor.next;
    write(poster.qp, form, &payload);
    // SAFETY: the slots of `head..full_at` are the poster's, and so are their forms: by contract `next` is one of them.
    unsafe {
        cursor.next = (*form).following;
        *(*(*form).slot).get() = payload.into_buffers().into_head();
    }
}
