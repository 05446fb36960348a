//! A posted buffer cannot be dropped: the device may still access its memory.
use doorbell_verbs::{Buffer, QueuePair};

fn misuse(qp: &mut QueuePair, buffer: Buffer) {
    qp.send(buffer).unwrap();
    drop(buffer);
}

fn main() {}
