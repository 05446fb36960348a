//! A key that grants READ does not grant WRITE.
use doorbell_verbs::{Buffer, QueuePair, Read, Remote};

fn misuse(qp: &mut QueuePair, buffer: Buffer, remote: Remote<Read>) {
    qp.write(buffer, remote).unwrap();
}

fn main() {}
