//! Loom models of the ring of slots, and of the registry's flag (`cargo xtask sanitize loom`).
//!
//! The device is a counter of completed requests. Where possible it is read and written *relaxed*:
//! then all ordering is the ring's own; a completion that comes too early is polled again.
//!
//! After refused requests `head` has had the same value twice, and only the provider's barriers,
//! before the doorbell and after reading the completion, determine which the poller reads.

use core::num::NonZeroUsize;
use core::ptr::NonNull;
use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use super::locked_registry::LockedRegistry;
use super::ring_cursor::RingCursor;
use super::table::Table;
use crate::memory::{Buffers, RangePtr};
use crate::qp::{QueueKind, Ring};

const KEY: u64 = 7 << 32;

/// Stands for the buffers of a request. It is never dereferenced.
fn token(number: u64) -> Buffers {
    let address = NonZeroUsize::new(8 * (number as usize + 1)).unwrap();
    let pointer: RangePtr = NonNull::without_provenance(address);
    // SAFETY: never dropped: `number_of` consumes it.
    unsafe { Buffers::from_head(Some(pointer)) }
}

fn number_of(buffers: Buffers) -> Option<u64> {
    let pointer = buffers.into_head()?;
    Some(pointer.addr().get() as u64 / 8 - 1)
}

struct Model {
    ring: Ring,
    completed: AtomicU64,
    /// The orderings by which `completed` is written and read.
    barriers: (Ordering, Ordering),
}

const NONE: (Ordering, Ordering) = (Ordering::Relaxed, Ordering::Relaxed);
const PROVIDERS: (Ordering, Ordering) = (Ordering::Release, Ordering::Acquire);

/// At most three preemptions: most bugs show with fewer (CHESS, Musuvathi and Qadeer 2007).
fn explore(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(run);
}

impl Model {
    fn new(depth: u32, barriers: (Ordering, Ordering)) -> Arc<Self> {
        Arc::new(Self {
            ring: Ring::new(depth, QueueKind::Send, 0),
            completed: AtomicU64::new(0),
            barriers,
        })
    }

    /// Poster: waits until the slot of `position` is free, and puts the buffers `number` there.
    fn stage(&self, position: u64, number: u64) {
        while position == self.ring.retired() + u64::from(self.ring.depth()) {
            thread::yield_now();
        }
        let slot = self.ring.slot_of(position) as usize;
        // SAFETY: the slot is the poster's, as the request that used it before is retired.
        unsafe { (*self.ring.slots().add(slot).as_ptr()).set(token(number).into_head()) };
    }

    fn complete(&self, position: u64) {
        self.completed.store(position, self.barriers.0);
    }

    /// Poller: retires `count` requests as they complete, and returns their buffers.
    fn poll(&self, count: u64) -> Vec<Option<u64>> {
        let ring = &self.ring;
        let mut numbers = Vec::new();
        while ring.tail() < count {
            let completed = self.completed.load(self.barriers.1);
            let confirmed = match completed.checked_sub(ring.tail() + 1) {
                Some(_) => ring.unretired_before(ring.slot_of(completed - 1) as u32, ring.tail()),
                None => None,
            };
            let Some(before) = confirmed else {
                thread::yield_now();
                continue;
            };
            for _ in 0..=before {
                let (mut next, in_flight) = RingCursor::at(ring, KEY, ring.tail());
                assert_ne!(in_flight, 0);
                // SAFETY: only this thread polls; the request is in flight, and confirmed.
                numbers.push(number_of(unsafe { next.take() }));
                // SAFETY: just taken; the ring outlives this call.
                unsafe { next.retire() };
            }
        }
        numbers
    }
}

#[test]
fn slots_go_round_between_poster_and_poller() {
    explore(|| {
        let model = Model::new(2, NONE);
        let poster = Arc::clone(&model);
        let posting = thread::spawn(move || {
            for number in 0..3 {
                poster.stage(number, number);
                poster.ring.publish_one();
                poster.complete(number + 1);
            }
        });
        assert_eq!(model.poll(3), [Some(0), Some(1), Some(2)]);
        posting.join().unwrap();
        assert_eq!(model.ring.in_flight(), 0);
    });
}

#[test]
fn refused_requests_are_reclaimed_while_the_poller_retires_the_rest() {
    explore(|| {
        let model = Model::new(2, PROVIDERS);
        let poster = Arc::clone(&model);
        let posting = thread::spawn(move || {
            let ring = &poster.ring;
            poster.stage(0, 0);
            poster.stage(1, 10);
            ring.publish(2);
            // The device accepts the first, completes it at once, and refuses the second.
            poster.complete(1);
            ring.publish(1);
            // SAFETY: this thread is the poster; the device did not accept what it put there.
            assert_eq!(number_of(unsafe { ring.reclaim(1) }), Some(10));
            for number in 1..3 {
                poster.stage(number, number);
                ring.publish_one();
                poster.complete(number + 1);
            }
        });
        assert_eq!(model.poll(3), [Some(0), Some(1), Some(2)]);
        posting.join().unwrap();
    });
}

#[test]
fn a_departure_is_never_overlooked() {
    explore(|| {
        let registry = Arc::new(LockedRegistry::new(4));
        let rings: Vec<_> = (0..2).map(|tag| Arc::new(Ring::new(2, QueueKind::Send, tag))).collect();
        let leaving: Vec<_> = rings
            .iter()
            .map(|ring| {
                let (registry, ring) = (Arc::clone(&registry), Arc::clone(ring));
                let key = registry.attach(&ring).unwrap();
                thread::spawn(move || registry.detach(key, &ring))
            })
            .collect();
        let mut table = Table::default();
        let mut departed = 0;
        let mut poll_registry = || {
            if registry.has_changed() {
                registry.clear_changed();
                let (gone, left) = registry.lock().apply_changes(&mut table, 0);
                assert_eq!(left, 0);
                departed += gone.len();
            }
        };
        poll_registry();
        poll_registry();
        for thread in leaving {
            thread.join().unwrap();
        }
        // The last poll finds whatever the earlier ones have not.
        poll_registry();
        assert_eq!((departed, registry.lock().free()), (2, 4));
    });
}
