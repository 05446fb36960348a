//! A READ needs memory that the device may write: frozen memory is shared.
use doorbell_verbs::{Buffer, Frozen, QueuePair, ReadAccess, Remote};

fn misuse(qp: &mut QueuePair, buffer: Buffer<Frozen>, remote: Remote<ReadAccess>) {
    qp.read(buffer, remote).unwrap();
}

fn main() {}
