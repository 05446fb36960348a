//! Queue pair 1: management datagrams are sent and received as UD packets, and nothing else is.

mod util;

use std::net::{IpAddr, Ipv4Addr};

use doorbell_roce_proto::cm::{MAD_LEN, Mad};
use doorbell_roce_proto::icrc::Flow;
use doorbell_roce_proto::qp::Path;
use doorbell_roce_proto::wire::{Bth, Deth, Extension, Opcode, Packet, packet_len, write};
use doorbell_roce_proto::{Datagram, Endpoint, Ident, Instant, Psn, Qpn, mad_of};

use util::PD;
use util::memory::Regions;

const PORT: u16 = 4791;
const NOW: Instant = Instant::ZERO;
const QKEY: u32 = 0x8001_0000;
const ENDS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1)),
    IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2)),
];

fn path() -> Path {
    Path::new(ENDS[0], ENDS[1])
}

fn mad(byte: u8) -> Box<Mad> {
    Box::new([byte; MAD_LEN])
}

fn handle(endpoint: &mut Endpoint, mut packet: Vec<u8>, ident: u16) {
    Flow::new(ENDS[0], ENDS[1], PORT, PORT).seal(0, &mut packet);
    let datagram = Datagram {
        src: ENDS[0],
        dst: ENDS[1],
        src_port: PORT,
        dst_port: PORT,
        ident: Ident::Known(ident),
        traffic_class: 0,
        payload: &packet,
    };
    endpoint.handle_datagram(NOW, &datagram, &mut Regions::new(PD));
}

fn packet(opcode: Opcode, dest: Qpn, qkey: u32, len: usize) -> Vec<u8> {
    let deth = Deth {
        qkey,
        src_qp: Qpn::new(1),
    };
    let mut packet = vec![0; packet_len(opcode, len)];
    let bth = Bth::new(opcode, dest, Psn::new(0));
    let extension = match opcode.layout().len() {
        0 => Extension::Bare,
        _ => Extension::Deth(deth),
    };
    write(&mut packet, &bth, &extension, len).unwrap();
    packet
}

#[test]
fn mads_are_delivered() {
    let [mut sender, mut receiver] = [1, 2].map(Endpoint::new);
    for byte in [1, 2] {
        assert!(sender.send_mad(path(), mad(byte)));
    }
    assert!(!sender.has_only_acks());
    let mut buf = vec![0; 4096 + 128];
    for (byte, psn) in [(1, 0), (2, 1)] {
        let transmit = sender.poll_transmit(NOW, &mut Regions::new(PD), &mut buf).unwrap();
        assert_eq!((transmit.src, transmit.dst), (ENDS[0], ENDS[1]));
        assert_eq!((transmit.qpn, transmit.link), (Qpn::new(1), None));
        let sent = buf[..transmit.len].to_vec();
        let packet = Packet::parse(&sent).unwrap();
        assert_eq!((packet.bth.dest_qp, packet.bth.psn), (Qpn::new(1), Psn::new(psn)));
        let Extension::Deth(deth) = packet.extension else {
            panic!("{packet:?}");
        };
        assert_eq!((deth.qkey, deth.src_qp), (QKEY, Qpn::new(1)));
        assert_eq!(mad_of(&sent), Some(&*mad(byte)));
        handle(&mut receiver, sent, 0);
        let received = receiver.poll_mad().unwrap();
        assert_eq!((received.from, received.mad), (ENDS[0], mad(byte)));
    }
    assert_eq!(sender.poll_transmit(NOW, &mut Regions::new(PD), &mut buf), None);
    assert_eq!(receiver.poll_mad(), None);
    assert_eq!((sender.counters().tx_packets, receiver.counters().rx_packets), (2, 2));
}

#[test]
fn other_datagrams_are_refused() {
    let mut endpoint = Endpoint::new(1);
    let (ud, one) = (Opcode::ud_send(false), Qpn::new(1));
    handle(&mut endpoint, packet(ud, one, 0x1111_1111, MAD_LEN), 0);
    assert_eq!(endpoint.counters().qkey_violations, 1);
    handle(&mut endpoint, packet(ud, one, QKEY, MAD_LEN - 4), 0);
    handle(&mut endpoint, packet(ud, one, QKEY, MAD_LEN + 4), 0);
    handle(&mut endpoint, packet(Opcode::RcSendOnly, one, QKEY, MAD_LEN), 0);
    assert_eq!(endpoint.counters().malformed, 3);
    handle(&mut endpoint, packet(ud, one, QKEY, MAD_LEN), 1);
    assert_eq!(endpoint.counters().icrc_errors, 1);
    handle(&mut endpoint, packet(ud, Qpn::new(0), QKEY, MAD_LEN), 0);
    assert_eq!(endpoint.counters().no_qp, 1);
    assert_eq!(endpoint.poll_mad(), None);
    for other in [
        packet(Opcode::RcSendOnly, one, QKEY, 300),
        packet(ud, Qpn::new(2), QKEY, MAD_LEN),
        vec![0; 20],
    ] {
        assert_eq!(mad_of(&other), None);
    }
}

#[test]
fn a_flood_is_bounded() {
    let mut endpoint = Endpoint::new(1);
    let flood = 3000;
    for _ in 0..flood {
        handle(
            &mut endpoint,
            packet(Opcode::ud_send(false), Qpn::new(1), QKEY, MAD_LEN),
            0,
        );
    }
    let mut taken = 0;
    while endpoint.poll_mad().is_some() {
        taken += 1;
    }
    assert!((1..flood).contains(&taken));
    assert_eq!(taken + endpoint.counters().dropped_messages, flood);
    let sent = (0..flood).filter(|_| endpoint.send_mad(path(), mad(0))).count();
    assert!((1..flood as usize).contains(&sent));
}
