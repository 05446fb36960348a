//! Completions lie in their queue, which stays as long as they are read.
use doorbell_verbs::CompletionQueue;

fn misuse(mut cq: CompletionQueue) {
    let completions = cq.poll().unwrap();
    drop(cq);
    completions.for_each(drop);
}

fn main() {}
