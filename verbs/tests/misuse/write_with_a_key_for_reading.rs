//! A key that grants READ does not grant WRITE.
use doorbell_verbs::{Buffer, QueuePair, ReadAccess, Remote};

fn misuse(qp: &mut QueuePair, buffer: Buffer, remote: Remote<ReadAccess>) {
    qp.write(buffer, remote).unwrap();
}

fn main() {}
