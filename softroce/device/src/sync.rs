//! The synchronization primitives between the device's threads: atomics, and parking_lot's locks.
//! With `--cfg doorbell_loom` they are loom's, and the models (`softroce/device/src/**/model.rs`)
//! run the code through every interleaving. Statistics and once-only flags use the standard
//! library.

#[cfg(not(doorbell_loom))]
pub(crate) use parking_lot::{Mutex, MutexGuard};
#[cfg(not(doorbell_loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

#[cfg(doorbell_loom)]
pub(crate) use checked::{AtomicBool, AtomicU64, AtomicUsize, Mutex, MutexGuard};
#[cfg(doorbell_loom)]
pub(crate) use loom::sync::atomic::{Ordering, fence};

#[cfg(doorbell_loom)]
mod checked {
    //! Loom's primitives, completed.

    use std::cell::Cell;

    pub(crate) use loom::sync::MutexGuard;
    use loom::sync::atomic::{Ordering, fence};

    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    impl<T> std::fmt::Debug for Mutex<T> {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("Mutex").finish_non_exhaustive()
        }
    }

    // Loom treats a SeqCst access as acquire and release only. With a fence between a SeqCst store
    // and a later SeqCst load of a thread they are what the language says: of two threads that each
    // store and then load what the other stores, one sees the store.

    loom::thread_local! {
        static STORED: Cell<bool> = Cell::new(false);
    }

    fn before_load(ordering: Ordering) {
        if ordering == Ordering::SeqCst && STORED.with(Cell::get) {
            fence(Ordering::SeqCst);
        }
    }

    fn after_store(ordering: Ordering) {
        if ordering == Ordering::SeqCst {
            STORED.with(|stored| stored.set(true));
        }
    }

    macro_rules! atomic {
        ($name:ident, $value:ty) => {
            #[derive(Debug)]
            pub(crate) struct $name(loom::sync::atomic::$name);

            impl $name {
                pub(crate) fn new(value: $value) -> Self {
                    Self(loom::sync::atomic::$name::new(value))
                }
            }
        };
    }

    atomic!(AtomicBool, bool);
    atomic!(AtomicU64, u64);
    atomic!(AtomicUsize, usize);

    macro_rules! load_and_store {
        ($name:ident, $value:ty) => {
            impl $name {
                pub(crate) fn load(&self, ordering: Ordering) -> $value {
                    before_load(ordering);
                    self.0.load(ordering)
                }

                pub(crate) fn store(&self, value: $value, ordering: Ordering) {
                    self.0.store(value, ordering);
                    after_store(ordering);
                }
            }
        };
    }

    load_and_store!(AtomicBool, bool);
    load_and_store!(AtomicU64, u64);
    load_and_store!(AtomicUsize, usize);

    macro_rules! swap {
        ($name:ident, $value:ty) => {
            impl $name {
                pub(crate) fn swap(&self, value: $value, ordering: Ordering) -> $value {
                    before_load(ordering);
                    let before = self.0.swap(value, ordering);
                    after_store(ordering);
                    before
                }
            }
        };
    }

    swap!(AtomicBool, bool);
    swap!(AtomicU64, u64);

    macro_rules! compare_exchange {
        ($name:ident, $value:ty) => {
            impl $name {
                pub(crate) fn compare_exchange(
                    &self,
                    current: $value,
                    new: $value,
                    success: Ordering,
                    failure: Ordering,
                ) -> Result<$value, $value> {
                    before_load(success);
                    let result = self.0.compare_exchange(current, new, success, failure);
                    after_store(success);
                    result
                }
            }
        };
    }

    compare_exchange!(AtomicU64, u64);

    impl AtomicU64 {
        pub(crate) fn fetch_add(&self, value: u64, ordering: Ordering) -> u64 {
            self.0.fetch_add(value, ordering)
        }

        pub(crate) fn fetch_or(&self, value: u64, ordering: Ordering) -> u64 {
            let before = self.0.fetch_or(value, ordering);
            after_store(ordering);
            before
        }

        pub(crate) fn fetch_and(&self, value: u64, ordering: Ordering) -> u64 {
            let before = self.0.fetch_and(value, ordering);
            after_store(ordering);
            before
        }
    }
}

/// For models: wakes a sleeping thread, as an eventfd does.
#[cfg(all(test, doorbell_loom))]
#[derive(Default)]
pub(crate) struct ModelEvent {
    is_set: loom::sync::Mutex<bool>,
    condvar: loom::sync::Condvar,
}

#[cfg(all(test, doorbell_loom))]
impl ModelEvent {
    pub(crate) fn set(&self) {
        *self.is_set.lock().unwrap() = true;
        self.condvar.notify_all();
    }

    /// Sleeps until it is set. Loom reports a thread that does so for ever.
    pub(crate) fn wait(&self) {
        let mut is_set = self.is_set.lock().unwrap();
        while !std::mem::take(&mut *is_set) {
            is_set = self.condvar.wait(is_set).unwrap();
        }
    }
}
