//! A queue pair has one poster at a time: a shared reference cannot post.
use doorbell_verbs::{Buffer, QueuePair};

fn misuse(qp: &QueuePair, first: Buffer, second: Buffer) {
    std::thread::scope(|scope| {
        scope.spawn(|| qp.send(first).unwrap());
        scope.spawn(|| qp.send(second).unwrap());
    });
}

fn main() {}
