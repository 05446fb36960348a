//! Taking completions: each confirms its own request and the unsignalled ones before it.

use core::convert::Infallible;
use core::ops::ControlFlow;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::{Poller, shared};
use crate::memory::Buffers;
use crate::qp::{Ring, Slot};
use crate::wr::completion::Completion;

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
    /// The completion that was taken last. It is done with, unless it confirms requests that have not been yielded, its own the last of them (a *series*).
    at: *const sys::ibv_wc,
    /// How far a *run* goes: the completions after `at` up to this one may be those of the ring's next requests, one by one, and to compare its `wr_id` is all there is to do to know one.
    run_end: *const sys::ibv_wc,
    /// The `wr_id` of the ring's next request, and its slot.
    expected: u64,
    slot: *const Slot,
    /// The position of a request of the ring, as long as slots follow one another, less its `wr_id`.
    offset: u64,
    ring: *const Ring,
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
        poller.series = 0;
        let place = Place::nowhere(poller.last);
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
        while let Some(buffers) = going.0.advance() {
            each(going.0.retire(buffers))?;
        }
        ControlFlow::Continue(())
    }

    /// Begins a run on the ring that was at hand last. It may end at once.
    #[inline(always)]
    fn begin(&mut self) {
        let poller = &*self.poller;
        if poller.last != poller.end {
            // SAFETY: as in `step`.
            let ring = unsafe { &*poller.ring };
            self.place = Place::run(ring, poller.key, ring.tail(), poller.last, poller.end);
        }
    }

    /// Takes what the next request has posted.
    #[inline(always)]
    fn advance(&mut self) -> Option<Buffers> {
        let place = &mut self.place;
        let buffers;
        // SAFETY: in a run, so there is another that the device wrote.
        if place.at != place.run_end && unsafe { (*place.at.add(1)).wr_id } == place.expected {
            // The completion of the very next request.
            // SAFETY: as above; it is in a run.
            (place.at, buffers) = unsafe { (place.at.add(1), place.take()) };
        } else if self.poller.series > 1 && unsafe { (*(*place.slot).get()).is_some() } {
            // The next request has no completion of its own.
            // SAFETY: that at hand confirms it (IBTA vol 1, 10.8.5.1: a completion of a send queue implies that those posted before it are complete).
            buffers = unsafe { place.take() };
            self.poller.series -= 1;
        } else if place.at != self.poller.end || self.poller.series != 0 {
            let located = locate(self.poller, place.at);
            *place = located.0;
            buffers = located.1?;
        } else {
            return None;
        }
        Some(buffers)
    }

    /// Gives the slot of the request that had posted `buffers`, just taken, back to the poster.
    #[inline(always)]
    fn retire(&mut self, buffers: Buffers) -> Completion<'a> {
        let place = &self.place;
        // SAFETY: written by the device, which does so again only in a poll, for which the queue would have to be borrowed mutably.
        let wc = unsafe { &*place.at };
        // SAFETY: the poller's reference keeps the ring alive, and only `bury` and `drained` remove one, which need the `&mut CompletionQueue` that is borrowed for 'a.
        let ring = unsafe { &*place.ring };
        ring.retire_next();
        let position = place.expected.wrapping_add(place.offset).wrapping_sub(1);
        Completion::new(wc, ring, position, buffers)
    }
}

impl Place {
    /// No run, and no ring.
    #[inline(always)]
    fn nowhere(at: *const sys::ibv_wc) -> Self {
        Self {
            at,
            run_end: at,
            expected: 0,
            slot: core::ptr::null(),
            offset: 0,
            ring: core::ptr::null(),
        }
    }

    /// A run behind the completion `at`, the first of it perhaps that of the request at `position` of `ring`: as many as there are, or as there are requests in flight, if
    /// those are fewer. Where the slots come to their end no completion has the `wr_id` that is expected next.
    #[inline(always)]
    fn run(ring: &Ring, key: u64, position: u64, at: *const sys::ibv_wc, end: *const sys::ibv_wc) -> Self {
        let (slot, in_flight) = ring.from(position);
        let expected = key | ring.slot_of(position);
        let bytes = (end.addr() - at.addr()).min(in_flight as usize * size_of::<sys::ibv_wc>());
        Self {
            at,
            // SAFETY: not behind the last that the device wrote.
            run_end: unsafe { at.byte_add(bytes) },
            expected,
            slot,
            offset: position.wrapping_sub(expected),
            ring,
        }
    }

    /// At the completion of a request that was not posted to `ring`, but counts in it: no run.
    fn alone(ring: &Ring, at: *const sys::ibv_wc) -> Self {
        Self {
            // So that the position is the ring's tail.
            offset: ring.tail() + 1,
            ring,
            ..Self::nowhere(at)
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

/// Takes what the next request has posted, whatever its completion is: goes on to that of a request in flight, if that at hand is done with, and passes over requests without
/// buffers that it confirms. Nothing when there is none.
#[cold]
#[inline(never)]
fn locate(poller: &mut Poller, at: *const sys::ibv_wc) -> (Place, Option<Buffers>) {
    let mut last = poller.done_with(at);
    poller.series = 0;
    while last != poller.end {
        // SAFETY: before the last that the device wrote.
        let at = unsafe { last.add(1) };
        // SAFETY: as in `Completions::step`.
        let wc = unsafe { &*at };
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
                let mut place = Place::run(ring, key, tail, last, poller.end);
                place.at = at;
                // SAFETY: in flight, and confirmed (IBTA vol 1, 10.8.5.1).
                let buffers = unsafe { place.take() };
                if before != 0 {
                    place.run_end = at;
                    // That of this one is taken; those that remain are of use as far as their slots follow one another.
                    poller.series = 1 + (before - 1).min(ring.mask() - ring.slot_of(tail));
                }
                return (place, Some(buffers));
            }
            unexpected(wc);
        } else if shared::is_shared(key) {
            if let Some((ring, buffers)) = shared::take(poller, wc) {
                // SAFETY: as in `Completions::step`.
                return (Place::alone(unsafe { &*ring }, at), Some(buffers));
            }
            unexpected(wc);
        }
        last = at;
    }
    (Place::nowhere(last), None)
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

impl Poller {
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

/// Completions on their way: tells the poller how far they came when it is over, be it by an unwinding panic.
struct Going<'a>(Completions<'a>);

impl Drop for Going<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.poller.last = self.0.poller.done_with(self.0.place.at);
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
        let done = self.advance().map(|buffers| self.retire(buffers));
        self.poller.last = self.poller.done_with(self.place.at);
        done
    }
}

impl core::fmt::Debug for Completions<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let bytes = self.poller.end.addr() - self.poller.last.addr();
        f.debug_struct("Completions")
            .field("left", &(bytes / size_of::<sys::ibv_wc>()))
            .finish_non_exhaustive()
    }
}
