//! A READ needs memory that the device may write: frozen memory is shared.
use doorbell_verbs::{Buffer, Frozen, QueuePair, Read, Remote};

fn misuse(qp: &mut QueuePair, buffer: Buffer<Frozen>, remote: Remote<Read>) {
    qp.read(buffer, remote).unwrap();
}

fn main() {}
