//! A delayed ACK on a full ring.

use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;

use doorbell_roce_proto::Psn;
use doorbell_roce_proto::wire::{self, Aeth, Bth, Credits, Extension, MAX_HEADER_LEN, Opcode, Syndrome};

use super::*;
use crate::host::Flags;

fn send(outgoing: &mut OutgoingRings, id: LinkId, qpn: u32, opcode: Opcode, endpoint: &mut Endpoint) {
    let extension = match opcode {
        Opcode::RcAcknowledge => Extension::Aeth(Aeth {
            syndrome: Syndrome::Ack(Credits::UNLIMITED),
            msn: 1,
        }),
        _ => Extension::Bare,
    };
    let mut buf = [0; MAX_HEADER_LEN];
    let bth = Bth::new(opcode, Qpn::new(77), Psn::new(1));
    let headers = wire::write_headers(&mut buf, &bth, &extension).unwrap();
    let transmit = Transmit {
        src: Ipv4Addr::LOCALHOST.into(),
        dst: Ipv4Addr::LOCALHOST.into(),
        traffic_class: 0,
        hop_limit: 64,
        len: headers,
        qpn: Qpn::new(qpn),
        link: Some(id),
        header_len: headers,
        by_ref_len: 0,
        copy_before_completion: false,
        in_order: false,
    };
    outgoing.send(id, &transmit, &buf[..headers], &mut Table::new(), endpoint);
}

#[test]
fn a_delayed_ack_on_a_full_ring_wakes_the_receiver() {
    let address = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (host, _socket) = Host::join(address, Flags::default(), Duration::ZERO).unwrap();
    let mut outgoing = OutgoingRings::new(Arc::new(host), address.ip());
    let (me, mut receiver) = outgoing
        .enable(false, None, Arc::new(Published::create(false).unwrap()))
        .unwrap();
    let (id, mut endpoint) = (link_to(me), Endpoint::new(1));
    send(&mut outgoing, id, 6, Opcode::RcAcknowledge, &mut endpoint);
    while !outgoing.is_blocked() {
        send(&mut outgoing, id, 5, Opcode::RcSendOnly, &mut endpoint);
    }
    assert!(!outgoing.finish_batch(&mut endpoint).own, "it is awake");
    // The receiver consumes everything, and goes to sleep.
    while receiver.pop(|_| ()).unwrap().is_some() {}
    assert!(receiver.sleep());
    outgoing.unblock(&mut endpoint);
    assert!(!outgoing.is_blocked());
    assert!(
        outgoing.finish_batch(&mut endpoint).own,
        "it sleeps, and the acknowledgement is there"
    );
    receiver.awake();
    assert!(receiver.pop(|_| ()).unwrap().is_some());
    assert!(receiver.pop(|_| ()).unwrap().is_none());
}
