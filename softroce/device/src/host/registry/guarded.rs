//! A value guarded by its owner's word, in memory that others read at any time: a reader gets the
//! value of the owner that it expects, or nothing. A sequence lock with owners as sequence numbers.
//!
//! One process at a time writes: the holder of the slot's name, or of the services lock.
//!
//! Proved by the models in `guarded/model.rs`.

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

    /// The value while the guard is `guard`; `None` otherwise.
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
        // Exchanged, not stored: another process may be changing the last owner's guard, and all
        // three are totally ordered then.
        self.guard.swap(between, Ordering::Relaxed);
        fence(Ordering::Release);
        self.value.store(value, Ordering::Relaxed);
        self.guard.swap(guard, Ordering::Release);
    }

    /// Changes the guard, if it is `from`.
    pub(super) fn change(&self, from: u64, to: u64) {
        let _ = self
            .guard
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed);
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
