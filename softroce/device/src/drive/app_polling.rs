//! Whether and how often application threads poll, as a hint for the progress thread.
//!
//! One word, odd while a thread is inside, written by plain loads and stores: two atomic additions
//! would take a tenth of the engine's time per message. Racing threads may lose counts, but the
//! last one to leave makes the word even. No model: it only hints how to wait.

use crate::sync::{AtomicU64, Ordering};

/// Twice the number of drives by application threads, plus 1 while one is in progress.
pub(crate) struct AppPolling(AtomicU64);

impl AppPolling {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub(super) fn drive(&self, drive: impl FnOnce()) {
        self.0.store(self.drives().wrapping_add(1) << 1 | 1, Ordering::Relaxed);
        drive();
        self.0.store(self.0.load(Ordering::Relaxed) & !1, Ordering::Relaxed);
    }

    /// Drives so far: only whether it changed is meaningful.
    pub(crate) fn drives(&self) -> u64 {
        self.0.load(Ordering::Relaxed) >> 1
    }

    pub(crate) fn is_active(&self) -> bool {
        self.0.load(Ordering::Relaxed) & 1 != 0
    }
}

#[cfg(all(test, not(doorbell_loom)))]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_drive_is_counted_and_seen_while_it_lasts() {
        let polling = AppPolling::new();
        assert!(!polling.is_active());
        polling.drive(|| assert!(polling.is_active()));
        assert_eq!((polling.drives(), polling.is_active()), (1, false));
    }

    #[test]
    fn the_last_thread_to_leave_makes_it_inactive() {
        let polling = AppPolling::new();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| polling.drive(|| {})));
            }
        });
        assert!(!polling.is_active());
        let before = polling.drives();
        polling.drive(|| {});
        assert_eq!(polling.drives(), before + 1);
    }
}
