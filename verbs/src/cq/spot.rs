//! Where on a ring the poller is: what both kinds of queue do with a completion, once they have its `wr_id`.

use std::sync::Arc;

use super::kind::Machinery;
use super::{Poller, shared};
use crate::memory::Buffers;
use crate::qp::{Ring, Slot};

/// The next request of a ring. It changes with every request, so it is a value that can live in registers.
#[derive(Clone, Copy)]
pub(super) struct Spot {
    /// Its `wr_id`, and its slot. Where the slots come to their end, these are the `wr_id` that no request has, and no slot.
    pub(super) expected: u64,
    slot: *const Slot,
    /// The position of a request of the ring, as long as slots follow one another, less `expected`.
    offset: u64,
    ring: *const Ring,
}

/// The upper half of a `wr_id`: its ring's key.
const KEY: u64 = !0 << 32;

/// What no ring has as its key.
pub(super) const NO_KEY: u64 = 1;

/// What no request has as its `wr_id`, nor are those from there on: slots have 31 bits.
const NO_WR_ID: u64 = 1 << 31;

impl Spot {
    /// No request.
    pub(super) const NOWHERE: Self = Self {
        expected: NO_WR_ID,
        slot: core::ptr::null(),
        offset: 0,
        ring: core::ptr::null(),
    };

    /// The request at `position` of the ring with this key, which is not retired, and how many are in flight from there on.
    #[inline(always)]
    pub(super) fn of(ring: &Ring, key: u64, position: u64) -> (Self, u64) {
        let (slot, in_flight) = ring.from(position);
        let expected = key | ring.slot_of(position);
        let spot = Self {
            expected,
            slot,
            offset: position.wrapping_sub(expected),
            ring,
        };
        (spot, in_flight)
    }

    /// The next request of the ring that was at hand last.
    #[inline(always)]
    pub(super) fn last_of<Q: Machinery>(poller: &Poller<Q>) -> (Self, u64) {
        // SAFETY: `none`, or in the poller's table.
        let ring = unsafe { &*poller.ring };
        Self::of(ring, poller.key, ring.tail())
    }

    /// There is no next request any more, until another spot replaces this.
    #[inline(always)]
    pub(super) fn expect_none(&mut self) {
        self.expected = NO_WR_ID;
    }

    /// Behind the request that a completion has confirmed, which was not posted to `ring` but counts in it: no `wr_id` is expected.
    pub(super) fn alone(ring: &Ring) -> Self {
        Self {
            // So that the position is the ring's tail.
            offset: ring.tail().wrapping_add(1).wrapping_sub(NO_WR_ID),
            ring,
            ..Self::NOWHERE
        }
    }

    /// No `wr_id` is this request's any more, which is the next nevertheless.
    pub(super) fn disguise(&mut self) {
        self.offset = self.offset.wrapping_add(self.expected).wrapping_sub(NO_WR_ID);
        self.expected = NO_WR_ID;
    }

    /// Whether the request has posted buffers.
    ///
    /// # Safety
    /// The caller is the poller, and the request is in flight.
    #[inline(always)]
    pub(super) unsafe fn has_buffers(&self) -> bool {
        // SAFETY: the slot is the poller's.
        unsafe { (*self.slot).get() }.is_some()
    }

    /// Takes what the request has posted, and goes on to that in the next slot. [`retire`](Self::retire) follows.
    ///
    /// # Safety
    /// The caller is the poller, the request is in flight, and a completion has confirmed it.
    #[inline(always)]
    pub(super) unsafe fn take(&mut self) -> Buffers {
        // SAFETY: by contract the list in the slot is ours. It is taken once, as the tail is moved past it before anything else sees the ring.
        unsafe {
            let buffers = Buffers::from_head((*self.slot).get());
            self.slot = self.slot.add(1);
            self.expected += 1;
            buffers
        }
    }

    /// Gives the slot just taken from back to the poster.
    ///
    /// # Safety
    /// [`take`](Self::take) has just been called; the poller that keeps the ring stays borrowed for 'a.
    #[inline(always)]
    pub(super) unsafe fn retire<'a>(&self) -> Retired<'a> {
        // SAFETY: the poller's reference keeps the ring alive, and only `bury` and `drained` remove one, which need the poller.
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

/// What a completion has been found to confirm.
pub(super) struct Confirmed {
    /// What the first such request with any had posted, or, when none had, its own. It is to be retired.
    pub(super) buffers: Buffers,
    /// Behind that request.
    pub(super) spot: Spot,
    /// How many requests of the ring are in flight, that one among them.
    pub(super) in_flight: u64,
}

/// Finds what the completion with this `wr_id` confirms first, passing over requests without buffers. Notes in `poller.series` whether others follow. `None` when it is of no
/// request in flight, as one of a queue pair that is gone.
///
/// A receive that came from a shared receive queue is one of the queue pair that `qp_num` tells.
pub(super) fn confirm<Q: Machinery>(
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
            None => welcome(poller, table_key)?,
        };
        poller.key = key;
    }
    // SAFETY: `none`, which no key is of, or in the poller's table.
    let ring = unsafe { &*poller.ring };
    let mut tail = ring.tail();
    let Some(mut before) = ring.confirmed_before(wr_id as u32, tail) else {
        unexpected(wr_id, ring);
        return None;
    };
    // SAFETY: we are the poller, and all these requests are in flight.
    while before != 0 && unsafe { ring.is_vacant(tail) } {
        (tail, before) = (tail + 1, before - 1);
    }
    ring.retire(tail);
    let (mut spot, in_flight) = Spot::of(ring, key, tail);
    // SAFETY: in flight, and confirmed (IBTA vol 1, 10.8.5.1: a completion of a send queue implies that those posted before it are complete).
    let buffers = unsafe { spot.take() };
    poller.series = match before {
        0 => 0,
        // One of them is taken; those that remain are of use as far as their slots follow one another.
        _ => 1 + (before - 1).min(ring.mask() - ring.slot_of(tail)),
    };
    Some(Confirmed {
        buffers,
        spot,
        in_flight,
    })
}

/// Looks for a queue pair made since.
#[cold]
#[inline(never)]
fn welcome<Q: Machinery>(poller: &mut Poller<Q>, key: u32) -> Option<*const Ring> {
    poller.inner.registry().welcome(&mut poller.table);
    poller.table.get(key).map(Arc::as_ptr)
}

/// A completion that confirms nothing in flight: the device says twice that a request is done, or says so of one never posted.
#[cold]
#[inline(never)]
pub(super) fn unexpected(wr_id: u64, ring: &Ring) {
    tracing::error!(wr_id, qpn = %ring.qpn(), "a completion of no request in flight; ignored");
}
