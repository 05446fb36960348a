//! A window being invalidated has no key any more.
use doorbell_verbs::{BoundWindow, QueuePair, Write};

fn misuse(qp: &mut QueuePair, window: BoundWindow<Write>) {
    let _ = qp.invalidate(window);
    let _ = window.remote();
}

fn main() {}
