//! Polling an extended queue: each completion is asked for by a call, and what it says by others, as long as it is the current one (ibv_create_cq_ex(3)).
//!
//! A poll is open from a start that found something to its end, which comes exactly once: when there is nothing more, or when the cursor is dropped. What an abandoned poll has at hand
//! and has not yielded all of is copied (`held`), as the provider has given it out, and the next poll begins with the copy.

use core::marker::PhantomData;
use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use doorbell_verbs_sys::{self as sys, inline};

use super::held::Held;
use super::kind::{Cursor, Entry, Extended};
use super::spot::{Confirmed, Retired, Spot, confirm};
use super::{BATCH, Poller, this_thread};
use crate::error::CompletionQueueError;
use crate::memory::Buffers;

/// What the calls return when the queue is empty.
const ENOENT: i32 = nix::errno::Errno::ENOENT as i32;

/// How far a poll has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// There is none.
    Closed,
    /// A completion is current, and not yet looked at.
    Fresh,
    /// Completions have been looked at.
    Open,
    /// There is none, but a copy of a completion is kept.
    Held,
}

/// The queue to be called, and how far that has come.
pub struct Calls {
    raw: *mut sys::ibv_cq_ex,
    /// What has the current completion: the queue, or the copy.
    current: *mut sys::ibv_cq_ex,
    phase: Phase,
    /// Completions that the poll may still look at, besides those that the cursor counts.
    budget: u64,
    /// What the call for the next completion failed with.
    failure: Option<i32>,
    /// The copy, from a box.
    held: NonNull<Held>,
}

// SAFETY: the queue may be called from any thread, by one at a time, which the poller sees to; the copy is plain memory.
unsafe impl Send for Calls {}
// SAFETY: shared access reads the phase only.
unsafe impl Sync for Calls {}

impl Calls {
    /// # Safety
    /// `raw` is live as long as this, and has the calls that poll.
    pub(super) unsafe fn new(raw: *mut sys::ibv_cq_ex) -> Self {
        Self {
            raw,
            current: raw,
            phase: Phase::Closed,
            budget: 0,
            failure: None,
            held: NonNull::from(Box::leak(Held::new())),
        }
    }

    #[inline(always)]
    pub(super) fn is_left(&self) -> bool {
        self.phase != Phase::Closed
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        // SAFETY: from a box, by `new`; freed once.
        drop(unsafe { Box::from_raw(self.held.as_ptr()) });
    }
}

impl Poller<Extended> {
    /// Ends an open poll.
    #[inline(always)]
    fn end(&mut self) {
        self.own.phase = Phase::Closed;
        self.inner.polled_by.store(0, Ordering::Relaxed);
        // SAFETY: live, and this poll is open: it is ended nowhere else, but where the phase becomes another.
        unsafe { inline::end_poll(self.own.current) };
    }

    /// Ends an open poll whose current completion is not done with, and keeps a copy of it.
    #[cold]
    fn hold(&mut self) {
        let own = &mut self.own;
        if own.current == own.raw {
            // SAFETY: live, and one of its completions is current; nobody else uses the copy, which is not current.
            unsafe { own.held.as_mut().copy(own.raw) };
        }
        self.end();
        self.own.phase = Phase::Held;
        self.series = 0;
    }

    /// Ends a poll that a forgotten cursor has left open, or a look whose poll never came.
    pub(super) fn abandon(&mut self) {
        if matches!(self.own.phase, Phase::Fresh | Phase::Open) {
            self.end();
        }
    }

    /// Starts a poll, if nothing is left.
    #[inline(always)]
    pub(super) fn start(&mut self) -> Result<(), CompletionQueueError> {
        if self.own.phase != Phase::Closed && self.go_on() {
            return Ok(());
        }
        self.settle();
        // SAFETY: the queue is live, and has no open poll.
        let result = unsafe { inline::start_poll(self.own.raw) };
        if result != 0 {
            return self.not_started(result);
        }
        self.inner.polled_by.store(this_thread(), Ordering::Relaxed);
        // Last, so that whoever begins to go through it at once need not look what it is.
        self.own.current = self.own.raw;
        self.own.phase = Phase::Fresh;
        Ok(())
    }

    /// Goes on with what an earlier poll has left. False when that is nothing.
    #[cold]
    #[inline(never)]
    fn go_on(&mut self) -> bool {
        if self.own.phase == Phase::Open {
            // Its cursor has been forgotten.
            if self.series == 0 {
                self.end();
                return false;
            }
            self.hold();
        }
        if self.own.phase == Phase::Held {
            // What it begins with.
            self.own.current = self.own.held.as_ptr().cast();
            self.own.phase = Phase::Fresh;
        }
        true
    }

    /// The queue is empty, or has failed.
    #[inline(always)]
    fn not_started(&mut self, result: i32) -> Result<(), CompletionQueueError> {
        if result != ENOENT {
            return Err(self.failed("ibv_start_poll", result));
        }
        if let Some(result) = self.own.failure.take() {
            return Err(self.failed("ibv_next_poll", result));
        }
        if self.settling {
            self.drained(true);
        }
        Ok(())
    }

    /// The call for the next completion has failed, or has found none since queue pairs have gone.
    #[cold]
    fn nothing_more(&mut self, result: i32, cq: *mut sys::ibv_cq_ex) {
        if result != ENOENT {
            self.own.failure = Some(result);
        } else if cq == self.own.raw {
            self.drained(true);
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
        if result != ENOENT || self.settling {
            self.nothing_more(result, cq);
        }
        self.end();
        false
    }
}

/// Goes through the completions of a poll, and ends it when dropped.
pub struct ExtendedCursor<'a> {
    poller: &'a mut Poller<Extended>,
    /// What has the current completion.
    cq: *mut sys::ibv_cq_ex,
    spot: Spot,
    /// How many completions, the current one among them, may be those of the ring's next requests, one by one, and may be looked at by this poll: a *run*.
    left: u64,
}

impl<'a> ExtendedCursor<'a> {
    #[inline(always)]
    pub(super) fn new(poller: &'a mut Poller<Extended>) -> Self {
        Self {
            cq: poller.own.current,
            spot: Spot::NOWHERE,
            left: 1,
            poller,
        }
    }
}

impl Cursor<Extended> for ExtendedCursor<'_> {
    #[inline(always)]
    fn begin(&mut self) -> bool {
        if self.poller.own.phase == Phase::Closed {
            return false;
        }
        self.poller.own.phase = Phase::Open;
        let (spot, in_flight) = Spot::last_of(self.poller);
        let run = in_flight.min(BATCH as u64);
        if run != 0 {
            (self.spot, self.left) = (spot, run);
        }
        self.poller.own.budget = BATCH as u64 - self.left;
        true
    }

    #[inline(always)]
    fn advance(&mut self) -> Option<Buffers> {
        // SAFETY: live, and one of its completions is current.
        if unsafe { (*self.cq).wr_id } == self.spot.expected {
            // The commonest: the completion of the very next request.
            // SAFETY: in a run, it is in flight.
            Some(unsafe { self.spot.take() })
        } else if self.poller.series > 1
            // SAFETY: we are the poller, and in a series the next request is in flight.
            && unsafe { self.spot.has_buffers() }
        {
            // SAFETY: the current completion confirms it.
            let buffers = unsafe { self.spot.take() };
            self.poller.series -= 1;
            Some(buffers)
        } else {
            let buffers;
            (self.spot, self.left, buffers) = locate(self.poller, self.cq, self.left);
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
        (entry, unsafe { self.spot.retire() })
    }

    #[inline(always)]
    fn follow(&mut self) -> bool {
        self.left -= 1;
        if self.left == 0 {
            if self.poller.series != 0 {
                // The current one confirms others.
                self.left = 1;
                return true;
            }
            // The next one is looked up.
            self.left = 1;
            self.spot.expect_none();
            if self.poller.own.budget == 0 {
                self.poller.end();
                return false;
            }
            self.poller.own.budget -= 1;
        }
        self.poller.next_poll(self.cq)
    }

    #[inline(always)]
    fn resume(&mut self) -> bool {
        match self.poller.own.phase {
            Phase::Fresh => {
                self.poller.own.phase = Phase::Open;
                self.poller.own.budget = BATCH as u64 - self.left;
                true
            }
            Phase::Open => self.follow(),
            Phase::Closed | Phase::Held => false,
        }
    }

    #[inline(always)]
    fn put_down(&mut self) {}
}

impl Drop for ExtendedCursor<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        match self.poller.own.phase {
            Phase::Open if self.poller.series == 0 => self.poller.end(),
            Phase::Open | Phase::Fresh => self.poller.hold(),
            Phase::Closed | Phase::Held => {}
        }
    }
}

/// Takes what the next request has posted, whatever its completion is: goes on to that of a request in flight, if the current one is of none. Ends the poll when there is none. `left` is
/// the cursor's.
#[cold]
#[inline(never)]
fn locate(poller: &mut Poller<Extended>, cq: *mut sys::ibv_cq_ex, left: u64) -> (Spot, u64, Option<Buffers>) {
    let mut allowed = poller.own.budget + left;
    loop {
        poller.series = 0;
        // SAFETY: live, and one of its completions is current.
        let wr_id = unsafe { (*cq).wr_id };
        // SAFETY: as above.
        let qp_num = || unsafe { (*cq).read_qp_num.map_or(0, |read| read(cq)) };
        if let Some(Confirmed {
            buffers,
            mut spot,
            in_flight,
        }) = confirm(poller, wr_id, qp_num)
        {
            let mut run = allowed.min(in_flight);
            if poller.series != 0 {
                // No run: the current completion's own request is not to be taken for the only one that it confirms.
                spot.disguise();
                run = 1;
            }
            poller.own.budget = allowed - run;
            return (spot, run, Some(buffers));
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
    (Spot::NOWHERE, 1, None)
}

/// The current completion of a poll.
#[derive(Clone, Copy)]
pub struct ExtendedEntry<'a> {
    cq: *mut sys::ibv_cq_ex,
    /// As long as it is current.
    current: PhantomData<&'a sys::ibv_cq_ex>,
}

/// What one of the queue's calls says of its current completion; 0 where a device does not have it.
macro_rules! read {
    ($entry:expr, $call:ident) => {{
        let cq = $entry.cq;
        // SAFETY: live, and one of its completions is current as long as there is an entry.
        unsafe { (*cq).$call.map_or(0, |read| read(cq)) }
    }};
}

impl ExtendedEntry<'_> {
    /// When it completed, by the device's clock, if that was asked for.
    pub(crate) fn ticks(self) -> Option<u64> {
        // SAFETY: as in `read`.
        unsafe { (*self.cq).read_completion_ts.map(|read| read(self.cq)) }
    }

    /// When it completed, in nanoseconds of the time of day, if that was asked for.
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
        // The call gives it room for more, which LIDs of 16 bits don't need.
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
