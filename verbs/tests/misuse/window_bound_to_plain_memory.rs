//! Windows are bound only to memory registered for it.
use doorbell_verbs::{Buffer, MemoryWindow, QueuePair, ReadAccess};

fn misuse(qp: &mut QueuePair, window: MemoryWindow, buffer: &Buffer) {
    let _ = qp.bind(window, buffer, .., ReadAccess);
}

fn main() {}
