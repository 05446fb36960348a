//! Until when the progress thread sleeps, for threads that give it earlier work.
//!
//! The sleeper stores "for ever" and then reads the deadline; a thread stores an earlier deadline
//! and then reads how long the sleeper sleeps. With sequential consistency one of the two sees the
//! other's store: no wake-up is lost (proved in `drive/sleep_deadline/model.rs`).

use doorbell_roce_proto::Instant;

use crate::sync::{AtomicU64, Ordering};

pub(crate) struct SleepDeadline {
    /// The deadline with which the thread sleeps; 0 while it is awake.
    until: AtomicU64,
}

impl SleepDeadline {
    pub(crate) fn new() -> Self {
        Self {
            until: AtomicU64::new(0),
        }
    }

    pub(crate) fn begin(&self, due: impl FnOnce() -> Option<Instant>) -> Option<Instant> {
        self.until.store(u64::MAX, Ordering::SeqCst);
        let due = due();
        if let Some(due) = due {
            self.until.store(due.0, Ordering::SeqCst);
        }
        due
    }

    pub(crate) fn end(&self) {
        self.until.store(0, Ordering::SeqCst);
    }

    /// Whether the thread sleeps past `due`. The caller has published its work before.
    pub(crate) fn sleeps_past(&self, due: u64) -> bool {
        due < self.until.load(Ordering::SeqCst)
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
