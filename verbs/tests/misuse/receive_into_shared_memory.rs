//! A lent buffer may be read by others, so it cannot be received into.
use std::sync::Arc;

use doorbell_verbs::{QueuePair, RegistrationCache};

fn receive(qp: &mut QueuePair, cache: &RegistrationCache, owner: Arc<Vec<u8>>) {
    let buffer = cache.shared(&owner, 0..64).unwrap();
    let _ = qp.receive(buffer);
}

fn main() {}
