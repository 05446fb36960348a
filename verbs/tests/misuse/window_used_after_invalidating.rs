//! A window being invalidated has no key any more.
use doorbell_verbs::{BoundWindow, QueuePair, WriteAccess};

fn misuse(qp: &mut QueuePair, window: BoundWindow<WriteAccess>) {
    let _ = qp.invalidate(window);
    let _ = window.remote();
}

fn main() {}
