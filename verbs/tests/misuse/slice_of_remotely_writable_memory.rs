//! Memory that a peer may write at any time is never a slice.
use doorbell_verbs::{Buffer, RemoteWrite};

fn misuse(buffer: &Buffer<RemoteWrite>) -> &[u8] {
    buffer
}

fn main() {}
