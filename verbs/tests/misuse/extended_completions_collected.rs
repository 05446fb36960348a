//! Completions of an extended queue are no iterator: only one is current at a time.
use doorbell_verbs::{CompletionQueue, ExtendedCq};

fn misuse(cq: &mut CompletionQueue<ExtendedCq>) {
    let all: Vec<_> = cq.poll().unwrap().collect();
    println!("{}", all.len());
}

fn main() {}
