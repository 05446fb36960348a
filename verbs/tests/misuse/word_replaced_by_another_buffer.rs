//! A word stays eight bytes: no other buffer can replace it.
use doorbell_verbs::{Buffer, Word};

fn misuse(word: &mut Word, buffer: Buffer) {
    **word = buffer;
}

fn main() {}
