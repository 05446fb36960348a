//! Stores need the only reference: another thread's load of another width would race.
use std::sync::atomic::Ordering;

use doorbell_verbs::{Buffer, PeerWrite};

fn misuse(buffer: &Buffer<PeerWrite>) {
    buffer.store_u64(0, 1, Ordering::Relaxed);
}

fn main() {}
