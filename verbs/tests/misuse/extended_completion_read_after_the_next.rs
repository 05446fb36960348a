//! A completion of an extended queue is read by calls of the device, which tell of the current one alone.
use doorbell_verbs::{CompletionQueue, Extended};

fn misuse(cq: &mut CompletionQueue<Extended>) {
    let mut completions = cq.poll().unwrap();
    let first = completions.next_completion().unwrap();
    let second = completions.next_completion();
    println!("{first:?} {second:?}");
}

fn main() {}
