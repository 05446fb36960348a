//! A key that grants WRITE does not grant READ.
use doorbell_verbs::{Buffer, QueuePair, Remote, Write};

fn misuse(qp: &mut QueuePair, buffer: Buffer, remote: Remote<Write>) {
    qp.read(buffer, remote).unwrap();
}

fn main() {}
