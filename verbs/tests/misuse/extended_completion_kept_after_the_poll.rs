//! The poll of an extended queue ends with its cursor: no completion can be read after it.
use doorbell_verbs::{Completion, CompletionQueue, ExtendedCq};

fn misuse(cq: &mut CompletionQueue<ExtendedCq>) {
    let mut kept: Option<Completion<'_, ExtendedCq>> = None;
    cq.poll().unwrap().for_each(|done| kept = Some(done));
    println!("{kept:?}");
}

fn main() {}
