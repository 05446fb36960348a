//! Loom model of a thread that goes to sleep while others set deadlines: it reads each or is woken.
//! Run by `cargo xtask sanitize loom`.

use std::sync::Arc;

use loom::thread;

use super::*;
use crate::sync::{ModelEvent, Mutex};

const NEVER: u64 = u64::MAX;

struct Model {
    sleep: SleepDeadline,
    core: Mutex<()>,
    /// The engine's deadline, published under core, and the link's, which is not.
    due: [AtomicU64; 2],
    event: ModelEvent,
}

impl Model {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            sleep: SleepDeadline::new(),
            core: Mutex::new(()),
            due: [AtomicU64::new(NEVER), AtomicU64::new(NEVER)],
            event: ModelEvent::default(),
        })
    }

    fn wake_for(&self, due: u64) {
        if self.sleep.sleeps_past(due) {
            self.event.set();
        }
    }

    fn engine_due(&self, at: u64) {
        let core = self.core.lock();
        self.due[0].store(at, Ordering::SeqCst);
        drop(core);
        self.wake_for(at);
    }

    fn link_due(&self, at: u64) {
        self.due[1].store(at, Ordering::SeqCst);
        self.wake_for(at);
    }

    /// Sleeps once: until `earliest` if that is the deadline read, otherwise until woken.
    fn sleep(&self, earliest: u64) {
        let due = self.sleep.begin(|| {
            drop(self.core.lock());
            let due = self.due.iter().map(|due| due.load(Ordering::SeqCst)).min();
            due.filter(|&due| due != NEVER).map(Instant)
        });
        if due != Some(Instant(earliest)) {
            self.event.wait();
        }
        self.sleep.end();
    }
}

/// A deadline of 5 is set meanwhile. Loom reports a thread that sleeps for ever.
fn sleep_beside(
    prepare: impl Fn(&Model) + Copy + Send + Sync + 'static,
    set: impl Fn(&Model) + Copy + Send + Sync + 'static,
) {
    loom::model(move || {
        let model = Model::new();
        prepare(&model);
        let other = Arc::clone(&model);
        let setting = thread::spawn(move || set(&other));
        model.sleep(5);
        setting.join().unwrap();
    });
}

#[test]
fn a_deadline_of_the_engine_is_not_slept_through() {
    sleep_beside(|_| {}, |model| model.engine_due(5));
}

#[test]
fn a_deadline_of_the_link_is_not_slept_through() {
    sleep_beside(|_| {}, |model| model.link_due(5));
}

#[test]
fn an_earlier_deadline_ends_a_sleep_for_a_later_one() {
    sleep_beside(|model| model.link_due(9), |model| model.engine_due(5));
}
