//! Nor has it an index: the compiler says why, and what does.
use doorbell_verbs::{Buffer, PeerWrite};

fn misuse(buffer: &Buffer<PeerWrite>) -> u8 {
    buffer[0]
}

fn main() {}
