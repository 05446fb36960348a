//! Loom model of the combining lock: all delegated work is done by some thread before all have
//! left. Run by `cargo xtask sanitize loom`.

use std::sync::Arc;

use loom::thread;

use super::*;
use crate::sync::AtomicU64;

struct Link {
    core: Mutex<u32>,
    tx: CombiningLock<u32>,
    calls: AtomicU64,
}

impl Link {
    fn post(&self) {
        let mut core = self.core.lock();
        *core += 1;
        self.tx.run_or_delegate(
            core,
            |mut core, mut tx| {
                // A batch has space for one.
                let taken = u32::from(*core > 0);
                *core -= taken;
                let more = *core > 0;
                drop(core);
                // The system call, during which other threads arrive.
                self.calls.fetch_add(1, Ordering::Relaxed);
                *tx += taken;
                more
            },
            drop,
            || self.core.lock(),
        );
    }
}

fn nothing_is_left_behind(threads: u32, preemptions: usize) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(move || {
        let link = Arc::new(Link {
            core: Mutex::new(0),
            tx: CombiningLock::new(0),
            calls: AtomicU64::new(0),
        });
        let posting: Vec<_> = (1..threads)
            .map(|_| {
                let link = Arc::clone(&link);
                thread::spawn(move || link.post())
            })
            .collect();
        link.post();
        for thread in posting {
            thread.join().unwrap();
        }
        assert_eq!((*link.core.lock(), *link.tx.lock()), (0, threads));
    });
}

#[test]
fn two_threads_leave_nothing_behind() {
    nothing_is_left_behind(2, 4);
}

#[test]
fn three_threads_leave_nothing_behind() {
    nothing_is_left_behind(3, 2);
}
