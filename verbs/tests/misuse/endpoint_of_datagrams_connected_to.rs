//! A UD endpoint cannot be connected to.
use doorbell_verbs::{PreparedQueuePair, Uc, UdEndpoint};

fn misuse(qp: PreparedQueuePair<Uc>, peer: &UdEndpoint) {
    let _ = qp.connect(peer);
}

fn main() {}
