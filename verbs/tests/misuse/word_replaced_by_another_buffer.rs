//! A word stays eight bytes: no other buffer can replace it.
use doorbell_verbs::{Buffer, AtomicWord};

fn misuse(word: &mut AtomicWord, buffer: Buffer) {
    **word = buffer;
}

fn main() {}
