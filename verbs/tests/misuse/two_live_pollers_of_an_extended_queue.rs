//! A second poll of an extended queue would wait for the first to end, for ever.
use doorbell_verbs::{CompletionQueue, Extended};

fn misuse(cq: &mut CompletionQueue<Extended>) {
    let mut completions = cq.poll().unwrap();
    cq.poll().unwrap();
    completions.next_completion();
}

fn main() {}
