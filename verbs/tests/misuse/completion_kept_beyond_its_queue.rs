//! A completion tells of what lies in its queue; the buffers taken from it may be kept, itself not.
use doorbell_verbs::{Completion, CompletionQueue};

fn misuse(mut cq: CompletionQueue) -> Option<Completion<'static>> {
    cq.poll().unwrap().next()
}

fn main() {}
