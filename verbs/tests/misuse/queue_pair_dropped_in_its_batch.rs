//! A queue pair lives at least until its batch is rung.
use doorbell_verbs::{Buffer, QueuePair};

fn misuse(mut qp: QueuePair, buffer: Buffer) {
    let _ = qp.post(|batch| {
        drop(qp);
        batch.send(buffer);
    });
}

fn main() {}
