//! Synchronisation primitives: with `--cfg doorbell_loom` loom's, for the models
//! (`verbs/src/**/model.rs`). Not `--cfg loom`: other crates use that.
//!
//! What needs no model (a counter for unique numbers, bytes of registered memory) uses the standard
//! library directly; the module documentation of each says why.

use std::sync::PoisonError;
use std::time::Duration;

#[cfg(not(doorbell_loom))]
pub(crate) use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
#[cfg(doorbell_loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

#[cfg(doorbell_loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(doorbell_loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

/// Locks, ignoring poison: the data is consistent at every point where a panic may happen.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sleeps until `condition` is notified, spuriously woken, or `left` has elapsed, which
/// [`Duration::MAX`] never has.
pub(crate) fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>, left: Duration) -> MutexGuard<'a, T> {
    match left {
        Duration::MAX => condition.wait(guard).unwrap_or_else(PoisonError::into_inner),
        left => {
            let woken = condition.wait_timeout(guard, left);
            woken.unwrap_or_else(PoisonError::into_inner).0
        }
    }
}

/// A cell that threads hand over to one another by some other synchronisation, which loom checks.
pub(crate) struct HandoffCell<T>(Cell<T>);

#[cfg(not(doorbell_loom))]
type Cell<T> = core::cell::UnsafeCell<T>;
#[cfg(doorbell_loom)]
type Cell<T> = loom::cell::UnsafeCell<T>;

impl<T: Copy> HandoffCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Cell::new(value))
    }

    /// # Safety
    /// No other thread changes it meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn get(&self) -> T {
        #[cfg(not(doorbell_loom))]
        // SAFETY: by contract.
        let value = unsafe { *self.0.get() };
        #[cfg(doorbell_loom)]
        // SAFETY: by contract.
        let value = self.0.with(|value| unsafe { *value });
        value
    }

    /// # Safety
    /// No other thread reads or changes it meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn set(&self, value: T) {
        #[cfg(not(doorbell_loom))]
        // SAFETY: by contract.
        unsafe {
            *self.0.get() = value;
        }
        #[cfg(doorbell_loom)]
        // SAFETY: by contract.
        self.0.with_mut(|at| unsafe { *at = value });
    }
}
