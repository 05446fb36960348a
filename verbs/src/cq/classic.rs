//! Polling a classic queue: ibv_poll_cq(3) copies a batch of completions into an array, which is gone through from there.

use core::ptr::NonNull;

use doorbell_verbs_sys::{self as sys, inline};

use super::kind::{Classic, Cursor};
use super::spot::{Confirmed, Retired, Spot, confirm};
use super::{BATCH, Poller};
use crate::error::CompletionQueueError;
use crate::memory::Buffers;

/// What the device writes into, behind one entry that it doesn't.
type Written = [sys::ibv_wc; BATCH + 1];

/// What the device has written.
pub struct Fetched {
    /// The last completion that is done with, and the last that the device wrote: all between are to be yielded.
    last: *const sys::ibv_wc,
    end: *const sys::ibv_wc,
    /// Where they lie: room for [`Written`], from a box.
    completions: NonNull<sys::ibv_wc>,
}

// SAFETY: the array is its own, and read and written through the poller alone.
unsafe impl Send for Fetched {}
// SAFETY: as above.
unsafe impl Sync for Fetched {}

impl Fetched {
    pub(super) fn new() -> Self {
        // SAFETY: all-zero is a valid value of this struct of integers; so every entry is initialised, however much of it a provider writes.
        let completions: Box<Written> = Box::new(unsafe { core::mem::zeroed() });
        let completions = NonNull::from(Box::leak(completions)).cast();
        Self {
            last: completions.as_ptr(),
            end: completions.as_ptr(),
            completions,
        }
    }

    #[inline(always)]
    pub(super) fn is_left(&self) -> bool {
        self.last != self.end
    }
}

impl Drop for Fetched {
    fn drop(&mut self) {
        let completions = self.completions.cast::<Written>();
        // SAFETY: from a box, by `new`; freed once.
        drop(unsafe { Box::from_raw(completions.as_ptr()) });
    }
}

impl Poller<Classic> {
    /// Has the device write completions, if none are left.
    #[inline(always)]
    pub(super) fn fetch(&mut self) -> Result<(), CompletionQueueError> {
        if self.own.is_left() {
            return Ok(());
        }
        self.settle();
        let before = self.own.completions.as_ptr();
        // SAFETY: the queue is live, and there is room for BATCH entries behind the first.
        let result = unsafe { inline::poll_cq(self.inner.raw, BATCH as i32, before.add(1)) };
        // Negative: failed. One comparison sees to both this and a provider that counts wrongly.
        let fetched = result.cast_unsigned() as usize;
        if fetched > BATCH {
            return Err(self.failed("ibv_poll_cq", result));
        }
        self.own.last = before;
        // SAFETY: no more than there is room for.
        self.own.end = unsafe { before.add(fetched) };
        if self.settling && fetched < BATCH {
            self.drained(fetched == 0);
        }
        Ok(())
    }

    /// The last completion that is done with, when that taken last is `at`.
    #[inline(always)]
    fn done_with(&self, at: *const sys::ibv_wc) -> *const sys::ibv_wc {
        if self.series == 0 {
            return at;
        }
        // SAFETY: in a series, so it is one that the device wrote, and the first of these is not the first of all.
        unsafe { at.sub(1) }
    }
}

/// Goes through the completions written.
pub struct ClassicCursor<'a> {
    poller: &'a mut Poller<Classic>,
    place: Place,
}

/// Where it has come to: all that changes with every request.
#[derive(Clone, Copy)]
struct Place {
    /// The completion that was taken last. It is done with, unless it confirms requests that have not been yielded, its own the last of them (a *series*).
    at: *const sys::ibv_wc,
    /// How far a *run* goes: the completions after `at` up to this one may be those of the ring's next requests, one by one, and to compare its `wr_id` is all there is to do to
    /// know one.
    run_end: *const sys::ibv_wc,
    spot: Spot,
}

// SAFETY: the pointers lead to what the poller has, which is Send and Sync, and the poller is borrowed.
unsafe impl Send for ClassicCursor<'_> {}
// SAFETY: as above.
unsafe impl Sync for ClassicCursor<'_> {}

impl Place {
    /// No run.
    fn nowhere(at: *const sys::ibv_wc) -> Self {
        Self {
            at,
            run_end: at,
            spot: Spot::NOWHERE,
        }
    }

    /// A run behind the completion `at`: as many as the device has written, or as there are requests in flight, if those are fewer. It ends, besides, where the slots come to
    /// their end, as no completion has the `wr_id` that is expected there.
    #[inline(always)]
    fn run((spot, in_flight): (Spot, u64), at: *const sys::ibv_wc, end: *const sys::ibv_wc) -> Self {
        let bytes = (end.addr() - at.addr()).min(in_flight as usize * size_of::<sys::ibv_wc>());
        Self {
            at,
            // SAFETY: not behind the last that the device wrote.
            run_end: unsafe { at.byte_add(bytes) },
            spot,
        }
    }
}

impl<'a> ClassicCursor<'a> {
    #[inline(always)]
    pub(super) fn new(poller: &'a mut Poller<Classic>) -> Self {
        poller.series = 0;
        let at = poller.own.last;
        Self {
            poller,
            place: Place {
                at,
                run_end: at,
                spot: Spot::NOWHERE,
            },
        }
    }
}

impl Cursor<Classic> for ClassicCursor<'_> {
    /// A run on the ring that was at hand last. It may end at once.
    #[inline(always)]
    fn begin(&mut self) -> bool {
        let poller = &*self.poller;
        if !poller.own.is_left() {
            return false;
        }
        self.place = Place::run(Spot::last_of(poller), poller.own.last, poller.own.end);
        true
    }

    #[inline(always)]
    fn resume(&mut self) -> bool {
        true
    }

    #[inline(always)]
    fn advance(&mut self) -> Option<Buffers> {
        let place = &mut self.place;
        // SAFETY: in a run, so there is another that the device wrote.
        if place.at != place.run_end && unsafe { (*place.at.add(1)).wr_id } == place.spot.expected {
            // The commonest: the completion of the very next request.
            // SAFETY: as above; in a run, it is in flight.
            unsafe {
                place.at = place.at.add(1);
                Some(place.spot.take())
            }
        } else if self.poller.series > 1
            // SAFETY: we are the poller, and in a series the next request is in flight.
            && unsafe { place.spot.has_buffers() }
        {
            // SAFETY: the completion at hand confirms it.
            let buffers = unsafe { place.spot.take() };
            self.poller.series -= 1;
            Some(buffers)
        } else if place.at != self.poller.own.end || self.poller.series != 0 {
            let buffers;
            (*place, buffers) = locate(self.poller, place.at);
            buffers
        } else {
            None
        }
    }

    #[inline(always)]
    unsafe fn retire<'a>(&mut self) -> (&'a sys::ibv_wc, Retired<'a>) {
        // SAFETY: written by the device, which does so again only in a poll, for which the queue would have to be borrowed mutably.
        let wc = unsafe { &*self.place.at };
        // SAFETY: by contract.
        (wc, unsafe { self.place.spot.retire() })
    }

    #[inline(always)]
    fn follow(&mut self) -> bool {
        true
    }

    #[inline(always)]
    fn put_down(&mut self) {
        self.poller.own.last = self.poller.done_with(self.place.at);
    }
}

/// Takes what the next request has posted, whatever its completion is: goes on to that of a request in flight, if the one at hand is done with.
#[cold]
#[inline(never)]
fn locate(poller: &mut Poller<Classic>, at: *const sys::ibv_wc) -> (Place, Option<Buffers>) {
    let mut last = poller.done_with(at);
    poller.series = 0;
    while last != poller.own.end {
        // SAFETY: before the last that the device wrote.
        let at = unsafe { last.add(1) };
        // SAFETY: as above.
        let (wr_id, qp_num) = unsafe { ((*at).wr_id, (*at).qp_num) };
        if let Some(Confirmed {
            buffers,
            spot,
            in_flight,
        }) = confirm(poller, wr_id, || qp_num)
        {
            let mut place = Place::run((spot, in_flight), last, poller.own.end);
            place.at = at;
            if poller.series != 0 {
                place.run_end = at;
            }
            return (place, Some(buffers));
        }
        last = at;
    }
    (Place::nowhere(last), None)
}
