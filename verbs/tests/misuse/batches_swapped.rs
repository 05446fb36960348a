//! Two batches cannot be swapped, so that each is posted to its own queue.
use doorbell_verbs::QueuePair;

fn misuse(one: &mut QueuePair, other: &mut QueuePair) {
    let _ = one.post(|first| {
        let _ = other.post(|second| core::mem::swap(first, second));
    });
}

fn main() {}
