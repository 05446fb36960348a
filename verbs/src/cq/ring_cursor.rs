//! The poller's cursor on a ring: what both kinds of queue do with a completion's `wr_id`.
//!
//! Its loads of a ring's words are proved by the models in `cq/model.rs`.

use std::sync::Arc;

use super::kind::PollBackend;
use super::{Poller, shared};
use crate::memory::Buffers;
use crate::qp::{Ring, Slot};

/// The next request of a ring. It changes with every request: a value that fits registers.
#[derive(Clone, Copy)]
pub(super) struct RingCursor {
    /// The request's `wr_id`, and its slot; past the last slot a `wr_id` that no request has.
    pub(super) expected: u64,
    slot: *const Slot,
    /// The position of a request on the ring, as long as slots are contiguous, less `expected`.
    offset: u64,
    ring: *const Ring,
}

/// The upper half of a `wr_id`: its ring's key.
const KEY: u64 = !0 << 32;

/// A key that no ring has.
pub(super) const NO_KEY: u64 = 1;

/// A `wr_id` that no request has, nor do those above it: slots have 31 bits.
const NO_WR_ID: u64 = 1 << 31;

impl RingCursor {
    pub(super) const NONE: Self = Self {
        expected: NO_WR_ID,
        slot: core::ptr::null(),
        offset: 0,
        ring: core::ptr::null(),
    };

    /// The unretired request at `position` of this ring, and how many are in flight from there.
    #[inline(always)]
    pub(super) fn at(ring: &Ring, key: u64, position: u64) -> (Self, u64) {
        let (slot, in_flight) = ring.from(position);
        let expected = key | ring.slot_of(position);
        let next = Self {
            expected,
            slot,
            offset: position.wrapping_sub(expected),
            ring,
        };
        (next, in_flight)
    }

    #[inline(always)]
    pub(super) fn of_last_ring<Q: PollBackend>(poller: &Poller<Q>) -> (Self, u64) {
        // SAFETY: `empty_ring`, or in the poller's table.
        let ring = unsafe { &*poller.ring };
        Self::at(ring, poller.key, ring.tail())
    }

    #[inline(always)]
    pub(super) fn expect_none(&mut self) {
        self.expected = NO_WR_ID;
    }

    /// Behind a confirmed request of an SRQ that counts in `ring`: no `wr_id` is expected.
    pub(super) fn for_shared_receive(ring: &Ring) -> Self {
        Self {
            // So that the position is the ring's tail.
            offset: ring.tail().wrapping_add(1).wrapping_sub(NO_WR_ID),
            ring,
            ..Self::NONE
        }
    }

    /// The position stays, but no `wr_id` matches it any more.
    pub(super) fn hide_wr_id(&mut self) {
        self.offset = self.offset.wrapping_add(self.expected).wrapping_sub(NO_WR_ID);
        self.expected = NO_WR_ID;
    }

    /// # Safety
    /// The caller is the poller, and the request is in flight.
    #[inline(always)]
    pub(super) unsafe fn has_buffers(&self) -> bool {
        // SAFETY: the slot is the poller's.
        unsafe { (*self.slot).get() }.is_some()
    }

    /// Takes the request's buffers, and moves to the next slot; [`retire`](Self::retire) follows.
    ///
    /// # Safety
    /// The caller is the poller, the request is in flight, and a completion has confirmed it.
    #[inline(always)]
    pub(super) unsafe fn take(&mut self) -> Buffers {
        // SAFETY: by contract the list is the poller's; taken once, as the tail then moves past it.
        unsafe {
            let buffers = Buffers::from_head((*self.slot).get());
            self.slot = self.slot.add(1);
            self.expected += 1;
            buffers
        }
    }

    /// Returns the slot just taken from to the poster.
    ///
    /// # Safety
    /// [`take`](Self::take) was just called; the poller that keeps the ring stays borrowed for 'a.
    #[inline(always)]
    pub(super) unsafe fn retire<'a>(&self) -> Retired<'a> {
        // SAFETY: the poller keeps the ring; `process_departures` and `drain` need the poller.
        let ring = unsafe { &*self.ring };
        ring.retire_next();
        Retired {
            ring,
            position: self.expected.wrapping_add(self.offset).wrapping_sub(1),
        }
    }
}

/// Which request has been retired.
#[derive(Clone, Copy)]
pub struct Retired<'a> {
    pub(crate) ring: &'a Ring,
    pub(crate) position: u64,
}

pub(super) struct Confirmed {
    /// Of the first confirmed request that has any, else of the completion's own. To be retired.
    pub(super) buffers: Buffers,
    /// The cursor behind that request.
    pub(super) next: RingCursor,
    /// How many requests of the ring are in flight, that one included.
    pub(super) in_flight: u64,
}

/// Finds the first request that the completion with this `wr_id` confirms, skipping requests
/// without buffers. Sets `poller.unsignaled_left`. `None` when it is of no request in flight, as
/// one of a destroyed queue pair.
///
/// A receive that came from an SRQ belongs to the queue pair `qp_num`.
pub(super) fn confirm<Q: PollBackend>(
    poller: &mut Poller<Q>,
    wr_id: u64,
    qp_num: impl FnOnce() -> u32,
) -> Option<Confirmed> {
    let key = wr_id & KEY;
    if key != poller.key {
        if shared::is_shared(key) {
            return shared::confirm(poller, wr_id, qp_num());
        }
        let table_key = (key >> 32) as u32;
        poller.ring = match poller.table.get(table_key) {
            Some(ring) => Arc::as_ptr(ring),
            None => find_new_ring(poller, table_key)?,
        };
        poller.key = key;
    }
    // SAFETY: `empty_ring`, which no key matches, or in the poller's table.
    let ring = unsafe { &*poller.ring };
    let mut tail = ring.tail();
    let Some(mut before) = ring.unretired_before(wr_id as u32, tail) else {
        report_unexpected(wr_id, ring);
        return None;
    };
    // SAFETY: this is the poller, and all these requests are in flight.
    while before != 0 && unsafe { ring.is_vacant(tail) } {
        (tail, before) = (tail + 1, before - 1);
    }
    ring.retire(tail);
    let (mut next, in_flight) = RingCursor::at(ring, key, tail);
    // SAFETY: in flight, and confirmed (IBTA vol 1, 10.8.5.1: a completion of a send queue implies
    // that those posted before it are complete).
    let buffers = unsafe { next.take() };
    poller.unsignaled_left = match before {
        0 => 0,
        // One of them is taken; the others count as far as their slots are contiguous.
        _ => 1 + (before - 1).min(ring.mask() - ring.slot_of(tail)),
    };
    Some(Confirmed {
        buffers,
        next,
        in_flight,
    })
}

#[cold]
#[inline(never)]
fn find_new_ring<Q: PollBackend>(poller: &mut Poller<Q>, key: u32) -> Option<*const Ring> {
    poller.inner.registry().add_arrivals(&mut poller.table);
    poller.table.get(key).map(Arc::as_ptr)
}

/// A completion of nothing in flight: the device completes twice, or what was never posted.
#[cold]
#[inline(never)]
pub(super) fn report_unexpected(wr_id: u64, ring: &Ring) {
    tracing::error!(wr_id, qpn = %ring.qpn(), "a completion of no request in flight; ignored");
}
