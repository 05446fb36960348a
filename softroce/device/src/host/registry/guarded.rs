//! A value guarded by its owner's word: a reader gets the value of the owner that it expects, or
//! nothing. A sequence lock with owners as sequence numbers, proved by the models in
//! `guarded/model.rs`. One process writes at a time: the holder of the slot's name, or of the
//! services lock.

use crate::sync::{AtomicU64, Ordering, fence};

#[repr(C)]
pub(super) struct Guarded {
    guard: AtomicU64,
    value: AtomicU64,
}

impl Guarded {
    pub(super) fn guard(&self) -> u64 {
        self.guard.load(Ordering::Acquire)
    }

    pub(super) fn get(&self, guard: u64) -> Option<u64> {
        if self.guard.load(Ordering::Acquire) != guard {
            return None;
        }
        let value = self.value.load(Ordering::Relaxed);
        // A reader of the next value also sees the changed guard.
        fence(Ordering::Acquire);
        (self.guard.load(Ordering::Relaxed) == guard).then_some(value)
    }

    /// Replaces the value and sets the guard; meanwhile it is `between`, which no reader expects.
    pub(super) fn set(&self, between: u64, value: u64, guard: u64) {
        // Exchanged: orders it with another process that changes the last owner's guard.
        self.guard.swap(between, Ordering::Relaxed);
        fence(Ordering::Release);
        self.value.store(value, Ordering::Relaxed);
        self.guard.swap(guard, Ordering::Release);
    }

    pub(super) fn change(&self, from: u64, to: u64) {
        let _ = self
            .guard
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed);
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
