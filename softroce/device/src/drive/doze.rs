//! Until when the progress thread sleeps, for those who have something for it to do before that.
//!
//! The sleeper first says that it sleeps for ever, and then asks for the deadline. Who sets an earlier one does so first, and then looks whether the thread sleeps beyond it. So
//! one of the two sees what the other has done.

use doorbell_roce_proto::Instant;

use crate::sync::{AtomicU64, Ordering};

pub(crate) struct Doze {
    /// The deadline with which the thread sleeps; 0 while it is awake.
    until: AtomicU64,
}

impl Doze {
    pub(crate) fn new() -> Self {
        Self {
            until: AtomicU64::new(0),
        }
    }

    /// Sleeper: is about to sleep. `due` gives the deadline, if there is one.
    pub(crate) fn begin(&self, due: impl FnOnce() -> Option<Instant>) -> Option<Instant> {
        self.until.store(u64::MAX, Ordering::SeqCst);
        let due = due();
        if let Some(due) = due {
            self.until.store(due.0, Ordering::SeqCst);
        }
        due
    }

    /// Sleeper: is awake.
    pub(crate) fn end(&self) {
        self.until.store(0, Ordering::SeqCst);
    }

    /// Whether the thread, sleeping beyond `due`, is to be woken for it. What there is to do then has been made known before.
    pub(crate) fn is_beyond(&self, due: u64) -> bool {
        due < self.until.load(Ordering::SeqCst)
    }
}

#[cfg(all(test, doorbell_loom))]
mod model;
