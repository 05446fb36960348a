//! An endpoint for datagrams is none to connect to.
use doorbell_verbs::{PreparedQueuePair, Uc, UdEndpoint};

fn misuse(qp: PreparedQueuePair<Uc>, peer: &UdEndpoint) {
    let _ = qp.connect(peer);
}

fn main() {}
