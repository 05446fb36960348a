//! A completion refers to its queue; only the buffers taken from it may be kept.
use doorbell_verbs::{Completion, CompletionQueue};

fn misuse(mut cq: CompletionQueue) -> Option<Completion<'static>> {
    cq.poll().unwrap().next()
}

fn main() {}
