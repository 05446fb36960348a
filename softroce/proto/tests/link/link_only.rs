//! Payloads by reference that become unreadable, back-pressure, revoked references.

#[path = "../util/mod.rs"]
mod util;

use doorbell_roce_proto::memory::Sge;
use doorbell_roce_proto::qp::{LinkId, State};
use doorbell_roce_proto::wire::{self, Bth, Extension, Opcode, Transport};
use doorbell_roce_proto::work::{Payload, SendRequest, Status};
use doorbell_roce_proto::{Datagram, Ident, LinkCapabilities, LinkPacket, Mtu, Psn, Qpn};

use util::{
    LINK_INLINE, Pair, RECV_CQ, SEND_CQ, Setup, link_to, pattern, read_from, send, success, with_regions, write_to,
};

const TO_PEER: LinkId = LinkId(1);

fn part(sge: Sge, len: usize) -> Sge {
    Sge { len: len as u32, ..sge }
}

/// The next packet's payload bytes in the buffer and by reference.
fn next(pair: &mut Pair) -> (usize, u32) {
    let mut buf = [0; 4096 + 128];
    let node = &mut pair.nodes[0];
    let transmit = node
        .endpoint
        .poll_transmit(pair.now, &mut node.memory, &mut buf)
        .unwrap();
    node.memory.take_by_ref();
    assert_eq!((transmit.link, transmit.copy_before_completion), (Some(TO_PEER), false));
    (transmit.len - transmit.header_len, transmit.by_ref_len)
}

#[test]
fn long_payloads_go_by_reference() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 256);
    for (len, expected) in [
        (0, (0, 0)),
        (LINK_INLINE, (LINK_INLINE, 0)),
        (LINK_INLINE + 1, (0, LINK_INLINE as u32 + 1)),
        (256, (0, 256)),
    ] {
        pair.post(0, &write_to(1, &[part(local, len)], part(remote, len)));
        assert_eq!(next(&mut pair), expected);
    }
    let bytes = pattern(LINK_INLINE + 50, 3);
    let sges = [];
    let inline = SendRequest {
        payload: Payload::Inline(&bytes),
        ..write_to(2, &sges, remote)
    };
    pair.post(0, &inline);
    assert_eq!(next(&mut pair), (LINK_INLINE + 50, 0));
}

#[test]
fn packets_of_the_maximum_link_mtu() {
    const MTU: usize = LinkCapabilities::MTU;
    let setup = Setup {
        mtu: Mtu::Mtu4096,
        link_mtu: Some(MTU),
        window: 4,
        ..Setup::default()
    };
    let len = 7 * MTU + 13;
    let (mut pair, local, remote) = with_regions(setup, len);
    pair.post(0, &write_to(1, &[local], remote));
    pair.run();
    assert_eq!(pair.bytes(1, remote), pattern(len, 1));
    let writes = pair.opcodes(0).len();
    assert_eq!(writes, 8);
    // In parts of half a window.
    let (mut pair, local, remote) = with_regions(setup, len);
    pair.post(0, &read_from(2, &[local], remote));
    pair.run();
    assert_eq!(pair.bytes(0, local), pattern(len, 2));
    assert_eq!(pair.opcodes(0), [Opcode::RcReadRequest; 4]);
    assert_eq!(pair.completed(0, SEND_CQ), success([2]));
}

/// An unreadable payload counts as a lost packet: no error is reported, and it is retransmitted.
#[test]
fn unreadable_payload_is_a_lost_packet() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 600);
    pair.receive(1, 9, &[remote]);
    pair.nodes[1].memory.unreadable_after = Some(1);
    pair.post(0, &send(1, &[local]));
    pair.run();
    // The packet behind it was out of sequence.
    assert_eq!(pair.counters(1).sequence_naks_sent, 1);
    assert_eq!(pair.bytes(1, remote), pattern(600, 1));
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
    assert_eq!(pair.completed(1, RECV_CQ), success([9]));
    assert!(pair.nodes.iter().all(|node| node.events.len() <= 1));
}

#[test]
fn unreadable_write_is_retransmitted_on_timeout() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 200);
    pair.nodes[1].memory.unreadable_after = Some(0);
    pair.post(0, &write_to(1, &[local], remote));
    pair.exchange(&mut |_, _| util::Fate::Deliver);
    assert_eq!((pair.bytes(1, remote), pair.log.len()), (&pattern(200, 2)[..], 1));
    pair.run();
    assert_eq!(pair.bytes(1, remote), pattern(200, 1));
    assert_eq!((pair.counters(0).timeouts, pair.counters(0).retransmits), (1, 1));
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
}

#[test]
fn unreadable_read_response_is_requested_again() {
    for gone in 0..3 {
        let (mut pair, local, remote) = with_regions(Setup::default(), 600);
        pair.nodes[0].memory.unreadable_after = Some(gone);
        pair.post(0, &read_from(1, &[local], remote));
        pair.run();
        assert_eq!(pair.bytes(0, local), pattern(600, 2));
        assert_eq!(pair.completed(0, SEND_CQ), success([1]));
        assert_eq!(pair.opcodes(0).len(), 2);
    }
}

#[test]
fn unreadable_unreliable_payload_is_dropped() {
    for transport in [Transport::Uc, Transport::Ud] {
        let setup = Setup {
            transport,
            mtu: Mtu::Mtu512,
            ..Setup::default()
        };
        let (mut pair, local, remote) = with_regions(setup, 512);
        let local = part(local, 400);
        pair.receive(1, 5, &[remote]);
        for unreadable_after in [Some(0), None] {
            pair.nodes[1].memory.unreadable_after = unreadable_after;
            let to = pair.destination(0);
            match transport {
                Transport::Ud => pair.post_datagram(0, &send(1, &[local]), &to),
                _ => pair.post(0, &send(1, &[local])),
            }
            pair.run();
        }
        assert_eq!(pair.completed(0, SEND_CQ), success([1, 1]));
        assert_eq!(pair.completed(1, RECV_CQ), success([5]));
        assert_eq!(pair.counters(1).dropped_messages, 1);
    }
}

#[test]
fn full_link_blocks_only_its_own_qps() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 64);
    pair.connect_second();
    pair.nodes[0].endpoint.link_full(TO_PEER);
    pair.post(0, &write_to(1, &[local], remote));
    pair.swap();
    pair.post(0, &write_to(2, &[local], remote));
    assert!(pair.transmit_one(0).is_none());
    pair.nodes[0].endpoint.link_ready(LinkId(7));
    assert!(pair.transmit_one(0).is_none());
    // The other direction is another link.
    pair.post(1, &write_to(3, &[remote], local));
    assert!(pair.transmit_one(1).is_some());
    pair.nodes[0].endpoint.link_ready(TO_PEER);
    pair.run();
    let mut completed = pair.completed(0, SEND_CQ);
    completed.sort_by_key(|(wr_id, _)| *wr_id);
    assert_eq!(completed, success([1, 2]));
}

/// With space for one packet at a time, as long packets leave it.
#[test]
fn queue_pairs_take_turns_on_a_full_link() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 64);
    pair.connect_second();
    for wr_ids in [1..=3, 4..=6] {
        wr_ids.for_each(|wr_id| pair.post(0, &write_to(wr_id, &[local], remote)));
        pair.swap();
    }
    let mut order = Vec::new();
    while let Some(sent) = pair.transmit_one(0) {
        order.push(sent.packet().bth.dest_qp);
        pair.nodes[0].endpoint.link_full(TO_PEER);
        assert!(pair.transmit_one(0).is_none());
        pair.nodes[0].endpoint.link_ready(TO_PEER);
    }
    assert_eq!(order.len(), 6);
    assert!(order.windows(2).all(|pair| pair[0] != pair[1]), "{order:?}");
}

/// Behind a burst of long packets wait the other queue pair's requests, and its ACKs.
#[test]
fn queue_pairs_take_turns_after_each_long_packet() {
    const MTU: usize = LinkCapabilities::MTU;
    let setup = Setup {
        link_mtu: Some(MTU),
        ..Setup::default()
    };
    let (mut pair, local, remote) = with_regions(setup, MTU);
    pair.connect_second();
    for wr_ids in [1..=3, 4..=6] {
        wr_ids.for_each(|wr_id| pair.post(0, &write_to(wr_id, &[local], remote)));
        pair.swap();
    }
    let order: Vec<_> = std::iter::from_fn(|| pair.transmit_one(0))
        .map(|sent| sent.packet().bth.dest_qp)
        .collect();
    assert_eq!(order.len(), 6);
    assert!(order.windows(2).all(|pair| pair[0] != pair[1]), "{order:?}");
}

#[test]
fn datagrams_wait_for_their_link_in_order() {
    let setup = Setup {
        transport: Transport::Ud,
        ..Setup::default()
    };
    let (mut pair, local, remote) = with_regions(setup, 128);
    pair.receive(1, 5, &[remote]);
    pair.nodes[0].endpoint.link_full(TO_PEER);
    let to = pair.destination(0);
    let mut elsewhere = to;
    elsewhere.path.link = Some(LinkId(9));
    pair.post_datagram(0, &send(1, &[part(local, 8)]), &elsewhere);
    pair.post_datagram(0, &send(2, &[part(local, 8)]), &to);
    let mut buf = [0; 4096 + 128];
    let node = &mut pair.nodes[0];
    let mut poll = || {
        let transmit = node.endpoint.poll_transmit(pair.now, &mut node.memory, &mut buf);
        transmit.map(|transmit| (transmit.link, transmit.copy_before_completion))
    };
    assert_eq!(poll(), Some((Some(LinkId(9)), true)));
    assert_eq!(poll(), None);
    node.endpoint.link_ready(TO_PEER);
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success([1, 2]));
    assert_eq!(pair.completed(1, RECV_CQ), success([5]));
}

/// A stalled peer: the ACK timer runs even if the link is too full to retransmit.
#[test]
fn full_link_runs_into_the_retry_limit() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 64);
    pair.post(0, &write_to(1, &[local], remote));
    assert!(pair.transmit_one(0).is_some());
    pair.nodes[0].endpoint.link_full(TO_PEER);
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::RetryExceeded)]);
    assert_eq!(pair.nodes[0].endpoint.poll_revoked(), Some(pair.nodes[0].qpn));
}

#[test]
fn err_reset_and_destroy_revoke_references() {
    for to in [State::Err, State::Reset] {
        let (mut pair, local, remote) = with_regions(Setup::default(), 64);
        pair.post(0, &write_to(1, &[local], remote));
        assert!(pair.transmit_one(0).is_some());
        assert_eq!(pair.nodes[0].endpoint.poll_revoked(), None);
        pair.enter(0, to);
        let qpn = pair.nodes[0].qpn;
        assert_eq!(pair.nodes[0].endpoint.poll_revoked(), Some(qpn));
        assert_eq!(pair.nodes[0].endpoint.poll_revoked(), None);
        assert!(pair.nodes[1].endpoint.destroy_qp(pair.nodes[1].qpn));
        assert_eq!(pair.nodes[1].endpoint.poll_revoked(), Some(pair.nodes[1].qpn));
    }
}

/// Packets of a connection are accepted from the peer's link only, and not as datagrams.
#[test]
fn packets_from_another_link_are_refused() {
    let (mut pair, _, remote) = with_regions(Setup::default(), 64);
    let node = &mut pair.nodes[1];
    let bth = Bth::new(Opcode::RcSendOnly, node.qpn, Psn::new(pair.setup.psns[0]));
    let mut headers = [0; 64];
    let end = wire::write_headers(&mut headers, &bth, &Extension::Bare).unwrap();
    let address = node.address;
    fn packet(address: std::net::IpAddr, link: LinkId, headers: &[u8]) -> LinkPacket<'_> {
        let len = 0;
        LinkPacket {
            link,
            address,
            headers,
            len,
        }
    }
    let memory = &mut node.memory;
    node.endpoint
        .handle_link_packet(|| pair.now, &packet(address, LinkId(5), &headers[..end]), memory);
    assert_eq!(node.endpoint.counters().wrong_peer, 1);
    let mut datagram = [0; 16];
    wire::write(&mut datagram, &bth, &Extension::Bare, 0).unwrap();
    let datagram = Datagram {
        src: node.address,
        dst: node.address,
        src_port: 4791,
        dst_port: 4791,
        ident: Ident::Known(0),
        traffic_class: 0,
        payload: &datagram,
    };
    node.endpoint.handle_datagram(pair.now, &datagram, memory);
    assert_eq!(node.endpoint.counters().wrong_peer, 2);
    let link = link_to(0).unwrap();
    // Any other length is malformed, and so is a payload where there can be none.
    for end in (0..64).filter(|wrong| *wrong != end) {
        node.endpoint
            .handle_link_packet(|| pair.now, &packet(address, link, &headers[..end]), memory);
    }
    assert_eq!(node.endpoint.counters().malformed, 63);
    let unknown_qp = Bth::new(Opcode::RcSendOnly, Qpn::new(4), Psn::new(0));
    wire::write_headers(&mut headers, &unknown_qp, &Extension::Bare).unwrap();
    node.endpoint
        .handle_link_packet(|| pair.now, &packet(address, link, &headers[..end]), memory);
    assert_eq!(node.endpoint.counters().no_qp, 1);
    assert_eq!(pair.bytes(1, remote), pattern(64, 2));
    assert!(pair.nodes[1].completions.is_empty() && pair.log.is_empty());
}
