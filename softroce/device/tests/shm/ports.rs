//! Processes of one address that use UDP: each other's port is known before the first packet.

use std::net::UdpSocket;

use doorbell_roce_proto::icrc::Flow;
use doorbell_roce_proto::wire::{self, Bth, Extension, Opcode, packet_len};
use doorbell_roce_proto::{Psn, Qpn};
use doorbell_softroce::{CopyMode, Device, DeviceConfig, LinkChoice};

use super::side::{Side, own_address};

const LEN: usize = 64;

/// Another user of the host has the address too, and here even knows the numbers.
#[test]
fn no_other_socket_of_the_address_is_taken_for_the_peer() {
    let config = DeviceConfig {
        address: Some(own_address()),
        link: LinkChoice::Udp,
        ..DeviceConfig::new("soft0")
    };
    let [victim, peer] = [(); 2].map(|()| Side::new(&Device::open(&config).unwrap(), LEN, CopyMode::Ring));
    victim.connect(peer.key(), 17);
    peer.connect(victim.key(), 17);
    victim.receive(1, 0, LEN);

    let to = victim.device().info().address;
    let forger = UdpSocket::bind((to.ip(), 0)).unwrap();
    let opcode = Opcode::RcSendOnly;
    let mut packet = vec![0xee; packet_len(opcode, LEN)];
    let bth = Bth::new(opcode, Qpn::new(victim.key().qpn), Psn::new(0));
    wire::write(&mut packet, &bth, &Extension::Bare, LEN).unwrap();
    let flow = Flow::new(to.ip(), to.ip(), forger.local_addr().unwrap().port(), to.port());
    flow.seal(0, &mut packet);
    forger.send_to(&packet, to).unwrap();

    peer.memory.fill(0, LEN, 0x5a);
    peer.send(2, 0, LEN);
    victim.wait(1);
    peer.wait(1);
    assert!(
        victim.memory.is_all(0, LEN, 0x5a),
        "the first packet was not the peer's"
    );
}
