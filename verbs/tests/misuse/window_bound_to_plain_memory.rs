//! Windows are bound only to memory registered for it.
use doorbell_verbs::{Buffer, MemoryWindow, QueuePair, Read};

fn misuse(qp: &mut QueuePair, window: MemoryWindow, buffer: &Buffer) {
    let _ = qp.bind(window, buffer, .., Read);
}

fn main() {}
