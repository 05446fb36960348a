//! A queue pair outlives its batch.
use doorbell_verbs::{Buffer, QueuePair};

fn misuse(mut qp: QueuePair, buffer: Buffer) {
    let _ = qp.post(|batch| {
        drop(qp);
        batch.send(buffer);
    });
}

fn main() {}
