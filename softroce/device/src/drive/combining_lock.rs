//! A combining lock: a thread that fails to lock sets the pending flag, and the lock holder does
//! its work on unlock.
//!
//! The flag is set before the lock is tried and read after it was released, with a fence between
//! the two on each side: the thread gets the lock, or the holder sees the flag (proved in
//! `model.rs`).

use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering, fence};

pub(crate) struct CombiningLock<T> {
    lock: Mutex<T>,
    pending: AtomicBool,
}

impl<T> CombiningLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            lock: Mutex::new(value),
            pending: AtomicBool::new(false),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.lock.lock()
    }

    /// Runs `work` if the lock is free, again for as long as the pending flag was set meanwhile;
    /// otherwise runs `delegate` and leaves the work to the lock holder. The work is described
    /// under another lock, whose guard `work` and `delegate` release and `relock` takes again.
    pub(crate) fn run_or_delegate<'a, G>(
        &'a self,
        mut outer: G,
        mut work: impl FnMut(G, MutexGuard<'a, T>) -> bool,
        delegate: impl FnOnce(G),
        mut relock: impl FnMut() -> G,
    ) {
        loop {
            self.pending.store(true, Ordering::SeqCst);
            // Pairs with the fence in `run_locked`.
            fence(Ordering::SeqCst);
            let Some(inner) = self.lock.try_lock() else {
                delegate(outer);
                return;
            };
            if !self.run_locked(outer, inner, &mut work) {
                return;
            }
            outer = relock();
        }
    }

    /// Runs `work`, which releases both guards. Whether there is more, or the pending flag is set.
    pub(crate) fn run_locked<'a, G>(
        &self,
        outer: G,
        inner: MutexGuard<'a, T>,
        work: impl FnOnce(G, MutexGuard<'a, T>) -> bool,
    ) -> bool {
        // The thread that set the flag described its work before, under the outer lock held here.
        self.pending.store(false, Ordering::SeqCst);
        let more = work(outer, inner);
        // Pairs with the fence in `run_or_delegate`.
        fence(Ordering::SeqCst);
        more || self.pending.load(Ordering::SeqCst)
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
