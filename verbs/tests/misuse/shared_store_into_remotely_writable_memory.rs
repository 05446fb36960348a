//! Stores need the only reference: another thread's load of another width would race.
use std::sync::atomic::Ordering;

use doorbell_verbs::{Buffer, RemoteWrite};

fn misuse(buffer: &Buffer<RemoteWrite>) {
    buffer.store_u64(0, 1, Ordering::Relaxed);
}

fn main() {}
