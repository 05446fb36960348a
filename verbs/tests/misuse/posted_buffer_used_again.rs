//! A posted buffer belongs to the queue until its completion returns it.
use doorbell_verbs::{Buffer, QueuePair};

fn misuse(qp: &mut QueuePair, mut buffer: Buffer) {
    qp.send(buffer).unwrap();
    buffer[0] = 1;
}

fn main() {}
