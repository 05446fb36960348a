//! A combining lock: a thread that fails to lock sets the pending flag, and the lock holder does
//! its work on unlock.
//!
//! The flag is set before the lock is tried and read after it was released, with a fence between
//! the two on each side. So either the thread gets the lock, or the holder sees the flag.

use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering, fence};

pub(crate) struct Noted<T> {
    lock: Mutex<T>,
    wanted: AtomicBool,
}

impl<T> Noted<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            lock: Mutex::new(value),
            wanted: AtomicBool::new(false),
        }
    }

    /// Waits for the lock. [`run_locked`](Self::run_locked) follows.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.lock.lock()
    }

    /// Runs `work` if the lock is free, again for as long as the pending flag was set meanwhile;
    /// otherwise runs `delegate` and leaves the work to the lock holder. The work is described
    /// under another lock, whose guard `work` and `delegate` release and `relock` takes again.
    pub(crate) fn pass<'a, G>(
        &'a self,
        mut outer: G,
        mut work: impl FnMut(G, MutexGuard<'a, T>) -> bool,
        leave: impl FnOnce(G),
        mut again: impl FnMut() -> G,
    ) {
        loop {
            self.wanted.store(true, Ordering::SeqCst);
            // Pairs with the fence in `run_locked`.
            fence(Ordering::SeqCst);
            let Some(inner) = self.lock.try_lock() else {
                leave(outer);
                return;
            };
            if !self.serve(outer, inner, &mut work) {
                return;
            }
            outer = again();
        }
    }

    /// Runs `work`, which releases both guards and returns whether there is more. Returns that, or
    /// that the pending flag is set.
    pub(crate) fn serve<'a, G>(
        &self,
        outer: G,
        inner: MutexGuard<'a, T>,
        work: impl FnOnce(G, MutexGuard<'a, T>) -> bool,
    ) -> bool {
        // The thread that set the flag described its work before, under the outer lock, which is
        // held here.
        self.wanted.store(false, Ordering::SeqCst);
        let more = work(outer, inner);
        // Pairs with the fence in `run_or_delegate`.
        fence(Ordering::SeqCst);
        more || self.wanted.load(Ordering::SeqCst)
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
