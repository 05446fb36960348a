//! Completions of an extended queue are no iterator: only one is current at a time.
use doorbell_verbs::{CompletionQueue, Extended};

fn misuse(cq: &mut CompletionQueue<Extended>) {
    let all: Vec<_> = cq.poll().unwrap().collect();
    println!("{}", all.len());
}

fn main() {}
