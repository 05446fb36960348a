//! A window bound for reading has no key for writing.
use doorbell_verbs::{BoundWindow, Buffer, QueuePair, ReadAccess};

fn misuse(qp: &mut QueuePair, window: &BoundWindow<ReadAccess>, buffer: Buffer) {
    let _ = qp.write(buffer, window.remote());
}

fn main() {}
