//! Whether and how often threads of the application drive, as a hint for the progress thread.
//!
//! One word, which is odd while a thread is inside. It is written by plain loads and stores, since an atomic addition on the way in and another on the way out would take as long as a tenth of
//! the engine's part in a message. What threads that drive at the same time do to one another's counting is lost, but nothing stays wrong: the last of them to leave makes the word
//! even, and everyone who comes later counts from there.

use crate::sync::{AtomicU64, Ordering};

/// How often threads of the application have driven, twice, and 1 while one is driving.
pub(crate) struct Application(AtomicU64);

impl Application {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Drives on behalf of a thread of the application.
    pub(super) fn drive(&self, drive: impl FnOnce()) {
        self.0.store(self.drives().wrapping_add(1) << 1 | 1, Ordering::Relaxed);
        drive();
        self.0.store(self.0.load(Ordering::Relaxed) & !1, Ordering::Relaxed);
    }

    /// How often one has driven: one that is different from what it was says more than its value.
    pub(crate) fn drives(&self) -> u64 {
        self.0.load(Ordering::Relaxed) >> 1
    }

    /// Whether one is driving right now.
    pub(crate) fn is_inside(&self) -> bool {
        self.0.load(Ordering::Relaxed) & 1 != 0
    }
}

#[cfg(all(test, not(doorbell_loom)))]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_drive_is_counted_and_seen_while_it_lasts() {
        let application = Application::new();
        assert!(!application.is_inside());
        application.drive(|| assert!(application.is_inside()));
        assert_eq!((application.drives(), application.is_inside()), (1, false));
    }

    #[test]
    fn whoever_leaves_last_leaves_nobody_inside() {
        let application = Application::new();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| application.drive(|| {})));
            }
        });
        assert!(!application.is_inside());
        let before = application.drives();
        application.drive(|| {});
        assert_eq!(application.drives(), before + 1);
    }
}
