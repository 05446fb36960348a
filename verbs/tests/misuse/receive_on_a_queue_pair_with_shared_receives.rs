//! A queue pair with a shared receive queue has no receive queue of its own.
use doorbell_verbs::{Buffer, QueuePair, ReliableConnection, WithSrq};

fn misuse(qp: &mut QueuePair<WithSrq<ReliableConnection>>, buffer: Buffer) {
    qp.receive(buffer).unwrap();
}

fn main() {}
