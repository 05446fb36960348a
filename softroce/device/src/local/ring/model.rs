//! Loom models of a ring: records arrive whole and in order, slots are reused only when they are
//! released, no record and no credit is slept through, and revoked memory is never taken for a
//! message. Run by `cargo xtask sanitize loom`.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use super::*;
use crate::sync::{AtomicU64, Bell};

const SLOTS: usize = 2;

/// A ring whose slots hold a number, which loom tracks: reading it while it is written is an error.
struct Lane {
    tags: [AtomicU64; SLOTS],
    revoked: [AtomicU64; SLOTS],
    content: [UnsafeCell<u64>; SLOTS],
    head: AtomicU64,
    asleep: AtomicU64,
    starved: AtomicU64,
    /// What the records of the last model refer to.
    memory: AtomicU64,
    /// Wakes the consumer; the producer.
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

    fn consume(&self, consumer: &mut Consumer, value: u64, bulky: bool) {
        // SAFETY: what is to be proved.
        let found = self.content[slot(self, consumer.next()) as usize].with(|content| unsafe { *content });
        assert_eq!(found, value);
        if consumer.consumed(self, bulky) {
            self.bells[1].ring();
        }
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

/// The consumer sleeps when there is no record.
#[test]
fn records_come_whole_and_in_order_and_none_is_slept_through() {
    const RECORDS: u64 = 2;
    loom::model(|| {
        let lane = Arc::new(Lane::new());
        let sending = {
            let lane = Arc::clone(&lane);
            thread::spawn(move || {
                let mut producer = Producer::default();
                for value in 1..=RECORDS {
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
                if consumer.sleep(&*lane) {
                    lane.bells[0].wait();
                    consumer.awake(&*lane);
                }
            }
            lane.consume(&mut consumer, value, false);
        }
        sending.join().unwrap();
    });
}

/// One record more than there are slots; the producer sleeps while there are no credits, the
/// consumer never.
#[test]
fn a_slot_is_written_again_when_it_is_done_with_and_room_is_not_slept_through() {
    const RECORDS: u64 = SLOTS as u64 + 1;
    loom::model(|| {
        let lane = Arc::new(Lane::new());
        let mut producer = Producer::default();
        for value in 1..RECORDS {
            lane.push(&mut producer, value);
        }
        let sending = {
            let lane = Arc::clone(&lane);
            thread::spawn(move || {
                while !producer.has_slot(&*lane) {
                    producer.starve(&*lane).unwrap();
                    if !producer.has_slot(&*lane) {
                        lane.bells[1].wait();
                    }
                }
                lane.push(&mut producer, RECORDS);
            })
        };
        let mut consumer = Consumer::default();
        for value in 1..=RECORDS {
            while !consumer.ready(&*lane) {
                consumer.idle(&*lane);
                thread::yield_now();
            }
            lane.consume(&mut consumer, value, false);
        }
        sending.join().unwrap();
    });
}

/// The record uses all of the bulk area. There are slots left.
#[test]
fn bulk_is_given_back_at_once() {
    loom::model(|| {
        let lane = Arc::new(Lane::new());
        let mut producer = Producer::default();
        lane.push(&mut producer, 1);
        let sending = {
            let lane = Arc::clone(&lane);
            thread::spawn(move || {
                while producer.head() == 0 {
                    producer.starve(&*lane).unwrap();
                    if producer.head() == 0 {
                        lane.bells[1].wait();
                    }
                }
                // The slot stands for the bulk area: reused only when it is released. SAFETY: what
                // is to be proved.
                lane.content[0].with_mut(|content| unsafe { *content = 2 });
            })
        };
        let mut consumer = Consumer::default();
        assert!(consumer.ready(&*lane));
        lane.consume(&mut consumer, 1, true);
        consumer.idle(&*lane);
        sending.join().unwrap();
    });
}

/// An idle consumer's head, published without a fence, is eventually seen by the producer.
#[test]
fn an_idle_consumer_tells_how_far_it_is() {
    loom::model(|| {
        let lane = Arc::new(Lane::new());
        let mut producer = Producer::default();
        lane.push(&mut producer, 1);
        let sending = {
            let lane = Arc::clone(&lane);
            thread::spawn(move || {
                while producer.head() != 1 {
                    producer.refresh(&*lane).unwrap();
                    thread::yield_now();
                }
                // SAFETY: what is to be proved.
                lane.content[0].with_mut(|content| unsafe { *content = 2 });
            })
        };
        let mut consumer = Consumer::default();
        assert!(consumer.ready(&*lane));
        lane.consume(&mut consumer, 1, false);
        consumer.idle(&*lane);
        sending.join().unwrap();
    });
}

/// The record refers to memory; the owner revokes it and writes something else.
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
