//! A window bound for reading has no key for writing.
use doorbell_verbs::{BoundWindow, Buffer, QueuePair, Read};

fn misuse(qp: &mut QueuePair, window: &BoundWindow<Read>, buffer: Buffer) {
    let _ = qp.write(buffer, window.remote());
}

fn main() {}
