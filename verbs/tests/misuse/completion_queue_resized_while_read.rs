//! A completion queue does not change while its completions are read.
use doorbell_verbs::CompletionQueue;

fn misuse(cq: &mut CompletionQueue) {
    let completions = cq.poll().unwrap();
    cq.resize(64).unwrap();
    completions.for_each(drop);
}

fn main() {}
