//! Remotely readable memory is not written through a slice.
use doorbell_verbs::{Buffer, RemoteRead};

fn misuse(buffer: &mut Buffer<RemoteRead>) {
    buffer[0] = 1;
}

fn main() {}
