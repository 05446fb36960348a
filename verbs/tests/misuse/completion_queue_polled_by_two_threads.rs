//! A completion queue has one poller at a time, on any thread.
use doorbell_verbs::CompletionQueue;

fn misuse(cq: &mut CompletionQueue) {
    std::thread::scope(|scope| {
        scope.spawn(|| drop(cq.poll()));
        scope.spawn(|| drop(cq.poll()));
    });
}

fn main() {}
