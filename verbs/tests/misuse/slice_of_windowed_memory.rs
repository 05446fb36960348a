//! Memory that windows are bound to may be written by peers at any time: it is no slice.
use doorbell_verbs::{Buffer, Windowed};

fn misuse(buffer: &Buffer<Windowed>) -> &[u8] {
    buffer
}

fn main() {}
