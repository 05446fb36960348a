//! A value and the word that says whose it is, in memory that others read at any time: whoever reads the value of a certain owner gets that owner's, or nothing.
//!
//! One process at a time writes: the holder of the slot's name, or who is at the door.

use crate::sync::{AtomicU64, Ordering, fence};

#[repr(C)]
pub(super) struct Guarded {
    guard: AtomicU64,
    value: AtomicU64,
}

impl Guarded {
    /// The word.
    pub(super) fn guard(&self) -> u64 {
        self.guard.load(Ordering::Acquire)
    }

    /// The value that the word was `guard` for; `None` when it is not so, or no longer.
    pub(super) fn get(&self, guard: u64) -> Option<u64> {
        if self.guard.load(Ordering::Acquire) != guard {
            return None;
        }
        let value = self.value.load(Ordering::Relaxed);
        // Who has seen the next value also sees that the word has changed.
        fence(Ordering::Acquire);
        (self.guard.load(Ordering::Relaxed) == guard).then_some(value)
    }

    /// Replaces the value, and has the word be `guard` from then on; meanwhile it is `between`, for which nobody asks.
    pub(super) fn set(&self, between: u64, value: u64, guard: u64) {
        // Exchanged, not stored: another process may be changing the word of the last owner, and takes its place in one order with both.
        self.guard.swap(between, Ordering::Relaxed);
        fence(Ordering::Release);
        self.value.store(value, Ordering::Relaxed);
        self.guard.swap(guard, Ordering::Release);
    }

    /// Changes the word, if it is `from`.
    pub(super) fn change(&self, from: u64, to: u64) {
        let _ = self
            .guard
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed);
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
