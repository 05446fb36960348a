//! Loom model of a thread that sleeps and of its wakers: no notification is slept through, and what
//! was done before one is seen after it. Run by `cargo xtask sanitize loom`.

use std::sync::Arc;

use loom::sync::atomic::AtomicBool;
use loom::thread;

use super::*;
use crate::sync::Bell;

struct Model {
    gate: Gate,
    bell: Bell,
    /// Relaxed: made visible by the notification alone.
    done: [AtomicBool; 2],
}

impl Model {
    fn call(&self, which: usize) {
        self.done[which].store(true, Ordering::Relaxed);
        if self.gate.call() {
            self.bell.ring();
        }
    }

    fn is_done(&self, which: usize) -> bool {
        self.done[which].load(Ordering::Relaxed)
    }

    fn sleep(&self) {
        if self.gate.enter() {
            self.bell.wait();
            self.gate.leave();
        }
    }
}

/// A thread sleeps until it has seen the work of `callers` threads. Loom reports one that sleeps
/// for ever.
fn sleep_beside(callers: usize) {
    loom::model(move || {
        let model = Arc::new(Model {
            gate: Gate::new(),
            bell: Bell::default(),
            done: [AtomicBool::new(false), AtomicBool::new(false)],
        });
        let calling: Vec<_> = (0..callers)
            .map(|which| {
                let caller = Arc::clone(&model);
                thread::spawn(move || caller.call(which))
            })
            .collect();
        for which in 0..callers {
            while !model.is_done(which) {
                model.sleep();
            }
        }
        for thread in calling {
            thread.join().unwrap();
        }
    });
}

#[test]
fn a_call_is_not_slept_through() {
    sleep_beside(1);
}

#[test]
fn two_callers_are_both_heard() {
    sleep_beside(2);
}
