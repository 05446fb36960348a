//! Loom models of a ring: records, slots, credits, sleep and revocation. Run by `cargo xtask
//! sanitize loom`.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use super::*;
use crate::sync::{AtomicU64, ModelEvent};

const SLOTS: usize = 2;

/// A ring whose slots hold a number, which loom tracks: reading it while it is written is an error.
pub(crate) struct ModelRing {
    tags: [AtomicU64; SLOTS],
    revoked: [AtomicU64; SLOTS],
    content: [UnsafeCell<u64>; SLOTS],
    head: AtomicU64,
    asleep: AtomicU64,
    credit_wanted: AtomicU64,
    /// What the records of the last model refer to.
    memory: AtomicU64,
    /// Wakes the consumer; the producer.
    events: [ModelEvent; 2],
}

// SAFETY: the cells are what is to be proved; loom reports two threads that access one at once.
unsafe impl Send for ModelRing {}
// SAFETY: as above.
unsafe impl Sync for ModelRing {}

impl ModelRing {
    pub(crate) fn new() -> Self {
        Self {
            tags: std::array::from_fn(|_| AtomicU64::new(0)),
            revoked: std::array::from_fn(|_| AtomicU64::new(0)),
            content: std::array::from_fn(|_| UnsafeCell::new(0)),
            head: AtomicU64::new(0),
            asleep: AtomicU64::new(0),
            credit_wanted: AtomicU64::new(0),
            memory: AtomicU64::new(0),
            events: Default::default(),
        }
    }

    pub(crate) fn push(&self, producer: &mut Producer, value: u64) {
        // SAFETY: what is to be proved.
        self.content[slot(self, producer.tail()) as usize].with_mut(|content| unsafe { *content = value });
        producer.publish(self);
    }

    /// Whether the producer must be woken for credits.
    pub(crate) fn consume(&self, consumer: &mut Consumer, value: u64, weight: u64) -> bool {
        // SAFETY: what is to be proved.
        let found = self.content[slot(self, consumer.next()) as usize].with(|content| unsafe { *content });
        assert_eq!(found, value);
        let wakes = consumer.consumed(self, weight);
        if wakes {
            self.events[1].set();
        }
        wakes
    }
}

impl RingWords for ModelRing {
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

    fn credit_wanted(&self) -> &AtomicU64 {
        &self.credit_wanted
    }
}

#[test]
fn records_arrive_whole_and_in_order_and_none_is_slept_through() {
    const RECORDS: u64 = 2;
    loom::model(|| {
        let ring = Arc::new(ModelRing::new());
        let sending = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                let mut producer = Producer::default();
                for value in 1..=RECORDS {
                    ring.push(&mut producer, value);
                    if producer.must_wake(&*ring) {
                        ring.events[0].set();
                    }
                }
            })
        };
        let mut consumer = Consumer::default();
        for value in 1..=RECORDS {
            while !consumer.ready(&*ring) {
                if consumer.sleep(&*ring) {
                    ring.events[0].wait();
                    consumer.awake(&*ring);
                }
            }
            ring.consume(&mut consumer, value, 0);
        }
        sending.join().unwrap();
    });
}

/// One record more than slots; the producer sleeps without credits, the consumer never.
#[test]
fn a_slot_is_reused_when_released_and_credits_are_not_slept_through() {
    const RECORDS: u64 = SLOTS as u64 + 1;
    loom::model(|| {
        let ring = Arc::new(ModelRing::new());
        let mut producer = Producer::default();
        for value in 1..RECORDS {
            ring.push(&mut producer, value);
        }
        let sending = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                while !producer.has_slot(&*ring) {
                    producer.request_credit_wakeup(&*ring).unwrap();
                    if !producer.has_slot(&*ring) {
                        ring.events[1].wait();
                    }
                }
                ring.push(&mut producer, RECORDS);
            })
        };
        let mut consumer = Consumer::default();
        for value in 1..=RECORDS {
            while !consumer.ready(&*ring) {
                consumer.publish_head(&*ring);
                thread::yield_now();
            }
            ring.consume(&mut consumer, value, 0);
        }
        sending.join().unwrap();
    });
}

/// The record uses all of the bulk area. There are slots left.
#[test]
fn bulk_credits_are_returned_at_once() {
    loom::model(|| {
        let ring = Arc::new(ModelRing::new());
        let mut producer = Producer::default();
        ring.push(&mut producer, 1);
        let sending = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                while producer.head() == 0 {
                    producer.request_credit_wakeup(&*ring).unwrap();
                    if producer.head() == 0 {
                        ring.events[1].wait();
                    }
                }
                // The slot stands for the bulk area. SAFETY: what is to be proved.
                ring.content[0].with_mut(|content| unsafe { *content = 2 });
            })
        };
        let mut consumer = Consumer::default();
        assert!(consumer.ready(&*ring));
        ring.consume(&mut consumer, 1, CREDIT);
        consumer.publish_head(&*ring);
        sending.join().unwrap();
    });
}

/// An idle consumer's head, published without a fence, is eventually seen by the producer.
#[test]
fn an_idle_consumer_publishes_its_head() {
    loom::model(|| {
        let ring = Arc::new(ModelRing::new());
        let mut producer = Producer::default();
        ring.push(&mut producer, 1);
        let sending = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                while producer.head() != 1 {
                    producer.refresh(&*ring).unwrap();
                    thread::yield_now();
                }
                // SAFETY: what is to be proved.
                ring.content[0].with_mut(|content| unsafe { *content = 2 });
            })
        };
        let mut consumer = Consumer::default();
        assert!(consumer.ready(&*ring));
        ring.consume(&mut consumer, 1, 0);
        consumer.publish_head(&*ring);
        sending.join().unwrap();
    });
}

/// The record refers to memory; the owner revokes it and writes something else.
#[test]
fn a_revoked_record_is_no_message() {
    const MESSAGE: u64 = 7;
    loom::model(|| {
        let ring = Arc::new(ModelRing::new());
        ring.memory.store(MESSAGE, Ordering::Relaxed);
        let mut producer = Producer::default();
        ring.push(&mut producer, 0);
        let owner = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                producer.revoke(&*ring, 0);
                producer.revoke_fence();
                ring.memory.store(MESSAGE + 1, Ordering::Relaxed);
            })
        };
        let consumer = Consumer::default();
        assert!(consumer.ready(&*ring));
        let copied = ring.memory.load(Ordering::Relaxed);
        if !Consumer::was_revoked(&*ring, consumer.next()) {
            assert_eq!(copied, MESSAGE);
        }
        owner.join().unwrap();
    });
}
