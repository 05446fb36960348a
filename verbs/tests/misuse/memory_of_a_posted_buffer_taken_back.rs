//! The memory of a posted buffer cannot be taken, to be freed or moved.
use doorbell_verbs::{Buffer, Memory, QueuePair};

fn misuse(qp: &mut QueuePair, buffer: Buffer) -> Memory {
    qp.receive(buffer).unwrap();
    buffer.into_memory().unwrap()
}

fn main() {}
