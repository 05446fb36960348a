//! Ring tests: any interleaving of stores, full rings, many laps, and hostile kernels.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::proxy::{Operation, SignalOp, SignalUpdate};

fn descriptor() -> impl Strategy<Value = Descriptor> {
    const FIELD: u64 = u64::MAX >> 8;
    let update = prop_oneof![
        any::<u64>().prop_map(SignalOp::Set),
        any::<u64>().prop_map(SignalOp::Add)
    ];
    let signaling = (0..=FIELD, update).prop_map(|(signal, update)| SignalUpdate { signal, update });
    let operation = prop_oneof![
        prop::option::of(signaling.clone()).prop_map(Operation::Put),
        Just(Operation::Get),
        signaling.prop_map(Operation::Signal),
    ];
    let numbers = (any::<u32>(), 0..=FIELD, 0..=FIELD, 0..=FIELD, 0..=FIELD);
    (operation, numbers).prop_map(|(operation, (peer, len, local, remote, id))| Descriptor {
        operation,
        peer,
        len,
        local,
        remote,
        id,
    })
}

/// A kernel thread with an index, and the words it has yet to store, in its own order.
struct Writer {
    stores: VecDeque<(usize, u64)>,
}

proptest! {
    #[test]
    fn descriptor_words_carry_their_lap(descriptor in descriptor(), lap in 1u8..) {
        let words = descriptor.encode(lap);
        prop_assert!(words.iter().all(|word| lap_of(*word) == lap));
        prop_assert_eq!(Descriptor::decode(&words), Ok(descriptor));
    }

    #[test]
    fn lap_numbers_differ_from_the_previous_lap(index in any::<u64>(), shift in 1u32..20) {
        let slots = 1u64 << shift;
        prop_assert_ne!(lap(index, slots), 0);
        prop_assert_ne!(lap(index, slots), previous_lap(index, slots));
    }

    #[test]
    fn arbitrary_ring_contents_are_survived(words in any::<[u64; 8]>(), rest in any::<[u64; 8]>()) {
        drop(Descriptor::decode(&words).map(|descriptor| descriptor.to_string()));
        let ring = Ring::plain(2);
        let mut consumer = Consumer::new(Arc::clone(&ring));
        for (at, word) in words.into_iter().chain(rest).enumerate() {
            ring.words.at(SLOTS + at).store(word, Ordering::Relaxed);
        }
        let first = consumer.peek();
        let laps: Vec<u8> = words.iter().map(|word| lap_of(*word)).collect();
        if laps.iter().all(|lap| *lap == 1) {
            prop_assert_ne!(first, Peeked::Empty);
        } else {
            prop_assert_eq!(first, Peeked::Empty);
            // A word of any other lap is reported, unless a missing word precedes it.
            let odd = laps.iter().position(|lap| *lap > 1);
            let missing = laps.iter().position(|lap| *lap == 0);
            let torn = odd.is_some_and(|odd| missing.is_none_or(|missing| odd < missing));
            prop_assert_eq!(ring.failure().is_some_and(|failed| failed.cause == FailureCause::Torn), torn);
            prop_assert_eq!(ring.words.at(STOPPED).load(Ordering::Relaxed), u64::from(torn));
        }
    }

    /// Words stored in any order and interleaved: the proxy consumes every request, whole, in index
    /// order, and never more than there are free slots.
    #[test]
    fn stores_in_any_order(
        descriptors in prop::collection::vec((descriptor(), Just((0..DESCRIPTOR_WORDS).collect::<Vec<_>>()).prop_shuffle()), 1..40),
        slots in prop::sample::select(vec![2u32, 4, 8]),
        choices in prop::collection::vec(any::<u16>(), 200..400),
    ) {
        let ring = Ring::plain(slots);
        let mut consumer = Consumer::new(Arc::clone(&ring));
        let mut requests = descriptors.iter();
        let mut writers: Vec<Writer> = Vec::new();
        let (mut head, mut taken, mut in_flight) = (0u64, Vec::new(), Vec::new());
        let mut choices = choices.into_iter().cycle().map(usize::from);
        let mut steps = 0;
        while taken.len() < descriptors.len() || !in_flight.is_empty() {
            steps += 1;
            prop_assert!(steps < 100_000, "it stands still");
            let choice = choices.next().unwrap_or(0) + steps / 400;
            match choice % 5 {
                // A thread takes an index, if a slot is free.
                0 if head - ring.words.at(CONSUMED).load(Ordering::Acquire) < ring.slots => {
                    if let Some((descriptor, order)) = requests.next() {
                        let words = descriptor.encode(lap(head, ring.slots));
                        let first = ring.slot(head);
                        writers.push(Writer { stores: order.iter().map(|at| (first + at, words[*at])).collect() });
                        head += 1;
                    }
                }
                // A thread with an index stores a word.
                1 | 2 if !writers.is_empty() => {
                    let which = choice / 5 % writers.len();
                    if let Some((at, word)) = writers[which].stores.pop_front() {
                        ring.words.at(at).store(word, Ordering::Relaxed);
                    } else {
                        writers.swap_remove(which);
                    }
                }
                3 => {
                    if let Peeked::Descriptor(found) = consumer.peek() {
                        prop_assert_eq!(found, Ok(descriptors[taken.len()].0));
                        let index = consumer.take();
                        prop_assert_eq!(index, taken.len() as u64);
                        taken.push(index);
                        in_flight.push(index);
                        consumer.publish();
                    }
                }
                4 if !in_flight.is_empty() => {
                    let index = in_flight.swap_remove(choice / 5 % in_flight.len());
                    consumer.finish(index);
                    consumer.publish();
                    let oldest = in_flight.iter().copied().min().unwrap_or(taken.len() as u64);
                    prop_assert_eq!(ring.completed(), oldest);
                }
                _ => {}
            }
            prop_assert!(in_flight.len() <= slots as usize);
        }
        prop_assert_eq!(ring.failure(), None);
        prop_assert_eq!(ring.completed(), descriptors.len() as u64);
    }
}

fn signal(id: u64) -> Descriptor {
    Descriptor {
        operation: Operation::Signal(SignalUpdate {
            signal: 0,
            update: SignalOp::Set(id),
        }),
        peer: 0,
        len: 0,
        local: 0,
        remote: 0,
        id,
    }
}

#[test]
fn more_laps_than_lap_numbers() {
    let ring = Ring::plain(2);
    let mut consumer = Consumer::new(Arc::clone(&ring));
    for id in 0..2000 {
        assert_eq!(consumer.peek(), Peeked::Empty);
        assert_eq!(ring.try_write(&signal(id)), Some(id));
        assert_eq!(consumer.peek(), Peeked::Descriptor(Ok(signal(id))));
        let index = consumer.take();
        consumer.finish(index);
        consumer.publish();
    }
    assert_eq!(ring.completed(), 2000);
}

#[test]
fn full_ring_frees_slots_again() {
    let ring = Ring::plain(3);
    let mut consumer = Consumer::new(Arc::clone(&ring));
    assert_eq!(ring.slots, 4);
    (0..4).for_each(|id| assert!(ring.try_write(&signal(id)).is_some()));
    assert_eq!(ring.try_write(&signal(4)), None);
    let (first, second) = (consumer.take(), consumer.take());
    consumer.publish();
    // Consumed slots are free for producers, but the number in flight is limited to the slots.
    (4..6).for_each(|id| assert_eq!(ring.try_write(&signal(id)), Some(id)));
    assert_eq!([consumer.take(), consumer.take()], [2, 3]);
    assert_eq!(consumer.peek(), Peeked::Empty);
    consumer.finish(second);
    consumer.publish();
    assert_eq!((ring.completed(), consumer.peek()), (0, Peeked::Empty));
    consumer.finish(first);
    consumer.publish();
    assert_eq!(
        (ring.completed(), consumer.peek()),
        (2, Peeked::Descriptor(Ok(signal(4))))
    );
}

/// Only released entries are consumed, and waiting streams are released when the proxy stops.
#[test]
fn gates() {
    let ring = Ring::over(SharedWords::plain(words(4)), 4, true);
    let mut consumer = Consumer::new(Arc::clone(&ring));
    (0..3).for_each(|id| assert!(ring.try_write(&signal(id)).is_some()));
    assert_eq!(consumer.peek(), Peeked::Empty);
    ring.words.at(RELEASED).store(1, Ordering::Release);
    assert_eq!(consumer.peek(), Peeked::Descriptor(Ok(signal(0))));
    let first = consumer.take();
    assert_eq!(consumer.peek(), Peeked::Empty);
    consumer.finish(first);
    ring.close();
    assert!(!consumer.is_finished(), "two have yet to be released");
    consumer.abandon();
    assert_eq!(ring.completed(), 3);
    assert_eq!(ring.failure().unwrap().cause, FailureCause::Stopped);
}
