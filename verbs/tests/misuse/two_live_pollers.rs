//! A completion queue has one poller at a time.
use doorbell_verbs::CompletionQueue;

fn misuse(cq: &mut CompletionQueue) {
    let first = cq.poll().unwrap();
    let second = cq.poll().unwrap();
    drop((first, second));
}

fn main() {}
