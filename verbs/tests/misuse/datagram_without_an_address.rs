//! A UD queue pair has no peer: each message needs an address.
use doorbell_verbs::{Buffer, QueuePair, UnreliableDatagram};

fn misuse(qp: &mut QueuePair<UnreliableDatagram>, buffer: Buffer) {
    let _ = qp.post(|batch| {
        batch.send(buffer);
    });
}

fn main() {}
