//! What is in flight on a shared receive queue: a slot per request, each holding the request's buffers, and the way of a slot back to the poster.
//!
//! Requests complete in any order, and in the completion queue of whichever queue pair took them: the slots are no ring. The *poster* (whoever has the
//! `&mut SharedReceiveQueue`) takes a slot off its free list, fills it and posts. The *poller* of a completion queue empties the slot that a completion names,
//! and puts its number into the [`Returns`] of that completion queue, from which the poster collects it: single producer, single consumer, loads and stores only.
//!
//! Invariant: a slot is in one place at a time: on the poster's free list, posted, or in one `Returns`. The poster owns its buffers until it is posted; the poller
//! whose queue gets the completion owns them from then on, until it is in the `Returns`.

use std::sync::Arc;

use crate::memory::{Buffers, RangePtr};
use crate::qp::{Queue, Ring};
use crate::sync::{AtomicBool, AtomicU32, Handed, Ordering};

/// The slots of one shared receive queue.
pub(crate) struct Slots(Box<[Slot]>);

struct Slot {
    /// Whether a completion may name it.
    posted: AtomicBool,
    buffers: Handed<Option<RangePtr>>,
}

// SAFETY: the slots own their buffers, which are Send.
unsafe impl Send for Slots {}
// SAFETY: the buffers of a slot are accessed by the party that owns them (see the module's invariant). Ownership passes to the poller by `posted`, and back to the
// poster by a counter of `Returns`, each stored with release and loaded with acquire.
unsafe impl Sync for Slots {}

impl Slots {
    pub(super) fn new(depth: u32) -> Self {
        let slot = |_| Slot {
            posted: AtomicBool::new(false),
            buffers: Handed::new(None),
        };
        Self((0..depth).map(slot).collect())
    }

    /// Poster: puts `buffers` into a slot, before the device hears of them.
    ///
    /// # Safety
    /// The caller is the poster; the slot is one that its free list had.
    #[inline(always)]
    pub(super) unsafe fn put(&self, slot: u32, buffers: Buffers) {
        if let Some(slot) = self.0.get(slot as usize) {
            // SAFETY: the slot is the poster's.
            unsafe { slot.buffers.set(buffers.into_head()) };
            slot.posted.store(true, Ordering::Release);
        }
    }

    /// Takes what a slot holds; `None` when it is not posted.
    ///
    /// # Safety
    /// The device is done with the request, and tells only the caller so; or the caller is the poster, and the device did not take it.
    #[inline(always)]
    pub(crate) unsafe fn take(&self, slot: u32) -> Option<Buffers> {
        let slot = self.0.get(slot as usize)?;
        // Acquire: what the poster put is visible.
        if !slot.posted.load(Ordering::Acquire) {
            return None;
        }
        slot.posted.store(false, Ordering::Relaxed);
        // SAFETY: it is posted, so the slot owns the list; nobody else takes it, by contract.
        Some(unsafe { Buffers::from_head(slot.buffers.get()) })
    }
}

impl Drop for Slots {
    /// Drops what is posted. The shared receive queue, which holds a reference, has been destroyed: the device is done with all of it.
    fn drop(&mut self) {
        for slot in 0..self.0.len() as u32 {
            // SAFETY: `&mut self`: there is neither poster nor poller left.
            drop(unsafe { self.take(slot) });
        }
    }
}

/// Alone on its cache lines, as in `qp/ring.rs`.
#[repr(align(128))]
struct Alone<T>(T);

/// The slots that the poller of one completion queue has emptied, on their way back to the poster.
pub(crate) struct Returns {
    /// The shared receive queue's key: the upper half of its requests' `wr_id`.
    key: u32,
    slots: Arc<Slots>,
    /// At least as many as there are slots, so that it is never full; a power of two.
    entries: Box<[AtomicU32]>,
    /// Slots put in so far. Written by the poller.
    pushed: Alone<AtomicU32>,
    /// Slots taken out so far. Written by the poster.
    popped: Alone<AtomicU32>,
    /// Stands for a queue pair that the poller does not know.
    unknown: Ring,
}

impl Returns {
    pub(super) fn new(key: u32, slots: Arc<Slots>) -> Self {
        let entries = slots.0.len().next_power_of_two();
        Self {
            key,
            slots,
            entries: (0..entries).map(|_| AtomicU32::new(0)).collect(),
            pushed: Alone(AtomicU32::new(0)),
            popped: Alone(AtomicU32::new(0)),
            unknown: Ring::new(0, Queue::Receive, 0),
        }
    }

    pub(crate) fn key(&self) -> u32 {
        self.key
    }

    pub(crate) fn unknown(&self) -> &Ring {
        &self.unknown
    }

    /// Poller: takes what the slot of a completed request holds, and gives the slot back. `None` when no such request is posted.
    ///
    /// # Safety
    /// The caller is the poller of the completion queue that this was made for, and has a completion of that request.
    pub(crate) unsafe fn retire(&self, slot: u32) -> Option<Buffers> {
        // SAFETY: the device says that it is done with the request, in this completion queue only (ibv_post_srq_recv(3)).
        let buffers = unsafe { self.slots.take(slot) }?;
        // There is room: no slot is in here twice.
        let at = self.pushed.0.load(Ordering::Relaxed);
        self.entry(at).store(slot, Ordering::Relaxed);
        // Release: the poster may fill the slot anew, now that it was emptied.
        self.pushed.0.store(at.wrapping_add(1), Ordering::Release);
        Some(buffers)
    }

    /// Poster: the next slot that came back.
    pub(super) fn pop(&self) -> Option<u32> {
        let at = self.popped.0.load(Ordering::Relaxed);
        if at == self.pushed.0.load(Ordering::Acquire) {
            return None;
        }
        let slot = self.entry(at).load(Ordering::Relaxed);
        self.popped.0.store(at.wrapping_add(1), Ordering::Relaxed);
        Some(slot)
    }

    fn entry(&self, at: u32) -> &AtomicU32 {
        &self.entries[at as usize & (self.entries.len() - 1)]
    }
}
