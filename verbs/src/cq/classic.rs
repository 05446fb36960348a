//! Polling a classic queue: ibv_poll_cq(3) fills an array, which the cursor walks.

use core::ptr::NonNull;

use doorbell_verbs_sys::{self as sys, inline};

use super::kind::{ClassicCq, Cursor};
use super::ring_cursor::{Confirmed, Retired, RingCursor, confirm};
use super::{BATCH, Poller};
use crate::error::CompletionQueueError;
use crate::memory::Buffers;

/// The array that the device writes, preceded by one entry that it does not.
type WcArray = [sys::ibv_wc; BATCH + 1];

/// The batch of work completions that the device wrote last.
pub struct WcBatch {
    /// The last completion that is consumed; those up to the last written are to be yielded.
    last: *const sys::ibv_wc,
    end: *const sys::ibv_wc,
    completions: NonNull<sys::ibv_wc>,
}

// SAFETY: the array is owned, and read and written only through the poller.
unsafe impl Send for WcBatch {}
// SAFETY: as above.
unsafe impl Sync for WcBatch {}

impl WcBatch {
    pub(super) fn new() -> Self {
        // SAFETY: all-zero is valid for integers, even where a provider does not write all.
        let completions: Box<WcArray> = Box::new(unsafe { core::mem::zeroed() });
        let completions = NonNull::from(Box::leak(completions)).cast();
        Self {
            last: completions.as_ptr(),
            end: completions.as_ptr(),
            completions,
        }
    }

    #[inline(always)]
    pub(super) fn has_unread(&self) -> bool {
        self.last != self.end
    }
}

impl Drop for WcBatch {
    fn drop(&mut self) {
        let completions = self.completions.cast::<WcArray>();
        // SAFETY: from a box, by `new`; freed once.
        drop(unsafe { Box::from_raw(completions.as_ptr()) });
    }
}

impl Poller<ClassicCq> {
    #[inline(always)]
    pub(super) fn fetch(&mut self) -> Result<(), CompletionQueueError> {
        if self.state.has_unread() {
            return Ok(());
        }
        self.sync_table();
        let before = self.state.completions.as_ptr();
        // SAFETY: the queue is live, and there are BATCH entries behind the first.
        let result = unsafe { inline::poll_cq(self.inner.raw, BATCH as i32, before.add(1)) };
        // Negative: failed. The comparison also catches more than BATCH.
        let fetched = result.cast_unsigned() as usize;
        if fetched > BATCH {
            return Err(self.failed("ibv_poll_cq", result));
        }
        self.state.last = before;
        // SAFETY: at most BATCH entries.
        self.state.end = unsafe { before.add(fetched) };
        if self.drain_pending {
            self.drain(fetched as u64, fetched < BATCH);
        }
        Ok(())
    }

    /// The last completion that is consumed, when `at` was taken last.
    #[inline(always)]
    fn last_done(&self, at: *const sys::ibv_wc) -> *const sys::ibv_wc {
        if self.unsignaled_left == 0 {
            return at;
        }
        // SAFETY: it still confirms requests: the device wrote it, in an entry after the first.
        unsafe { at.sub(1) }
    }
}

/// Walks the completions of the batch.
pub struct ClassicCursor<'a> {
    poller: &'a mut Poller<ClassicCq>,
    position: Position,
}

/// The cursor's position: everything that changes with every request, small enough for registers.
#[derive(Clone, Copy)]
struct Position {
    /// The completion taken last; consumed, unless it confirms more requests (`unsignaled_left`).
    at: *const sys::ibv_wc,
    /// The end of a *run*: the completions after `at` up to this one may confirm the ring's next
    /// requests one by one, so that comparing `wr_id` suffices.
    run_end: *const sys::ibv_wc,
    next: RingCursor,
}

// SAFETY: the pointers point into the poller, which is Send and Sync, and the poller is borrowed.
unsafe impl Send for ClassicCursor<'_> {}
// SAFETY: as above.
unsafe impl Sync for ClassicCursor<'_> {}

impl Position {
    fn without_run(at: *const sys::ibv_wc) -> Self {
        Self {
            at,
            run_end: at,
            next: RingCursor::NONE,
        }
    }

    /// A run behind `at`: as long as the completions written, or the requests in flight if fewer.
    /// It also ends where the slots wrap, as no completion has the `wr_id` expected there.
    #[inline(always)]
    fn run((next, in_flight): (RingCursor, u64), at: *const sys::ibv_wc, end: *const sys::ibv_wc) -> Self {
        let bytes = (end.addr() - at.addr()).min(in_flight as usize * size_of::<sys::ibv_wc>());
        Self {
            at,
            // SAFETY: not behind the last that the device wrote.
            run_end: unsafe { at.byte_add(bytes) },
            next,
        }
    }
}

impl<'a> ClassicCursor<'a> {
    #[inline(always)]
    pub(super) fn new(poller: &'a mut Poller<ClassicCq>) -> Self {
        poller.unsignaled_left = 0;
        let at = poller.state.last;
        Self {
            poller,
            position: Position {
                at,
                run_end: at,
                next: RingCursor::NONE,
            },
        }
    }
}

impl Cursor<ClassicCq> for ClassicCursor<'_> {
    /// Starts a run on the ring used last. It may end at once.
    #[inline(always)]
    fn begin(&mut self) -> bool {
        let poller = &*self.poller;
        if !poller.state.has_unread() {
            return false;
        }
        self.position = Position::run(RingCursor::of_last_ring(poller), poller.state.last, poller.state.end);
        true
    }

    #[inline(always)]
    fn resume(&mut self) -> bool {
        true
    }

    #[inline(always)]
    fn advance(&mut self) -> Option<Buffers> {
        let position = &mut self.position;
        // SAFETY: in a run, so there is another that the device wrote.
        if position.at != position.run_end && unsafe { (*position.at.add(1)).wr_id } == position.next.expected {
            // Fast path: the completion of the very next request. SAFETY: as above; in a run, the
            // request is in flight.
            unsafe {
                position.at = position.at.add(1);
                Some(position.next.take())
            }
        } else if self.poller.unsignaled_left > 1
            // SAFETY: this is the poller; with `unsignaled_left` > 1 the next request is in flight.
            && unsafe { position.next.has_buffers() }
        {
            // SAFETY: the current completion confirms it.
            let buffers = unsafe { position.next.take() };
            self.poller.unsignaled_left -= 1;
            Some(buffers)
        } else if position.at != self.poller.state.end || self.poller.unsignaled_left != 0 {
            let buffers;
            (*position, buffers) = locate(self.poller, position.at);
            buffers
        } else {
            None
        }
    }

    #[inline(always)]
    unsafe fn retire<'a>(&mut self) -> (&'a sys::ibv_wc, Retired<'a>) {
        // SAFETY: the device wrote it, and writes again in a poll only, which borrows mutably.
        let wc = unsafe { &*self.position.at };
        // SAFETY: by contract.
        (wc, unsafe { self.position.next.retire() })
    }

    #[inline(always)]
    fn step(&mut self) -> bool {
        true
    }

    #[inline(always)]
    fn save_position(&mut self) {
        self.poller.state.last = self.poller.last_done(self.position.at);
    }
}

/// Slow path of `advance`: the buffers of the next request, of this or the next completion.
#[cold]
#[inline(never)]
fn locate(poller: &mut Poller<ClassicCq>, at: *const sys::ibv_wc) -> (Position, Option<Buffers>) {
    let mut last = poller.last_done(at);
    poller.unsignaled_left = 0;
    while last != poller.state.end {
        // SAFETY: before the last that the device wrote.
        let at = unsafe { last.add(1) };
        // SAFETY: as above.
        let (wr_id, qp_num) = unsafe { ((*at).wr_id, (*at).qp_num) };
        if let Some(Confirmed {
            buffers,
            next,
            in_flight,
        }) = confirm(poller, wr_id, || qp_num)
        {
            let mut position = Position::run((next, in_flight), last, poller.state.end);
            position.at = at;
            if poller.unsignaled_left != 0 {
                position.run_end = at;
            }
            return (position, Some(buffers));
        }
        last = at;
    }
    (Position::without_run(last), None)
}
