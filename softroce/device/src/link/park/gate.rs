//! Whether a thread sleeps, and whether somebody has called it: what its waker must know to call no more often than needed, and never too seldom.

use crate::sync::{AtomicU8, Ordering};

/// No one sleeps, no call waits.
const AWAKE: u8 = 0;
/// The thread sleeps or is about to: a call has to ring.
const PARKED: u8 = 1;
/// A call came: the thread does not sleep the next time it tries.
const CALLED: u8 = 2;

pub(super) struct Gate {
    state: AtomicU8,
}

impl Gate {
    pub(super) fn new() -> Self {
        Self {
            state: AtomicU8::new(AWAKE),
        }
    }

    /// Sleeper: is about to sleep, until rung. `false` when it was called since it last slept: it must not.
    pub(super) fn enter(&self) -> bool {
        let parked = self
            .state
            .compare_exchange(AWAKE, PARKED, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok();
        if !parked {
            self.leave();
        }
        parked
    }

    /// Sleeper: is awake.
    pub(super) fn leave(&self) {
        // An exchange and not a store: what a waker did before it called is visible afterwards.
        self.state.swap(AWAKE, Ordering::SeqCst);
    }

    /// Calls the sleeper. Whether it has to be rung.
    pub(super) fn call(&self) -> bool {
        self.state.swap(CALLED, Ordering::SeqCst) == PARKED
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
