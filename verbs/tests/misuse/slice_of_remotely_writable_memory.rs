//! Memory that a peer may write at any time is never a slice.
use doorbell_verbs::{Buffer, PeerWrite};

fn misuse(buffer: &Buffer<PeerWrite>) -> &[u8] {
    buffer
}

fn main() {}
