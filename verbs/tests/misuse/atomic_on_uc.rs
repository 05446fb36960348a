//! UC has no atomics, in a batch either.
use doorbell_verbs::{QueuePair, RemoteWord, Uc, Word};

fn misuse(qp: &mut QueuePair<Uc>, word: Word, at: RemoteWord) {
    let _ = qp.post(|batch| {
        batch.fetch_add(word, at, 1);
    });
}

fn main() {}
