//! Completions of an extended queue are no iterator: the device shows one at a time.
use doorbell_verbs::{CompletionQueue, Extended};

fn misuse(cq: &mut CompletionQueue<Extended>) {
    let all: Vec<_> = cq.poll().unwrap().collect();
    println!("{}", all.len());
}

fn main() {}
