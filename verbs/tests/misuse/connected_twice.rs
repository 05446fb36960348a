//! A queue pair is connected once.
use doorbell_verbs::{Endpoint, PreparedQueuePair};

fn misuse(qp: PreparedQueuePair, peer: &Endpoint) {
    let first = qp.connect(peer);
    let second = qp.connect(peer);
    drop((first, second));
}

fn main() {}
