//! The poll of an extended queue ends with its cursor: no completion can be read after it.
use doorbell_verbs::{Completion, CompletionQueue, Extended};

fn misuse(cq: &mut CompletionQueue<Extended>) {
    let mut kept: Option<Completion<'_, Extended>> = None;
    cq.poll().unwrap().for_each(|done| kept = Some(done));
    println!("{kept:?}");
}

fn main() {}
