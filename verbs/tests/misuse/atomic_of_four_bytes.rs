//! The operands of an atomic are of eight bytes.
use doorbell_verbs::{QueuePair, RemoteWord, AtomicWord};

fn misuse(qp: &mut QueuePair, word: AtomicWord, at: RemoteWord, add: u32) {
    qp.fetch_add(word, at, add).unwrap();
}

fn main() {}
