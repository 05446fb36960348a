//! Loom's models of a lane: records arrive whole and in order, slots are written again only when they are done with, nobody sleeps through a record or through room, and
//! what was taken back is never taken for a message. Run by `cargo xtask sanitize loom`.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use super::*;
use crate::sync::{AtomicU64, Bell};

const SLOTS: usize = 2;

/// A lane whose slots hold a number, which loom watches: reading it while it is written is an error.
struct Lane {
    tags: [AtomicU64; SLOTS],
    revoked: [AtomicU64; SLOTS],
    content: [UnsafeCell<u64>; SLOTS],
    head: AtomicU64,
    asleep: AtomicU64,
    starved: AtomicU64,
    /// What the records of the last model refer to.
    memory: AtomicU64,
    /// Wake the consumer; the producer.
    bells: [Bell; 2],
}

// SAFETY: the cells are what is to be proved; loom reports two threads that access one at once.
unsafe impl Send for Lane {}
// SAFETY: as above.
unsafe impl Sync for Lane {}

impl Lane {
    fn new() -> Self {
        Self {
            tags: std::array::from_fn(|_| AtomicU64::new(0)),
            revoked: std::array::from_fn(|_| AtomicU64::new(0)),
            content: std::array::from_fn(|_| UnsafeCell::new(0)),
            head: AtomicU64::new(0),
            asleep: AtomicU64::new(0),
            starved: AtomicU64::new(0),
            memory: AtomicU64::new(0),
            bells: Default::default(),
        }
    }

    fn push(&self, producer: &mut Producer, value: u64) {
        // SAFETY: what is to be proved.
        self.content[slot(self, producer.tail()) as usize].with_mut(|content| unsafe { *content = value });
        producer.publish(self);
    }

    fn read(&self, consumer: &Consumer) -> u64 {
        // SAFETY: what is to be proved.
        self.content[slot(self, consumer.next()) as usize].with(|content| unsafe { *content })
    }
}

impl Words for Lane {
    type Word = AtomicU64;

    fn slots(&self) -> u64 {
        SLOTS as u64
    }

    fn tag(&self, slot: u64) -> &AtomicU64 {
        &self.tags[slot as usize]
    }

    fn revoked(&self, slot: u64) -> &AtomicU64 {
        &self.revoked[slot as usize]
    }

    fn head(&self) -> &AtomicU64 {
        &self.head
    }

    fn asleep(&self) -> &AtomicU64 {
        &self.asleep
    }

    fn starved(&self) -> &AtomicU64 {
        &self.starved
    }
}

/// Three records through two slots, of which each is `bulky` or not; both ends sleep when they have nothing to do.
fn three_through_two(bulky: bool) {
    const RECORDS: u64 = 3;
    loom::model(move || {
        let lane = Arc::new(Lane::new());
        let sending = {
            let lane = Arc::clone(&lane);
            thread::spawn(move || {
                let mut producer = Producer::default();
                for value in 1..=RECORDS {
                    while !producer.has_slot(&*lane) {
                        producer.starve(&*lane).unwrap();
                        if !producer.has_slot(&*lane) {
                            lane.bells[1].wait();
                        }
                    }
                    lane.push(&mut producer, value);
                    if producer.must_ring(&*lane) {
                        lane.bells[0].ring();
                    }
                }
            })
        };
        let mut consumer = Consumer::default();
        for value in 1..=RECORDS {
            while !consumer.ready(&*lane) {
                consumer.idle(&*lane);
                if consumer.sleep(&*lane) {
                    lane.bells[0].wait();
                    consumer.awake(&*lane);
                }
            }
            assert_eq!(lane.read(&consumer), value);
            if consumer.consumed(&*lane, bulky) {
                lane.bells[1].ring();
            }
        }
        sending.join().unwrap();
    });
}

#[test]
fn records_come_whole_and_in_order_and_nobody_sleeps_for_ever() {
    three_through_two(false);
}

#[test]
fn bulk_is_given_back_at_once() {
    three_through_two(true);
}

/// The record refers to memory, of which the owner takes it back and writes something else.
#[test]
fn what_was_taken_back_is_no_message() {
    const MESSAGE: u64 = 7;
    loom::model(|| {
        let lane = Arc::new(Lane::new());
        lane.memory.store(MESSAGE, Ordering::Relaxed);
        let mut producer = Producer::default();
        lane.push(&mut producer, 0);
        let owner = {
            let lane = Arc::clone(&lane);
            thread::spawn(move || {
                producer.revoke(&*lane, 0);
                producer.settle();
                lane.memory.store(MESSAGE + 1, Ordering::Relaxed);
            })
        };
        let consumer = Consumer::default();
        assert!(consumer.ready(&*lane));
        let copied = lane.memory.load(Ordering::Relaxed);
        if !Consumer::was_revoked(&*lane, consumer.next()) {
            assert_eq!(copied, MESSAGE);
        }
        owner.join().unwrap();
    });
}
