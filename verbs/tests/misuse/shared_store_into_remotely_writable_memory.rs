//! Whoever stores has the buffer alone: another thread's load of another width would race with it.
use std::sync::atomic::Ordering;

use doorbell_verbs::{Buffer, RemoteWrite};

fn misuse(buffer: &Buffer<RemoteWrite>) {
    buffer.store_u64(0, 1, Ordering::Relaxed);
}

fn main() {}
