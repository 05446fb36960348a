//! A batch is built by the thread that rings the doorbell: a provider may hold a per-thread lock.
use doorbell_verbs::{Buffer, QueuePair};

fn misuse(qp: &mut QueuePair, buffer: Buffer) {
    let _ = qp.post(|batch| {
        std::thread::scope(|scope| {
            scope.spawn(|| drop(batch.send(buffer)));
        });
    });
}

fn main() {}
