//! The read calls of an extended queue return fields of the current completion only.
use doorbell_verbs::{CompletionQueue, ExtendedCq};

fn misuse(cq: &mut CompletionQueue<ExtendedCq>) {
    let mut completions = cq.poll().unwrap();
    let first = completions.next_completion().unwrap();
    let second = completions.next_completion();
    println!("{first:?} {second:?}");
}

fn main() {}
