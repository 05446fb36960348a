//! Polling an extended queue: calls make each completion current and read it (ibv_create_cq_ex(3)).
//!
//! A poll is open from a start that found a completion until its one end: when no completion is
//! left, or the cursor is dropped. A completion that it has not fully yielded is copied
//! (`held_completion`), as the provider may reuse it, for the next poll.

use core::marker::PhantomData;
use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use doorbell_verbs_sys::{self as sys, inline};

use super::held_completion::HeldCompletion;
use super::kind::{Cursor, Entry, ExtendedCq};
use super::ring_cursor::{Confirmed, Retired, RingCursor, confirm};
use super::{BATCH, Poller, this_thread};
use crate::error::CompletionQueueError;
use crate::memory::Buffers;

const ENOENT: i32 = nix::errno::Errno::ENOENT as i32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Closed,
    /// A completion is current and has not been read.
    Fresh,
    /// Completions have been read.
    Open,
    /// No poll is open, but a copy of a completion is held.
    Held,
}

/// The queue and the state of its poll.
pub struct ExtendedPoll {
    raw: *mut sys::ibv_cq_ex,
    /// The object with the current completion: the queue, or the copy.
    current: *mut sys::ibv_cq_ex,
    phase: Phase,
    /// Completions that the poll may still read, besides those that the cursor counts.
    budget: u64,
    failure: Option<i32>,
    held: NonNull<HeldCompletion>,
}

// SAFETY: any thread may call the queue, as the unique poller does; the copy is plain memory.
unsafe impl Send for ExtendedPoll {}
// SAFETY: shared access reads the phase only.
unsafe impl Sync for ExtendedPoll {}

impl ExtendedPoll {
    /// # Safety
    /// `raw` outlives this, and has the functions that poll.
    pub(super) unsafe fn new(raw: *mut sys::ibv_cq_ex) -> Self {
        Self {
            raw,
            current: raw,
            phase: Phase::Closed,
            budget: 0,
            failure: None,
            held: NonNull::from(Box::leak(HeldCompletion::new())),
        }
    }

    #[inline(always)]
    pub(super) fn has_unread(&self) -> bool {
        self.phase != Phase::Closed
    }
}

impl Drop for ExtendedPoll {
    fn drop(&mut self) {
        // SAFETY: from a box, by `new`; freed once.
        drop(unsafe { Box::from_raw(self.held.as_ptr()) });
    }
}

impl Poller<ExtendedCq> {
    #[inline(always)]
    fn end(&mut self) {
        self.state.phase = Phase::Closed;
        self.inner.polled_by.store(0, Ordering::Relaxed);
        // SAFETY: live, and this poll is open: it ends only here, where the phase changes.
        unsafe { inline::end_poll(self.state.current) };
    }

    /// Ends an open poll whose current completion still confirms requests, and holds a copy of it.
    #[cold]
    fn hold_current(&mut self) {
        let state = &mut self.state;
        if state.current == state.raw {
            // SAFETY: live, with a completion current; the copy is not, so nothing else uses it.
            unsafe { state.held.as_mut().copy(state.raw) };
        }
        self.end();
        self.state.phase = Phase::Held;
        self.unsignaled_left = 0;
    }

    /// Ends a poll left open by a leaked cursor, or by a refill without a cursor.
    pub(super) fn end_abandoned(&mut self) {
        if matches!(self.state.phase, Phase::Fresh | Phase::Open) {
            self.end();
        }
    }

    /// Starts a poll, if nothing is left to yield.
    #[inline(always)]
    pub(super) fn start(&mut self) -> Result<(), CompletionQueueError> {
        if self.state.phase != Phase::Closed && self.resume_previous() {
            return Ok(());
        }
        self.sync_table();
        // SAFETY: the queue is live, and has no open poll.
        let result = unsafe { inline::start_poll(self.state.raw) };
        if result != 0 {
            return self.not_started(result);
        }
        self.inner.polled_by.store(this_thread(), Ordering::Relaxed);
        if self.drain_pending {
            self.drain(1, false);
        }
        // Last, so that a cursor created right after need not check which object is current.
        self.state.current = self.state.raw;
        self.state.phase = Phase::Fresh;
        Ok(())
    }

    /// Resumes what an earlier poll has left. False when nothing is left.
    #[cold]
    #[inline(never)]
    fn resume_previous(&mut self) -> bool {
        if self.state.phase == Phase::Open {
            // Its cursor was leaked (mem::forget).
            if self.unsignaled_left == 0 {
                self.end();
                return false;
            }
            self.hold_current();
        }
        if self.state.phase == Phase::Held {
            self.state.current = self.state.held.as_ptr().cast();
            self.state.phase = Phase::Fresh;
        }
        true
    }

    #[inline(always)]
    fn not_started(&mut self, result: i32) -> Result<(), CompletionQueueError> {
        if result != ENOENT {
            return Err(self.failed("ibv_start_poll", result));
        }
        if let Some(result) = self.state.failure.take() {
            return Err(self.failed("ibv_next_poll", result));
        }
        if self.drain_pending {
            self.drain(0, true);
        }
        Ok(())
    }

    /// ibv_next_poll failed, or found the queue empty while `drain_pending` is set.
    #[cold]
    fn on_poll_end(&mut self, result: i32, cq: *mut sys::ibv_cq_ex) {
        if result != ENOENT {
            self.state.failure = Some(result);
        } else if cq == self.state.raw {
            self.drain(0, true);
        }
    }

    /// Makes the next completion the current one. False, with the poll ended, when there is none.
    #[inline(always)]
    fn next_poll(&mut self, cq: *mut sys::ibv_cq_ex) -> bool {
        // SAFETY: live, and its poll is open.
        let result = unsafe { inline::next_poll(cq) };
        if result == 0 {
            return true;
        }
        if result != ENOENT || self.drain_pending {
            self.on_poll_end(result, cq);
        }
        self.end();
        false
    }
}

/// Walks the completions of a poll, and ends it when dropped.
pub struct ExtendedCursor<'a> {
    poller: &'a mut Poller<ExtendedCq>,
    cq: *mut sys::ibv_cq_ex,
    next: RingCursor,
    /// The current *run*: completions, with this one, that may confirm requests one by one.
    left: u64,
}

impl<'a> ExtendedCursor<'a> {
    #[inline(always)]
    pub(super) fn new(poller: &'a mut Poller<ExtendedCq>) -> Self {
        Self {
            cq: poller.state.current,
            next: RingCursor::NONE,
            left: 1,
            poller,
        }
    }
}

impl Cursor<ExtendedCq> for ExtendedCursor<'_> {
    #[inline(always)]
    fn begin(&mut self) -> bool {
        if self.poller.state.phase == Phase::Closed {
            return false;
        }
        self.poller.state.phase = Phase::Open;
        let (next, in_flight) = RingCursor::of_last_ring(self.poller);
        let run = in_flight.min(BATCH as u64);
        if run != 0 {
            (self.next, self.left) = (next, run);
        }
        self.poller.state.budget = BATCH as u64 - self.left;
        true
    }

    #[inline(always)]
    fn advance(&mut self) -> Option<Buffers> {
        // SAFETY: live, and one of its completions is current.
        if unsafe { (*self.cq).wr_id } == self.next.expected {
            // Fast path: the very next request's completion. SAFETY: in a run it is in flight.
            Some(unsafe { self.next.take() })
        } else if self.poller.unsignaled_left > 1
            // SAFETY: this is the poller; with `unsignaled_left` > 1 the next request is in flight.
            && unsafe { self.next.has_buffers() }
        {
            // SAFETY: the current completion confirms it.
            let buffers = unsafe { self.next.take() };
            self.poller.unsignaled_left -= 1;
            Some(buffers)
        } else {
            let buffers;
            (self.next, self.left, buffers) = locate(self.poller, self.cq, self.left);
            buffers
        }
    }

    #[inline(always)]
    unsafe fn retire<'a>(&mut self) -> (ExtendedEntry<'a>, Retired<'a>) {
        let entry = ExtendedEntry {
            cq: self.cq,
            current: PhantomData,
        };
        // SAFETY: by contract.
        (entry, unsafe { self.next.retire() })
    }

    #[inline(always)]
    fn step(&mut self) -> bool {
        self.left -= 1;
        if self.left == 0 {
            if self.poller.unsignaled_left != 0 {
                self.left = 1;
                return true;
            }
            // The run is over: the next completion is located through the table.
            self.left = 1;
            self.next.expect_none();
            if self.poller.state.budget == 0 {
                self.poller.end();
                return false;
            }
            self.poller.state.budget -= 1;
        }
        self.poller.next_poll(self.cq)
    }

    #[inline(always)]
    fn resume(&mut self) -> bool {
        match self.poller.state.phase {
            Phase::Fresh => {
                self.poller.state.phase = Phase::Open;
                self.poller.state.budget = BATCH as u64 - self.left;
                true
            }
            Phase::Open => self.step(),
            Phase::Closed | Phase::Held => false,
        }
    }

    #[inline(always)]
    fn save_position(&mut self) {}
}

impl Drop for ExtendedCursor<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        match self.poller.state.phase {
            Phase::Open if self.poller.unsignaled_left == 0 => self.poller.end(),
            Phase::Open | Phase::Fresh => self.poller.hold_current(),
            Phase::Closed | Phase::Held => {}
        }
    }
}

/// Slow path of `advance`: takes the buffers of the next request, from the next completion if the
/// current one has none, and ends the poll when there is none.
#[cold]
#[inline(never)]
fn locate(poller: &mut Poller<ExtendedCq>, cq: *mut sys::ibv_cq_ex, left: u64) -> (RingCursor, u64, Option<Buffers>) {
    let mut allowed = poller.state.budget + left;
    loop {
        poller.unsignaled_left = 0;
        // SAFETY: live, and one of its completions is current.
        let wr_id = unsafe { (*cq).wr_id };
        // SAFETY: as above.
        let qp_num = || unsafe { (*cq).read_qp_num.map_or(0, |read| read(cq)) };
        if let Some(Confirmed {
            buffers,
            mut next,
            in_flight,
        }) = confirm(poller, wr_id, qp_num)
        {
            let mut run = allowed.min(in_flight);
            if poller.unsignaled_left != 0 {
                // No run: the completion's own request is not the only one that it confirms.
                next.hide_wr_id();
                run = 1;
            }
            poller.state.budget = allowed - run;
            return (next, run, Some(buffers));
        }
        allowed -= 1;
        if allowed == 0 {
            poller.end();
            break;
        }
        if !poller.next_poll(cq) {
            break;
        }
    }
    (RingCursor::NONE, 1, None)
}

/// The current completion of a poll.
#[derive(Clone, Copy)]
pub struct ExtendedEntry<'a> {
    cq: *mut sys::ibv_cq_ex,
    current: PhantomData<&'a sys::ibv_cq_ex>,
}

/// Reads a field of the current completion; 0 where a device lacks the function.
macro_rules! read {
    ($entry:expr, $call:ident) => {{
        let cq = $entry.cq;
        // SAFETY: live, and one of its completions is current as long as there is an entry.
        unsafe { (*cq).$call.map_or(0, |read| read(cq)) }
    }};
}

impl ExtendedEntry<'_> {
    pub(crate) fn ticks(self) -> Option<u64> {
        // SAFETY: as in `read`.
        unsafe { (*self.cq).read_completion_ts.map(|read| read(self.cq)) }
    }

    pub(crate) fn wallclock_ns(self) -> Option<u64> {
        // SAFETY: as in `read`.
        unsafe { (*self.cq).read_completion_wallclock_ns.map(|read| read(self.cq)) }
    }
}

impl Entry for ExtendedEntry<'_> {
    #[inline(always)]
    fn status(self) -> sys::ibv_wc_status {
        // SAFETY: as in `read`.
        unsafe { (*self.cq).status }
    }

    #[inline(always)]
    fn slot(self) -> u32 {
        // SAFETY: as in `read`.
        unsafe { (*self.cq).wr_id as u32 }
    }

    #[inline]
    fn opcode(self) -> sys::ibv_wc_opcode {
        read!(self, read_opcode)
    }

    #[inline]
    fn vendor_err(self) -> u32 {
        read!(self, read_vendor_err)
    }

    #[inline]
    fn byte_len(self) -> u32 {
        read!(self, read_byte_len)
    }

    #[inline]
    fn imm_data(self) -> u32 {
        read!(self, read_imm_data)
    }

    #[inline]
    fn src_qp(self) -> u32 {
        read!(self, read_src_qp)
    }

    #[inline]
    fn wc_flags(self) -> u32 {
        read!(self, read_wc_flags)
    }

    #[inline]
    fn pkey_index(self) -> Option<u16> {
        None
    }

    #[inline]
    fn slid(self) -> u16 {
        // The function returns 32 bits; LIDs have 16.
        read!(self, read_slid) as u16
    }

    #[inline]
    fn sl(self) -> u8 {
        read!(self, read_sl)
    }

    #[inline]
    fn dlid_path_bits(self) -> u8 {
        read!(self, read_dlid_path_bits)
    }
}
