//! Frozen memory is shared, so it cannot be received into.
use doorbell_verbs::{Buffer, Frozen, QueuePair};

fn misuse(qp: &mut QueuePair, buffer: Buffer<Frozen>) {
    qp.receive(buffer).unwrap();
}

fn main() {}
