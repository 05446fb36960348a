//! Loom model of threads that wait on one source: none sleeps for an event that another has read,
//! or for a lead that no thread has. Run by `cargo xtask sanitize loom`.

use std::collections::VecDeque;
use std::sync::Arc;

use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::*;

#[derive(Default)]
struct Descriptor {
    events: Mutex<VecDeque<u32>>,
    readable: Condvar,
    fails: Mutex<bool>,
}

impl Descriptor {
    fn raise(&self, event: u32) {
        self.events.lock().unwrap().push_back(event);
        self.readable.notify_all();
    }
}

impl EventSource<Vec<u32>> for Descriptor {
    type Error = u32;

    fn read(&self, record: &mut Vec<u32>) -> (bool, Result<(), u32>) {
        let mut events = self.events.lock().unwrap();
        let any = !events.is_empty();
        record.extend(events.drain(..));
        (any, Ok(()))
    }

    fn sleep(&self, _: Deadline) -> Result<(), u32> {
        if std::mem::take(&mut *self.fails.lock().unwrap()) {
            return Err(FAILURE);
        }
        let mut events = self.events.lock().unwrap();
        while events.is_empty() {
            events = self.readable.wait(events).unwrap();
        }
        Ok(())
    }
}

#[derive(Default)]
struct Channel {
    waiters: LeaderFollowers<Vec<u32>>,
    descriptor: Descriptor,
}

const FAILURE: u32 = 7;

fn of(wanted: u32) -> impl FnMut(&mut Vec<u32>) -> Option<u32> {
    move |record| {
        let at = record.iter().position(|&event| event == wanted)?;
        Some(record.remove(at))
    }
}

impl Channel {
    fn wait(&self, wanted: u32) -> Result<Option<u32>, u32> {
        self.waiters.wait(&self.descriptor, Deadline::NEVER, of(wanted))
    }
}

/// A model whose deadlocks (a thread that sleeps for ever) loom reports.
fn model(run: impl Fn(Arc<Channel>) + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || run(Arc::new(Channel::default())));
}

#[test]
fn each_waiter_gets_its_own_event_whichever_thread_reads_it() {
    model(|channel| {
        let waiting = [1, 2].map(|wanted| {
            let channel = Arc::clone(&channel);
            thread::spawn(move || channel.wait(wanted))
        });
        channel.descriptor.raise(2);
        channel.descriptor.raise(1);
        assert_eq!(waiting.map(|thread| thread.join().unwrap()), [Ok(Some(1)), Ok(Some(2))]);
    });
}

#[test]
fn a_leader_that_fails_leaves_the_lead_to_another() {
    model(|channel| {
        *channel.descriptor.fails.lock().unwrap() = true;
        let waiting = [1, 2].map(|wanted| {
            let channel = Arc::clone(&channel);
            thread::spawn(move || channel.wait(wanted))
        });
        channel.descriptor.raise(1);
        channel.descriptor.raise(2);
        let got = waiting.map(|thread| thread.join().unwrap());
        // Neither sleeps for ever, and at most one has failed.
        let right = [
            [Ok(Some(1)), Ok(Some(2))],
            [Err(FAILURE), Ok(Some(2))],
            [Ok(Some(1)), Err(FAILURE)],
        ];
        assert!(right.contains(&got), "{got:?}");
    });
}

#[test]
fn a_non_blocking_reader_wakes_the_sleeping_waiters() {
    model(|channel| {
        let waiter = Arc::clone(&channel);
        let waiting = thread::spawn(move || waiter.wait(1));
        channel.descriptor.raise(1);
        // It may read the event of the waiter, which must be notified.
        let found = channel.waiters.try_find(&channel.descriptor, &mut of(2));
        assert_eq!(found, Ok(None));
        assert_eq!(waiting.join().unwrap(), Ok(Some(1)));
    });
}
