//! The rights of a buffer are in its type: remotely writable memory is not `Local`.
use doorbell_verbs::{Buffer, Local, ProtectionDomain, PeerWrite};

fn misuse(pd: &ProtectionDomain) -> Buffer<Local> {
    pd.register(vec![0; 64], PeerWrite).unwrap()
}

fn main() {}
