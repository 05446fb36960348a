//! A second poll of an extended queue would deadlock on the lock of the first.
use doorbell_verbs::{CompletionQueue, ExtendedCq};

fn misuse(cq: &mut CompletionQueue<ExtendedCq>) {
    let mut completions = cq.poll().unwrap();
    cq.poll().unwrap();
    completions.next_completion();
}

fn main() {}
