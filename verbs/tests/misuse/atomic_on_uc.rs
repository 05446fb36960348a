//! UC has no atomics, in a batch either.
use doorbell_verbs::{QueuePair, RemoteWord, UnreliableConnection, AtomicWord};

fn misuse(qp: &mut QueuePair<UnreliableConnection>, word: AtomicWord, at: RemoteWord) {
    let _ = qp.post(|batch| {
        batch.fetch_add(word, at, 1);
    });
}

fn main() {}
