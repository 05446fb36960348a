//! Remotely readable memory is not written through a slice.
use doorbell_verbs::{Buffer, PeerRead};

fn misuse(buffer: &mut Buffer<PeerRead>) {
    buffer[0] = 1;
}

fn main() {}
