//! A queue pair sends only once it is connected.
use doorbell_verbs::{Buffer, PreparedQueuePair};

fn misuse(mut qp: PreparedQueuePair, buffer: Buffer) {
    qp.send(buffer).unwrap();
}

fn main() {}
