//! An atomic is performed on eight aligned bytes: on a word of the memory, not on all of it.
use doorbell_verbs::{AtomicAccess, QueuePair, Remote, AtomicWord};

fn misuse(qp: &mut QueuePair, word: AtomicWord, remote: Remote<AtomicAccess>) {
    qp.compare_swap(word, remote, 0, 1).unwrap();
}

fn main() {}
