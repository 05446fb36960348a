//! Two batches cannot be exchanged, so that each is posted where it was begun.
use doorbell_verbs::QueuePair;

fn misuse(one: &mut QueuePair, other: &mut QueuePair) {
    let _ = one.post(|first| {
        let _ = other.post(|second| core::mem::swap(first, second));
    });
}

fn main() {}
