//! Whether a thread sleeps and was notified, so that a waker makes a system call only when needed.
//! No wake-up is lost: proved by the models in `link/park/wake_state/model.rs`.

use crate::sync::{AtomicU8, Ordering};

const AWAKE: u8 = 0;
/// The thread sleeps or is about to: a notification needs a system call.
const PARKED: u8 = 1;
/// Notified: the thread does not sleep the next time it tries.
const NOTIFIED: u8 = 2;

pub(super) struct WakeState {
    state: AtomicU8,
}

impl WakeState {
    pub(super) fn new() -> Self {
        Self {
            state: AtomicU8::new(AWAKE),
        }
    }

    /// `false` when it was notified since it last slept, so that it must not sleep.
    pub(super) fn begin_sleep(&self) -> bool {
        let parked = self
            .state
            .compare_exchange(AWAKE, PARKED, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok();
        if !parked {
            self.end_sleep();
        }
        parked
    }

    pub(super) fn end_sleep(&self) {
        // An exchange and not a store: what a waker did before it notified is visible afterwards.
        self.state.swap(AWAKE, Ordering::SeqCst);
    }

    /// Notifies the sleeper. Whether it must be woken.
    pub(super) fn notify(&self) -> bool {
        self.state.swap(NOTIFIED, Ordering::SeqCst) == PARKED
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
