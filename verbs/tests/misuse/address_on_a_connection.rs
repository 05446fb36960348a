//! A connected queue pair sends to its peer only.
use doorbell_verbs::{AddressHandle, Buffer, QKey, Qpn, QueuePair};

fn misuse(qp: &mut QueuePair, buffer: Buffer, ah: &AddressHandle, qpn: Qpn) {
    qp.send_to(buffer, ah, qpn, QKey::DEFAULT).unwrap();
}

fn main() {}
