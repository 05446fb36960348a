//! A key that grants WRITE does not grant READ.
use doorbell_verbs::{Buffer, QueuePair, Remote, WriteAccess};

fn misuse(qp: &mut QueuePair, buffer: Buffer, remote: Remote<WriteAccess>) {
    qp.read(buffer, remote).unwrap();
}

fn main() {}
