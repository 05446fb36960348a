//! A lock whose holder does what others came for who found it taken: they leave a note and go on.
//!
//! Either one who comes gets the lock, or its holder sees the note after giving the lock back: the note is written before the lock is tried, and read after it was given back, with
//! a fence between the two on each side.

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

    /// Waits for the lock. [`serve`](Self::serve) follows.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.lock.lock()
    }

    /// Has `work` done: by this thread if the lock is free, which then does it as often as others came for it meanwhile, and else, after `leave`, by the lock's holder. What
    /// there is to do is under another lock, whose guard `work` and `leave` get and give back, and `again` gets anew.
    pub(crate) fn pass<'a, G>(
        &'a self,
        mut outer: G,
        mut work: impl FnMut(G, MutexGuard<'a, T>) -> bool,
        leave: impl FnOnce(G),
        mut again: impl FnMut() -> G,
    ) {
        loop {
            self.wanted.store(true, Ordering::SeqCst);
            // Pairs with that in `serve`.
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

    /// Does `work`, which gives both guards back and says whether there is more to do. Says so too, or that somebody has found the lock taken.
    pub(crate) fn serve<'a, G>(
        &self,
        outer: G,
        inner: MutexGuard<'a, T>,
        work: impl FnOnce(G, MutexGuard<'a, T>) -> bool,
    ) -> bool {
        // Whoever left a note had put down what there is to do before that, under the outer lock, which is ours now.
        self.wanted.store(false, Ordering::SeqCst);
        let more = work(outer, inner);
        // Pairs with that in `pass`.
        fence(Ordering::SeqCst);
        more || self.wanted.load(Ordering::SeqCst)
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
