//! The two tasks of a stream: one reads, one writes, and both may sleep for the same event.

use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};

/// What a task does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Read,
    Write,
}

/// Wakes whoever sleeps: descriptors keep one waker only.
#[derive(Debug, Default)]
pub(crate) struct Wakers {
    sleeping: Mutex<[Option<Waker>; 2]>,
}

impl Wakers {
    pub(crate) fn sleep(&self, side: Side, waker: &Waker) {
        let slot = &mut self.lock()[side as usize];
        match slot {
            Some(known) if known.will_wake(waker) => {}
            _ => *slot = Some(waker.clone()),
        }
    }

    /// Wakes the other task: what it sleeps for may have come.
    pub(crate) fn wake_other(&self, side: Side) {
        let other = match side {
            Side::Read => Side::Write,
            Side::Write => Side::Read,
        };
        let waker = self.lock()[other as usize].take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn wake_all(&self) {
        let sleeping = std::mem::take(&mut *self.lock());
        for waker in sleeping.into_iter().flatten() {
            waker.wake();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, [Option<Waker>; 2]> {
        // A waker's clone that panics leaves the slots as they were.
        self.sleeping.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Wakers {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wake_all();
    }
}
