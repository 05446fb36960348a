//! Completions borrow their queue, which cannot be dropped while they are read.
use doorbell_verbs::CompletionQueue;

fn misuse(mut cq: CompletionQueue) {
    let completions = cq.poll().unwrap();
    drop(cq);
    completions.for_each(drop);
}

fn main() {}
