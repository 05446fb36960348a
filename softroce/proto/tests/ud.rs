//! Unreliable datagrams: one packet each, from any sender with the Q_Key (IBTA vol 1, 9.8.4).

mod util;

use doorbell_roce_proto::memory::Sge;
use doorbell_roce_proto::qp::{Modify, State};
use doorbell_roce_proto::wire::{Extension, GRH_LEN, Opcode, Transport, ip_header_addresses};
use doorbell_roce_proto::work::{CompletionOpcode, Destination, IpVersion, Operation, PostError, Status};

use util::memory::Rights;
use util::{
    Pair, QKEY, RECV_CQ, SEND_CQ, Setup, drop_all, fail_sending, pattern, receive_of, request, send, success, write_to,
};

const GRH: u32 = GRH_LEN as u32;

fn connected() -> (Pair, Sge, Sge) {
    let setup = Setup {
        transport: Transport::Ud,
        ..Setup::default()
    };
    util::with_regions(setup, 1000)
}

fn part(sge: Sge, len: u32) -> Sge {
    Sge { len, ..sge }
}

#[test]
fn datagrams_of_every_size() {
    for v6 in [false, true] {
        let setup = Setup {
            transport: Transport::Ud,
            v6,
            ..Setup::default()
        };
        let (mut pair, local, remote) = util::with_regions(setup, 1000);
        let to = pair.destination(0);
        for (wr_id, len) in (0..).zip([0, 1, 3, 100, 255, 256]) {
            for imm in [None, Some(0xd00b)] {
                let halves = [
                    part(remote, 30),
                    Sge {
                        addr: remote.addr + 30,
                        ..part(remote, 10 + len)
                    },
                ];
                pair.receive(1, wr_id, &halves);
                pair.post_datagram(0, &request(wr_id, Operation::Send { imm }, &[part(local, len)]), &to);
                pair.run();
                let (_, done) = pair.nodes[1].completions.pop().unwrap();
                assert_eq!(receive_of(&done), (CompletionOpcode::Receive, GRH + len, imm));
                let version = if v6 { IpVersion::V6 } else { IpVersion::V4 };
                assert_eq!((done.src_qpn, done.grh), (pair.nodes[0].qpn, Some(version)));
                let received = &pair.bytes(1, remote)[..(GRH + len) as usize];
                let (header, payload) = received.split_first_chunk().unwrap();
                assert_eq!(*payload, pair.bytes(0, local)[..len as usize]);
                let ends = (pair.nodes[0].address, pair.nodes[1].address);
                assert_eq!(ip_header_addresses(header), Some(ends));
                // What `destination` chose.
                let class = if v6 {
                    header[0] << 4 | header[1] >> 4
                } else {
                    header[21]
                };
                let expected = if util::over_link() { 0 } else { to.path.traffic_class };
                assert_eq!(class, expected);
            }
            assert_eq!(pair.completed(0, SEND_CQ), success([wr_id; 2]));
            pair.nodes[0].completions.clear();
        }
        assert!(pair.opcodes(1).is_empty(), "nothing is acknowledged");
        let psns: Vec<u32> = pair.log.iter().map(|sent| sent.packet().bth.psn.get()).collect();
        assert_eq!(psns, (100..112).collect::<Vec<_>>());
    }
}

#[test]
fn datagram_completes_when_transmitted() {
    let (mut pair, local, _) = connected();
    let to = pair.destination(0);
    (1..=40).for_each(|wr_id| pair.post_datagram(0, &send(wr_id, &[part(local, 9)]), &to));
    pair.run_with(drop_all);
    assert_eq!(pair.completed(0, SEND_CQ), success(1..=40));
    assert_eq!(pair.log.len(), 40);
    assert_eq!(pair.nodes[0].endpoint.poll_timeout(), None);
}

#[test]
fn every_request_has_its_destination() {
    let (mut pair, local, _) = connected();
    let mut here = pair.destination(0);
    here.path.link = None;
    let mut elsewhere = here;
    elsewhere.path.remote = "10.9.0.77".parse().unwrap();
    elsewhere.path.hop_limit = 44;
    elsewhere.qpn = doorbell_roce_proto::Qpn::new(0x99);
    let node = &mut pair.nodes[0];
    for to in [here, elsewhere, here] {
        let sges = [local];
        let request = send(1, &sges);
        let request = doorbell_roce_proto::work::SendRequest {
            payload: doorbell_roce_proto::work::Payload::Inline(&[1, 2, 3]),
            ..request
        };
        node.endpoint.post_datagram(pair.now, node.qpn, &request, &to).unwrap();
    }
    for to in [here, elsewhere, here] {
        let mut buf = [0; 4096 + 128];
        let transmit = node
            .endpoint
            .poll_transmit(pair.now, &mut node.memory, &mut buf)
            .unwrap();
        let packet = doorbell_roce_proto::wire::Packet::parse(&buf[..transmit.len]).unwrap();
        assert_eq!(
            (transmit.dst, transmit.hop_limit, transmit.traffic_class),
            (to.path.remote, to.path.hop_limit, to.path.traffic_class)
        );
        assert_eq!((packet.bth.dest_qp, packet.payload), (to.qpn, &[1, 2, 3][..]));
    }
}

#[test]
fn another_queue_key_is_refused() {
    let (mut pair, local, remote) = connected();
    let to = pair.destination(0);
    pair.receive(1, 5, &[remote]);
    let mut post = |qkey| {
        pair.post_datagram(0, &send(1, &[part(local, 8)]), &Destination { qkey, ..to });
        pair.run();
        (pair.completed(1, RECV_CQ), pair.counters(1).qkey_violations)
    };
    assert_eq!(post(QKEY + 1), (vec![], 1));
    // The highest bit selects the sender's own.
    assert_eq!(post(0x8000_0000), (success([5]), 1));
    assert_eq!(pair.completed(0, SEND_CQ), success([1, 1]));
}

#[test]
fn no_receive_and_no_room_drop_the_datagram() {
    let (mut pair, local, remote) = connected();
    let to = pair.destination(0);
    let mut post = |len| {
        pair.post_datagram(0, &send(1, &[part(local, len)]), &to);
        pair.run();
        pair.counters(1).dropped_messages
    };
    assert_eq!(post(8), 1);
    pair.receive(1, 5, &[part(remote, GRH + 7)]);
    let before = pair.bytes(1, remote).to_vec();
    let mut post = |len| {
        pair.post_datagram(0, &send(1, &[part(local, len)]), &to);
        pair.run();
        pair.counters(1).dropped_messages
    };
    assert_eq!(post(8), 2);
    assert_eq!(pair.bytes(1, remote), before);
    pair.post_datagram(0, &send(2, &[part(local, 7)]), &to);
    pair.run();
    assert_eq!(pair.completed(1, RECV_CQ), success([5]), "the receive was still there");
    assert_eq!(pair.state(1), State::Rts);
}

/// C10-93.1.1: neither an error nor a packet.
#[test]
fn longer_than_the_mtu() {
    let (mut pair, local, remote) = connected();
    let to = pair.destination(0);
    pair.receive(1, 5, &[remote]);
    pair.post_datagram(0, &send(1, &[part(local, 257)]), &to);
    pair.post_datagram(0, &send(2, &[part(local, 256)]), &to);
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success([1, 2]));
    assert_eq!(pair.opcodes(0), [Opcode::UdSendOnly]);
    assert_eq!(pair.counters(0).dropped_messages, 1);
    assert_eq!(pair.completed(1, RECV_CQ), success([5]));
}

#[test]
fn a_receive_that_cannot_be_written_ends_the_queue_pair() {
    let (mut pair, local, remote) = connected();
    let to = pair.destination(0);
    let closed = pair.nodes[1].memory.register(vec![9; 100], Rights::NONE);
    pair.receive(1, 5, &[closed]);
    pair.receive(1, 6, &[remote]);
    pair.post_datagram(0, &send(1, &[part(local, 8)]), &to);
    pair.run();
    assert_eq!(
        pair.completed(1, RECV_CQ),
        [(5, Status::LocalProtection), (6, Status::Flushed)]
    );
    assert_eq!(pair.state(1), State::Err);
}

#[test]
fn a_request_that_fails_stops_sending_only() {
    let (mut pair, local, remote) = connected();
    fail_sending(&mut pair);
    let (there, back) = (pair.destination(0), pair.destination(1));
    pair.post_datagram(0, &send(2, &[part(local, 8)]), &there);
    assert_eq!(
        pair.nodes[0].endpoint.poll_completion().unwrap().1.status,
        Status::Flushed
    );
    pair.receive(0, 3, &[local]);
    pair.post_datagram(1, &send(4, &[part(remote, 8)]), &back);
    pair.run();
    assert_eq!(pair.completed(0, RECV_CQ), success([3]));
    pair.modify(
        0,
        &Modify {
            state: Some(State::Rts),
            ..Modify::default()
        },
    );
    pair.receive(1, 5, &[remote]);
    pair.post_datagram(0, &send(6, &[part(local, 8)]), &there);
    pair.run();
    assert_eq!(pair.completed(1, RECV_CQ), success([5]));
}

#[test]
fn only_what_ud_offers() {
    let (mut pair, local, remote) = connected();
    let (now, to) = (pair.now, pair.destination(0));
    let node = &mut pair.nodes[0];
    let sges = [local];
    let write = write_to(1, &sges, remote);
    assert_eq!(
        node.endpoint.post_datagram(now, node.qpn, &write, &to),
        Err(PostError::Invalid)
    );
    assert_eq!(
        node.endpoint.post_send(now, node.qpn, &send(1, &[local])),
        Err(PostError::Invalid)
    );
    pair.receive(1, 5, &[remote]);
    pair.forge(1, Opcode::UcSendOnly, 0, &Extension::Bare, &pattern(8, 1));
    assert!(pair.nodes[1].completions.is_empty());
    assert_eq!(pair.counters(1).malformed, 1);
}
