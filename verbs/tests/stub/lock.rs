//! The stub's lock, replaced for ThreadSanitizer (see `src/sync.rs`).

#[cfg(not(doorbell_tsan))]
pub(crate) use std::sync::{Mutex, MutexGuard};

#[cfg(doorbell_tsan)]
pub(crate) use seen::{Mutex, MutexGuard};

#[cfg(doorbell_tsan)]
mod seen {
    use std::sync::PoisonError;

    pub(crate) use parking_lot::MutexGuard;

    /// parking_lot's lock, which is never poisoned, with the interface of the standard library's.
    #[derive(Default)]
    pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(parking_lot::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> Result<MutexGuard<'_, T>, PoisonError<MutexGuard<'_, T>>> {
            Ok(self.0.lock())
        }
    }
}
