//! A completion queue cannot be cloned into a second poller.
use doorbell_verbs::CompletionQueue;

fn misuse(cq: CompletionQueue) -> (CompletionQueue, CompletionQueue) {
    (cq.clone(), cq)
}

fn main() {}
