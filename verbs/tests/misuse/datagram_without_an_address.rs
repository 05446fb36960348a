//! A UD queue pair has no peer: each message needs an address.
use doorbell_verbs::{Buffer, QueuePair, Ud};

fn misuse(qp: &mut QueuePair<Ud>, buffer: Buffer) {
    let _ = qp.post(|batch| {
        batch.send(buffer);
    });
}

fn main() {}
