//! A borrow of a buffer ends before it is posted.
use doorbell_verbs::{Buffer, QueuePair};

fn misuse(qp: &mut QueuePair, mut buffer: Buffer) {
    let bytes = &mut buffer[..8];
    qp.send(buffer).unwrap();
    bytes.fill(1);
}

fn main() {}
