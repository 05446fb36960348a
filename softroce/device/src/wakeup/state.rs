//! Whether the progress thread sleeps, until when, and what it must see before it does.
//!
//! The sleeper stores "for ever" in `until` and then reads the reasons and deadlines; a thread
//! publishes one of those and then reads `until`. With sequential consistency one of the two sees
//! the other's store, so no wake-up is lost. Who replaces an announced sleep by [`AWAKE`] wakes the
//! sleeper: one system call per sleep.

use crate::sync::{AtomicU64, Ordering};

/// What the progress thread has to do, as a bit mask.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Reasons(u64);

impl Reasons {
    /// The device is being closed.
    pub(crate) const STOP: Self = Self(1);
    /// ACKs are delayed. Changed under core.
    pub(crate) const DELAYED_ACK: Self = Self(1 << 1);
    /// Copies of GPU memory are in flight. Changed under core.
    pub(crate) const COPYING: Self = Self(1 << 2);
    /// The ring of this process to itself has records. Retracted by the end of the next sleep.
    pub(crate) const OWN_RECORDS: Self = Self(1 << 3);
    /// The socket has no space for the batch: the sleep waits for space. Changed under tx.
    pub(crate) const UDP_BLOCKED: Self = Self(1 << 4);
    /// A shm ring is full: the sleeper requests a credit wake-up first. Changed under core.
    pub(crate) const RING_BLOCKED: Self = Self(1 << 5);

    const STAY_AWAKE: Self = Self(Self::STOP.0 | Self::DELAYED_ACK.0 | Self::COPYING.0 | Self::OWN_RECORDS.0);

    /// Those changed under core alone.
    const OF_CORE: Self = Self(Self::DELAYED_ACK.0 | Self::COPYING.0 | Self::RING_BLOCKED.0);

    pub(crate) fn intersects(self, others: Self) -> bool {
        self.0 & others.0 != 0
    }
}

/// What has a deadline, in nanoseconds of the device's clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Deadline {
    /// The engine needs `handle_timeout`. Changed under core.
    Engine,
    /// A moderated completion channel is to be notified. Changed under core.
    Channels,
    /// The link needs `transmit`. Changed under tx.
    Link,
}

pub(crate) const NEVER: u64 = u64::MAX;

const AWAKE: u64 = 0;

pub(super) struct SleepState {
    /// Those [of core](Reasons::OF_CORE), written without a read-modify-write; and the others.
    of_core: AtomicU64,
    reasons: AtomicU64,
    deadlines: [AtomicU64; 3],
    /// The deadline with which the thread sleeps, or is about to.
    until: AtomicU64,
}

/// What a sleeper has read after its announcement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Prepared {
    pub(super) reasons: Reasons,
    pub(super) due: u64,
}

impl SleepState {
    pub(super) fn new() -> Self {
        Self {
            of_core: AtomicU64::new(0),
            reasons: AtomicU64::new(0),
            deadlines: std::array::from_fn(|_| AtomicU64::new(NEVER)),
            until: AtomicU64::new(AWAKE),
        }
    }

    /// One reason, of core under core.
    #[inline]
    pub(super) fn publish(&self, reason: Reasons) {
        if reason.intersects(Reasons::OF_CORE) {
            let others = self.of_core.load(Ordering::Relaxed);
            self.of_core.store(others | reason.0, Ordering::SeqCst);
        } else {
            self.reasons.fetch_or(reason.0, Ordering::SeqCst);
        }
    }

    /// As [`publish`](Self::publish). A sleeper that does not see it yet wakes once too often.
    #[inline]
    pub(super) fn retract(&self, reason: Reasons) {
        if reason.intersects(Reasons::OF_CORE) {
            let others = self.of_core.load(Ordering::Relaxed);
            self.of_core.store(others & !reason.0, Ordering::Release);
        } else {
            self.reasons.fetch_and(!reason.0, Ordering::SeqCst);
        }
    }

    #[inline]
    pub(super) fn has(&self, reason: Reasons) -> bool {
        let word = match reason.intersects(Reasons::OF_CORE) {
            true => &self.of_core,
            false => &self.reasons,
        };
        Reasons(word.load(Ordering::Relaxed)).intersects(reason)
    }

    pub(super) fn set_deadline(&self, which: Deadline, at: u64) {
        let deadline = &self.deadlines[which as usize];
        // Mostly unchanged: a load is cheaper than a SeqCst store.
        if deadline.load(Ordering::Relaxed) != at {
            deadline.store(at, Ordering::SeqCst);
        }
    }

    pub(super) fn deadline(&self, which: Deadline) -> u64 {
        self.deadlines[which as usize].load(Ordering::Relaxed)
    }

    /// Whether the caller must wake the sleeper, as it sleeps past `at`. The caller has published
    /// its work before.
    pub(super) fn must_wake(&self, at: u64) -> bool {
        at < self.until.load(Ordering::SeqCst) && self.until.swap(AWAKE, Ordering::SeqCst) != AWAKE
    }

    pub(super) fn is_asleep(&self) -> bool {
        self.until.load(Ordering::Relaxed) != AWAKE
    }

    pub(super) fn prepare_sleep(&self) -> Option<Prepared> {
        self.until.swap(NEVER, Ordering::SeqCst);
        let reasons = Reasons(self.of_core.load(Ordering::SeqCst) | self.reasons.load(Ordering::SeqCst));
        let deadlines = self.deadlines.iter().map(|due| due.load(Ordering::SeqCst));
        let due = deadlines.fold(NEVER, u64::min).max(AWAKE + 1);
        let until = self
            .until
            .compare_exchange(NEVER, due, Ordering::SeqCst, Ordering::SeqCst);
        if until.is_err() || reasons.intersects(Reasons::STAY_AWAKE) {
            self.end_sleep();
            return None;
        }
        Some(Prepared { reasons, due })
    }

    pub(super) fn end_sleep(&self) {
        // An exchange and not a store: what a waker did before is visible afterwards.
        self.until.swap(AWAKE, Ordering::SeqCst);
        if self.has(Reasons::OWN_RECORDS) {
            self.retract(Reasons::OWN_RECORDS);
        }
    }
}

#[cfg(all(test, doorbell_loom))]
#[path = "model.rs"]
mod model;
