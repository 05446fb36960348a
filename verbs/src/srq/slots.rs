//! What is in flight on a shared receive queue: a slot per request, with its buffers.
//!
//! Requests complete in any order and queue, so the slots are not a ring. The *poster* (owner of
//! the `&mut SharedReceiveQueue`) takes a slot off its free list, fills it and posts. The *poller*
//! of a completion queue empties the slot that a completion names, and pushes its number to that
//! queue's [`ReturnRing`], from which the poster collects it: single producer, single consumer.
//!
//! Invariant: a slot is on the poster's free list, posted, or in one `ReturnRing`. The poster owns
//! its buffers until posted; then the poller whose queue gets the completion, until it is returned.
//!
//! Proved by the models in `srq/model.rs`; between two queues the provider's barriers order them.

use std::sync::Arc;

use crossbeam_utils::CachePadded;

use crate::memory::{Buffers, RangePtr};
use crate::qp::{QueueKind, Ring};
use crate::sync::{AtomicBool, AtomicU32, HandoffCell, Ordering};

pub(crate) struct Slots(Box<[Slot]>);

struct Slot {
    /// Whether a completion may name it.
    posted: AtomicBool,
    buffers: HandoffCell<Option<RangePtr>>,
}

// SAFETY: the slots own their buffers, which are Send.
unsafe impl Send for Slots {}
// SAFETY: the buffers of a slot are accessed by the party that owns them (see the module's
// invariant). Ownership passes to the poller by `posted`, and back to the poster by a counter of
// `ReturnRing`, each stored with release and loaded with acquire.
unsafe impl Sync for Slots {}

impl Slots {
    pub(super) fn new(depth: u32) -> Self {
        let slot = |_| Slot {
            posted: AtomicBool::new(false),
            buffers: HandoffCell::new(None),
        };
        Self((0..depth).map(slot).collect())
    }

    /// Poster: puts `buffers` into a slot, before the request is posted.
    ///
    /// # Safety
    /// The caller is the poster; the slot came from its free list.
    #[inline(always)]
    pub(super) unsafe fn put(&self, slot: u32, buffers: Buffers) {
        if let Some(slot) = self.0.get(slot as usize) {
            // SAFETY: the slot is the poster's.
            unsafe { slot.buffers.set(buffers.into_head()) };
            slot.posted.store(true, Ordering::Release);
        }
    }

    /// Takes the buffers of a slot; `None` when it is not posted.
    ///
    /// # Safety
    /// The device is done with the request, and has reported so only to the caller; or the caller
    /// is the poster, and the device did not accept it.
    #[inline(always)]
    pub(crate) unsafe fn take(&self, slot: u32) -> Option<Buffers> {
        let slot = self.0.get(slot as usize)?;
        // Acquire: the buffers that the poster put are visible.
        if !slot.posted.load(Ordering::Acquire) {
            return None;
        }
        slot.posted.store(false, Ordering::Relaxed);
        // SAFETY: it is posted, so the slot owns the list; nothing else takes it, by contract.
        Some(unsafe { Buffers::from_head(slot.buffers.get()) })
    }
}

impl Drop for Slots {
    /// The queue, which holds a reference, has been destroyed: the device is done with them.
    fn drop(&mut self) {
        for slot in 0..self.0.len() as u32 {
            // SAFETY: `&mut self`: there is neither poster nor poller left.
            drop(unsafe { self.take(slot) });
        }
    }
}

/// The slots that the poller of one completion queue has emptied, on their way back to the poster.
pub(crate) struct ReturnRing {
    /// The shared receive queue's key: the upper half of its requests' `wr_id`.
    key: u32,
    slots: Arc<Slots>,
    /// At least as many as there are slots, so that it is never full; a power of two.
    entries: Box<[AtomicU32]>,
    /// Slots pushed so far. Written by the poller.
    pushed: CachePadded<AtomicU32>,
    /// Slots popped so far. Written by the poster.
    popped: CachePadded<AtomicU32>,
    /// Stands for a queue pair that the poller does not know.
    unknown_qp: Ring,
}

impl ReturnRing {
    pub(super) fn new(key: u32, slots: Arc<Slots>) -> Self {
        let entries = slots.0.len().next_power_of_two();
        Self {
            key,
            slots,
            entries: (0..entries).map(|_| AtomicU32::new(0)).collect(),
            pushed: CachePadded::new(AtomicU32::new(0)),
            popped: CachePadded::new(AtomicU32::new(0)),
            unknown_qp: Ring::new(0, QueueKind::Receive, 0),
        }
    }

    pub(crate) fn key(&self) -> u32 {
        self.key
    }

    pub(crate) fn unknown_qp(&self) -> &Ring {
        &self.unknown_qp
    }

    /// Poller: takes the buffers of a completed request, if posted, and returns its slot.
    ///
    /// # Safety
    /// The caller polls the queue that this was created for, and has a completion of that request.
    pub(crate) unsafe fn retire(&self, slot: u32) -> Option<Buffers> {
        // SAFETY: the device reported only here that the request is done (ibv_post_srq_recv(3)).
        let buffers = unsafe { self.slots.take(slot) }?;
        // Never full: no slot is in here twice.
        let at = self.pushed.load(Ordering::Relaxed);
        self.entry(at).store(slot, Ordering::Relaxed);
        // Release: the poster may refill the slot now that it is empty.
        self.pushed.store(at.wrapping_add(1), Ordering::Release);
        Some(buffers)
    }

    pub(super) fn pop(&self) -> Option<u32> {
        let at = self.popped.load(Ordering::Relaxed);
        if at == self.pushed.load(Ordering::Acquire) {
            return None;
        }
        let slot = self.entry(at).load(Ordering::Relaxed);
        self.popped.store(at.wrapping_add(1), Ordering::Relaxed);
        Some(slot)
    }

    fn entry(&self, at: u32) -> &AtomicU32 {
        &self.entries[at as usize & (self.entries.len() - 1)]
    }
}
