//! Peers may write memory with windows at any time: it is never a slice.
use doorbell_verbs::{Buffer, Windowed};

fn misuse(buffer: &Buffer<Windowed>) -> &[u8] {
    buffer
}

fn main() {}
