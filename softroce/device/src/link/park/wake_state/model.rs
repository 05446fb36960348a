//! Loom model of a thread that sleeps and of its wakers: no notification is slept through, and what
//! was done before one is seen after it. Run by `cargo xtask sanitize loom`.

use std::sync::Arc;

use loom::sync::atomic::AtomicBool;
use loom::thread;

use super::*;
use crate::sync::ModelEvent;

struct Model {
    wake_state: WakeState,
    event: ModelEvent,
    /// Relaxed: made visible by the notification alone.
    done: [AtomicBool; 2],
}

impl Model {
    fn notify(&self, which: usize) {
        self.done[which].store(true, Ordering::Relaxed);
        if self.wake_state.notify() {
            self.event.set();
        }
    }

    fn is_done(&self, which: usize) -> bool {
        self.done[which].load(Ordering::Relaxed)
    }

    fn sleep(&self) {
        if self.wake_state.begin_sleep() {
            self.event.wait();
            self.wake_state.end_sleep();
        }
    }
}

/// Sleeps until the work of `callers` threads is seen. Loom reports a thread that sleeps for ever.
fn sleep_beside(callers: usize) {
    loom::model(move || {
        let model = Arc::new(Model {
            wake_state: WakeState::new(),
            event: ModelEvent::default(),
            done: [AtomicBool::new(false), AtomicBool::new(false)],
        });
        let notifying: Vec<_> = (0..callers)
            .map(|which| {
                let caller = Arc::clone(&model);
                thread::spawn(move || caller.notify(which))
            })
            .collect();
        for which in 0..callers {
            while !model.is_done(which) {
                model.sleep();
            }
        }
        for thread in notifying {
            thread.join().unwrap();
        }
    });
}

#[test]
fn a_notification_is_not_slept_through() {
    sleep_beside(1);
}

#[test]
fn two_notifications_are_both_seen() {
    sleep_beside(2);
}
