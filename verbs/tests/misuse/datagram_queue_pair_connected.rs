//! A UD queue pair cannot be connected.
use doorbell_verbs::{Endpoint, QueuePairBuilder};

fn misuse(builder: QueuePairBuilder<'_>, peer: &Endpoint) {
    let _ = builder.ud().unwrap().connect(peer);
}

fn main() {}
