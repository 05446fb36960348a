//! The send half of a queue pair does not post receives: its receive half does.
use doorbell_verbs::{Buffer, QueuePair};

fn misuse(qp: QueuePair, buffer: Buffer) {
    let (mut send, _receive) = qp.split();
    send.receive(buffer).unwrap();
}

fn main() {}
