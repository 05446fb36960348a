//! A window bound for reading gives no key to write with.
use doorbell_verbs::{BoundWindow, Buffer, QueuePair, Read};

fn misuse(qp: &mut QueuePair, window: &BoundWindow<Read>, buffer: Buffer) {
    let _ = qp.write(buffer, window.remote());
}

fn main() {}
