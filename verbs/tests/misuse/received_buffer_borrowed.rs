//! A slice of a buffer cannot outlive its posting.
use doorbell_verbs::{Buffer, QueuePair};

fn misuse(qp: &mut QueuePair, mut buffer: Buffer) {
    let slice = &mut buffer[..];
    qp.receive(buffer).unwrap();
    slice[0] = 1;
}

fn main() {}
