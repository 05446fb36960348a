//! A queue pair with a shared receive queue has no receive queue of its own.
use doorbell_verbs::{Buffer, QueuePair, Rc, SharedReceive};

fn misuse(qp: &mut QueuePair<SharedReceive<Rc>>, buffer: Buffer) {
    qp.receive(buffer).unwrap();
}

fn main() {}
