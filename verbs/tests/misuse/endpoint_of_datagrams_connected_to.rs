//! A UD endpoint cannot be connected to.
use doorbell_verbs::{PreparedQueuePair, UnreliableConnection, UdEndpoint};

fn misuse(qp: PreparedQueuePair<UnreliableConnection>, peer: &UdEndpoint) {
    let _ = qp.connect(peer);
}

fn main() {}
