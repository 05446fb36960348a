//! Frozen memory is read by many, so nothing receives into it.
use doorbell_verbs::{Buffer, Frozen, QueuePair};

fn misuse(qp: &mut QueuePair, buffer: Buffer<Frozen>) {
    qp.receive(buffer).unwrap();
}

fn main() {}
