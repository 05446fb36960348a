//! The device reads the address when the doorbell rings, so the handle must live until then.
use doorbell_verbs::{AddressHandle, Buffer, QKey, Qpn, QueuePair, UnreliableDatagram};

fn misuse(qp: &mut QueuePair<UnreliableDatagram>, buffer: Buffer, ah: AddressHandle, qpn: Qpn) {
    let _ = qp.post(|batch| {
        let handle = ah;
        batch.send_to(buffer, &handle, qpn, QKey::DEFAULT);
    });
}

fn main() {}
