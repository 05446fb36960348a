//! Loom models of a shared receive queue's slots (`cargo xtask sanitize loom`).
//!
//! As in `cq/model.rs` the device orders nothing for one poller. With two, a slot returned by one
//! may complete to the other, which the provider's barriers let see the second posting.

use core::num::NonZeroUsize;
use core::ptr::NonNull;
use std::sync::Arc;

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

use super::slots::{ReturnRing, Slots};
use crate::memory::{Buffers, RangePtr};

/// Stands for the buffers of a request. It is never dereferenced.
fn token(number: usize) -> Buffers {
    let pointer: RangePtr = NonNull::without_provenance(NonZeroUsize::new(8 * number).unwrap());
    // SAFETY: never dropped: `number_of` consumes it.
    unsafe { Buffers::from_head(Some(pointer)) }
}

fn number_of(buffers: Buffers) -> Option<usize> {
    buffers.into_head().map(|pointer| pointer.addr().get() / 8)
}

struct Model {
    slots: Arc<Slots>,
    returns: Vec<ReturnRing>,
    /// Completions of each queue: 1 + the slot, 0 when there is none yet.
    completions: Vec<Vec<AtomicU32>>,
    barriers: (Ordering, Ordering),
}

impl Model {
    /// One completion queue per element of `completions`, each with that many completions.
    fn new(depth: u32, completions: &[usize], barriers: (Ordering, Ordering)) -> Arc<Self> {
        let slots = Arc::new(Slots::new(depth));
        Arc::new(Self {
            returns: completions
                .iter()
                .map(|_| ReturnRing::new(0, Arc::clone(&slots)))
                .collect(),
            completions: completions
                .iter()
                .map(|&count| (0..count).map(|_| AtomicU32::new(0)).collect())
                .collect(),
            slots,
            barriers,
        })
    }

    /// Poster: posts `number` in `slot`, which completes at once, to `queue` as completion `at`.
    fn post(&self, slot: u32, number: usize, (queue, at): (usize, usize)) {
        // SAFETY: this thread is the poster, and the slot is free.
        unsafe { self.slots.put(slot, token(number)) };
        self.completions[queue][at].store(slot + 1, self.barriers.0);
    }

    fn free_slot(&self, queue: usize) -> u32 {
        loop {
            if let Some(slot) = self.returns[queue].pop() {
                return slot;
            }
            thread::yield_now();
        }
    }

    /// Poller: the buffers of all requests that complete to `queue`.
    fn poll(&self, queue: usize) -> Vec<Option<usize>> {
        let retire = |completion: &AtomicU32| loop {
            if let Some(slot) = completion.load(self.barriers.1).checked_sub(1)
                // SAFETY: the queue's only poller, which has the completion of this slot.
                && let Some(buffers) = unsafe { self.returns[queue].retire(slot) }
            {
                return number_of(buffers);
            }
            thread::yield_now();
        };
        self.completions[queue].iter().map(retire).collect()
    }
}

fn explore(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(run);
}

#[test]
fn slots_go_to_the_poller_and_come_back() {
    explore(|| {
        let model = Model::new(2, &[3], (Ordering::Relaxed, Ordering::Relaxed));
        let poster = Arc::clone(&model);
        let posting = thread::spawn(move || {
            poster.post(0, 10, (0, 0));
            poster.post(1, 11, (0, 1));
            let slot = poster.free_slot(0);
            poster.post(slot, 12, (0, 2));
        });
        assert_eq!(model.poll(0), [Some(10), Some(11), Some(12)]);
        posting.join().unwrap();
    });
}

#[test]
fn a_slot_goes_round_by_one_completion_queue_and_then_by_another() {
    explore(|| {
        let model = Model::new(1, &[1, 1], (Ordering::Release, Ordering::Acquire));
        let polling = [0, 1].map(|queue| {
            let poller = Arc::clone(&model);
            thread::spawn(move || poller.poll(queue))
        });
        model.post(0, 10, (0, 0));
        let slot = model.free_slot(0);
        model.post(slot, 11, (1, 0));
        let [first, second] = polling.map(|thread| thread.join().unwrap());
        assert_eq!((first, second), (vec![Some(10)], vec![Some(11)]));
    });
}
