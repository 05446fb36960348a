//! Taking completions: each confirms its own request and the unsignalled ones before it.

use core::convert::Infallible;
use core::ops::ControlFlow;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::{Poller, shared};
use crate::memory::Buffers;
use crate::qp::{Ring, Slot};
use crate::wr::completion::{CONFIRMED, Completion};

/// The requests that one [`poll`](super::CompletionQueue::poll) has found completed.
///
/// [`for_each`](Self::for_each) and [`try_for_each`](Self::try_for_each) are the fastest way through them, since all that they carry from one request to the next
/// stays in registers. They are otherwise the same as a `for` loop.
pub struct Completions<'a> {
    poller: &'a mut Poller,
    place: Place,
}

/// Where taking completions has come to: all that changes with every request.
#[derive(Clone, Copy)]
struct Place {
    /// The completion at hand: the first that is not done with. One is as soon as its own request, the last that it confirms, is yielded.
    wc: *const sys::ibv_wc,
    /// Completions before this one may be those of the ring's next requests, one by one (a *run*): to compare its `wr_id` is all there is to do to know one.
    run_end: *const sys::ibv_wc,
    /// The `wr_id` of the ring's next request, and its slot.
    expected: u64,
    slot: *const Slot,
    /// The position of a request of the ring, as long as slots follow one another, less its `wr_id`.
    offset: u64,
    ring: *const Ring,
    /// How many requests before its own, which have no completion, that at hand confirms, as far as their slots follow one another. There is no run meanwhile.
    unsignalled: u64,
}

/// The upper half of a `wr_id`: its ring's key.
const KEY: u64 = !0 << 32;

/// What no ring has as its key.
pub(super) const NO_KEY: u64 = 1;

// SAFETY: the pointers lead to what the poller has, which is Send and Sync, and the poller is borrowed.
unsafe impl Send for Completions<'_> {}
// SAFETY: as above.
unsafe impl Sync for Completions<'_> {}

impl<'a> Completions<'a> {
    #[inline(always)]
    pub(super) fn new(poller: &'a mut Poller) -> Self {
        let place = Place {
            wc: poller.rest,
            run_end: poller.rest,
            expected: 0,
            slot: core::ptr::null(),
            offset: 0,
            ring: core::ptr::null(),
            unsignalled: 0,
        };
        Self { poller, place }
    }

    /// Calls `each` with every request that has completed.
    #[inline]
    pub fn for_each(self, mut each: impl FnMut(Completion<'a>)) {
        let ControlFlow::Continue(()) = self.drive(|done| -> ControlFlow<Infallible> {
            each(done);
            ControlFlow::Continue(())
        });
    }

    /// Calls `each` with every request that has completed, up to the first for which it fails; the next poll yields those after it.
    ///
    /// # Errors
    /// That of `each`.
    #[inline]
    pub fn try_for_each<E>(self, mut each: impl FnMut(Completion<'a>) -> Result<(), E>) -> Result<(), E> {
        let flow = self.drive(|done| match each(done) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => ControlFlow::Break(error),
        });
        match flow {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(error) => Err(error),
        }
    }

    /// Gives every request that has completed to `each`, until that breaks off. It is called in one place, so that it is compiled into the loop.
    #[inline(always)]
    fn drive<B>(self, mut each: impl FnMut(Completion<'a>) -> ControlFlow<B>) -> ControlFlow<B> {
        let mut going = Going(self);
        going.0.begin();
        while let Some(done) = going.0.step() {
            each(done)?;
        }
        ControlFlow::Continue(())
    }

    /// Begins a run on the ring that was at hand last. It may end at once.
    #[inline(always)]
    fn begin(&mut self) {
        let poller = &*self.poller;
        if poller.rest != poller.end {
            // SAFETY: as in `step`.
            let ring = unsafe { &*poller.ring };
            self.place = Place::run(ring, poller.key, ring.tail(), poller.rest, poller.end);
        }
    }

    /// The next request.
    #[inline(always)]
    fn step(&mut self) -> Option<Completion<'a>> {
        let place = &mut self.place;
        let wc: &'a sys::ibv_wc;
        let buffers;
        // SAFETY: in a run, so before the end of what the device wrote, which it writes again only in a poll, for which the queue would have to be borrowed mutably.
        if place.wc != place.run_end && unsafe { (*place.wc).wr_id } == place.expected {
            // The completion of the very next request.
            // SAFETY: as above; it is in a run.
            (wc, place.wc, buffers) = unsafe { (&*place.wc, place.wc.add(1), place.take()) };
        } else if place.unsignalled != 0 && unsafe { (*(*place.slot).get()).is_some() } {
            // The next request has no completion, that at hand confirms it.
            // SAFETY: the completion at hand confirms it (IBTA vol 1, 10.8.5.1: a completion of a send queue implies that those posted before it are complete).
            (wc, buffers) = unsafe { (&CONFIRMED, place.take()) };
            place.unsignalled -= 1;
        } else if place.wc != self.poller.end
            && let Some(located) = locate(self.poller, place.wc)
        {
            (*place, wc, buffers) = located;
        } else {
            place.wc = self.poller.end;
            return None;
        }
        // SAFETY: the poller's reference keeps the ring alive, and only `bury` and `drained` remove one, which need the `&mut CompletionQueue` that is borrowed for 'a.
        let ring = unsafe { &*place.ring };
        ring.retire_next();
        let position = place.expected.wrapping_add(place.offset).wrapping_sub(1);
        Some(Completion::new(wc, ring, position, buffers))
    }
}

impl Place {
    /// A run from the completion `wc` on, which may be that of the request at `position` of `ring`: as many as there are, or as there are requests in flight, if those are
    /// fewer. Where the slots come to their end no completion has the `wr_id` that is expected next.
    #[inline(always)]
    fn run(ring: &Ring, key: u64, position: u64, wc: *const sys::ibv_wc, end: *const sys::ibv_wc) -> Self {
        let (slot, in_flight) = ring.from(position);
        let expected = key | ring.slot_of(position);
        let bytes = (end.addr() - wc.addr()).min(in_flight as usize * size_of::<sys::ibv_wc>());
        Self {
            wc,
            // SAFETY: not behind the end of what the device wrote.
            run_end: unsafe { wc.byte_add(bytes) },
            expected,
            slot,
            offset: position.wrapping_sub(expected),
            ring,
            unsignalled: 0,
        }
    }

    /// After a request that was not posted to `ring`, but counts in it: no run, the next completion is `next`.
    fn alone(ring: &Ring, next: *const sys::ibv_wc) -> Self {
        Self {
            wc: next,
            run_end: next,
            expected: 0,
            slot: core::ptr::null(),
            // So that the position is the ring's tail.
            offset: ring.tail() + 1,
            ring,
            unsignalled: 0,
        }
    }

    /// What the next request has posted. The caller moves the ring's tail past it.
    ///
    /// # Safety
    /// That request is in flight, its slot follows in memory that of the one before, and a completion has confirmed it.
    #[inline(always)]
    unsafe fn take(&mut self) -> Buffers {
        // SAFETY: by contract; we are the poller, and take it once, as the tail is moved past it before anything else sees the ring.
        unsafe {
            let buffers = Buffers::from_head(*(*self.slot).get());
            self.slot = self.slot.add(1);
            self.expected += 1;
            buffers
        }
    }
}

/// Goes on to the next completion of a request in flight, and takes what the first request has posted that it confirms and that has any, or else its own. Returns what follows,
/// the completion to show for the request, and its buffers. `None` when there is none.
#[inline(never)]
fn locate<'a>(poller: &mut Poller, mut at: *const sys::ibv_wc) -> Option<(Place, &'a sys::ibv_wc, Buffers)> {
    while at != poller.end {
        // SAFETY: before the end of what the device wrote, which it writes again only in a poll, for which the queue would have to be borrowed mutably.
        let wc: &'a sys::ibv_wc = unsafe { &*at };
        let key = wc.wr_id & KEY;
        if key == poller.key || find(poller, key) {
            // SAFETY: as in `Completions::step`.
            let ring = unsafe { &*poller.ring };
            let mut tail = ring.tail();
            if let Some(mut before) = ring.confirmed_before(wc.wr_id as u32, tail) {
                // SAFETY: we are the poller, and all these requests are in flight.
                while before != 0 && unsafe { ring.is_vacant(tail) } {
                    (tail, before) = (tail + 1, before - 1);
                }
                ring.retire(tail);
                let mut place = Place::run(ring, key, tail, at, poller.end);
                // SAFETY: in flight, and confirmed (IBTA vol 1, 10.8.5.1: a completion of a send queue implies that those posted before it are complete).
                let buffers = unsafe { place.take() };
                if before == 0 {
                    // SAFETY: as above.
                    place.wc = unsafe { at.add(1) };
                    return Some((place, wc, buffers));
                }
                place.run_end = at;
                place.unsignalled = (before - 1).min(ring.mask() - ring.slot_of(tail));
                return Some((place, &CONFIRMED, buffers));
            }
            unexpected(wc);
        } else if shared::is_shared(key) {
            if let Some((ring, buffers)) = shared::take(poller, wc) {
                // SAFETY: as in `Completions::step`, and as above.
                let (ring, next) = unsafe { (&*ring, at.add(1)) };
                return Some((Place::alone(ring, next), wc, buffers));
            }
            unexpected(wc);
        }
        // SAFETY: as above.
        at = unsafe { at.add(1) };
    }
    None
}

/// Makes the ring with this key the one at hand. False for a queue pair that is gone.
fn find(poller: &mut Poller, key: u64) -> bool {
    let table_key = (key >> 32) as u32;
    let found = match poller.table.get(table_key) {
        Some(ring) => Some(Arc::as_ptr(ring)),
        None => welcome(poller, table_key),
    };
    let Some(ring) = found else { return false };
    (poller.key, poller.ring) = (key, ring);
    true
}

/// Completions on their way: tells the poller how far they came when it is over, be it by an unwinding panic.
struct Going<'a>(Completions<'a>);

impl Drop for Going<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.poller.rest = self.0.place.wc;
    }
}

/// Looks for a queue pair made since.
#[cold]
#[inline(never)]
fn welcome(poller: &mut Poller, key: u32) -> Option<*const Ring> {
    poller.inner.registry().welcome(&mut poller.table);
    poller.table.get(key).map(Arc::as_ptr)
}

/// A completion that confirms nothing in flight: the device says twice that a request is done, or says so of one never posted.
#[cold]
#[inline(never)]
fn unexpected(wc: &sys::ibv_wc) {
    tracing::error!(
        wr_id = wc.wr_id,
        qpn = wc.qp_num,
        "a completion of no request in flight; ignored"
    );
}

impl<'a> Iterator for Completions<'a> {
    type Item = Completion<'a>;

    #[inline]
    fn next(&mut self) -> Option<Completion<'a>> {
        let done = self.step();
        self.poller.rest = self.place.wc;
        done
    }
}

impl core::fmt::Debug for Completions<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let bytes = self.poller.end.addr() - self.place.wc.addr();
        f.debug_struct("Completions")
            .field("left", &(bytes / size_of::<sys::ibv_wc>()))
            .finish_non_exhaustive()
    }
}
