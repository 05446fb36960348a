//! A READ carries no immediate data.
use doorbell_verbs::{Buffer, QueuePair, ReadAccess, Remote};

fn misuse(qp: &mut QueuePair, buffer: Buffer, remote: Remote<ReadAccess>) {
    let _ = qp.post(|batch| {
        batch.read(buffer, remote).imm(7);
    });
}

fn main() {}
