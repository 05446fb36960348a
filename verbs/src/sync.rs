//! What threads share memory by: the standard library's atomics, locks and cells, by one name for three purposes.
//!
//! With `--cfg doorbell_loom` they are loom's, and the models (`verbs/src/**/model.rs`) run the code that uses them through every order of its steps that the
//! language's memory model allows. With `--cfg doorbell_tsan` the locks are parking_lot's: ThreadSanitizer follows only what is compiled with its instrumentation, and the
//! slow ways of the standard library's locks are not. Neither is in a normal build, which compiles to what it would without this module. The names are not
//! `loom` and `tsan`, as other crates give a meaning to the former.
//!
//! What needs no model (a counter for unique numbers, bytes of registered memory) uses the standard library as it is: see docs/ARCHITECTURE.md.

use std::time::Duration;

#[cfg(not(doorbell_loom))]
pub(crate) use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
#[cfg(doorbell_loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

#[cfg(doorbell_loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(doorbell_tsan)]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(any(doorbell_loom, doorbell_tsan)))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

/// Locks `mutex`. What the locks of this crate guard is consistent whenever it is not being changed, and nothing panics between two changes that belong together; so a
/// panic elsewhere under one does not matter.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    let locked = mutex.lock();
    #[cfg(not(doorbell_tsan))]
    let locked = locked.unwrap_or_else(std::sync::PoisonError::into_inner);
    locked
}

/// Sleeps until `condition` is notified, or perhaps earlier; at most for `left`, if that is given.
pub(crate) fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>, left: Option<Duration>) -> MutexGuard<'a, T> {
    #[cfg(not(doorbell_tsan))]
    match left {
        Some(left) => {
            let woken = condition.wait_timeout(guard, left);
            woken.unwrap_or_else(std::sync::PoisonError::into_inner).0
        }
        None => condition.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner),
    }
    #[cfg(doorbell_tsan)]
    {
        let mut guard = guard;
        match left {
            Some(left) => drop(condition.wait_for(&mut guard, left)),
            None => condition.wait(&mut guard),
        }
        guard
    }
}

/// A value that now one thread accesses and now another, as something else makes sure. Loom checks that it does.
pub(crate) struct Handed<T>(Cell<T>);

#[cfg(not(doorbell_loom))]
type Cell<T> = core::cell::UnsafeCell<T>;
#[cfg(doorbell_loom)]
type Cell<T> = loom::cell::UnsafeCell<T>;

impl<T: Copy> Handed<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Cell::new(value))
    }

    /// The value.
    ///
    /// # Safety
    /// Nobody changes it meanwhile.
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

    /// Changes it.
    ///
    /// # Safety
    /// Nobody reads or changes it meanwhile.
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
