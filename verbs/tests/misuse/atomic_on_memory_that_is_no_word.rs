//! An atomic is performed on eight aligned bytes: on a word of the memory, not on all of it.
use doorbell_verbs::{Atomic, QueuePair, Remote, Word};

fn misuse(qp: &mut QueuePair, word: Word, remote: Remote<Atomic>) {
    qp.compare_swap(word, remote, 0, 1).unwrap();
}

fn main() {}
