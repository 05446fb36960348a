//! Hostile datagrams: no panic, and no effect on queue pairs that they do not belong to.

mod util;

use std::net::IpAddr;

use doorbell_roce_proto::icrc::Flow;
use doorbell_roce_proto::memory::Sge;
use doorbell_roce_proto::qp::State;
use doorbell_roce_proto::wire::{Opcode, Transport};
use doorbell_roce_proto::work::{ReceiveRequest, Status};
use doorbell_roce_proto::{Datagram, Ident};

use util::{Pair, RECV_CQ, SEND_CQ, Sent, Setup, pattern, read_from, send, success, with_regions, write_to};

const PORT: u16 = 4791;

/// A small seeded generator, so that every run is the same.
struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }
}

/// A pair with traffic of every kind in flight, and packets of that traffic.
fn busy() -> (Pair, Vec<Sent>) {
    let (mut pair, local, remote) = with_regions(Setup::default(), 600);
    (10..20).for_each(|wr_id| pair.receive(1, wr_id, &[remote]));
    pair.post(0, &send(1, &[local]));
    pair.post(0, &write_to(2, &[local], remote));
    pair.post(0, &read_from(3, &[local], remote));
    pair.run();
    let packets = pair.log.clone();
    pair.post(0, &read_from(4, &[local], remote));
    pair.post(0, &send(5, &[local]));
    pair.transmit(0, &mut |_, _| util::Fate::Deliver);
    (pair, packets)
}

fn handle(pair: &mut Pair, to: usize, src: IpAddr, bytes: &[u8]) {
    let node = &mut pair.nodes[to];
    let datagram = Datagram {
        src,
        dst: node.address,
        src_port: PORT,
        dst_port: PORT,
        ident: Ident::Known(0),
        traffic_class: 0,
        payload: bytes,
    };
    node.endpoint.handle_datagram(pair.now, &datagram, &mut node.memory);
}

fn mutate(random: &mut Random, sent: &Sent, flow: &Flow) -> Vec<u8> {
    let mut bytes = sent.bytes.clone();
    for _ in 0..random.next(4) {
        let at = random.next(bytes.len().min(60));
        bytes[at] = random.next(256) as u8;
    }
    match random.next(6) {
        0 => bytes.truncate(random.next(bytes.len() + 1)),
        1 => bytes.resize(bytes.len() + random.next(300), 1),
        // PSNs near the expected one get further than others.
        2 => bytes[11] = bytes[11].wrapping_add(random.next(5) as u8),
        3 => bytes[0] = Opcode::ALL[random.next(Opcode::ALL.len())].code(),
        _ => {}
    }
    flow.seal(0, &mut bytes);
    bytes
}

#[test]
fn mutated_packets_of_the_peer_never_panic() {
    let mut random = Random(1);
    for _ in 0..300 {
        let (mut pair, packets) = busy();
        let flow = Flow::new(pair.nodes[0].address, pair.nodes[1].address, PORT, PORT);
        for _ in 0..100 {
            let sent = &packets[random.next(packets.len())];
            let bytes = mutate(&mut random, sent, &flow);
            let (to, src) = (1 - sent.from, pair.nodes[sent.from].address);
            handle(&mut pair, to, src, &bytes);
        }
        // Whatever happened to the connection, it terminates.
        pair.run();
        let ended = pair.completed(0, SEND_CQ).len();
        assert!(ended == 5 || pair.state(0) == State::Rts, "{ended}");
    }
}

/// Over UC and UD malformed packets are dropped: no error, no reply, and the next message arrives.
#[test]
fn mutated_packets_without_a_connection_change_nothing() {
    for transport in [Transport::Uc, Transport::Ud] {
        let setup = Setup {
            transport,
            ..Setup::default()
        };
        let (mut pair, local, remote) = with_regions(setup, 600);
        let to = pair.destination(0);
        let short = [Sge { len: 200, ..local }];
        let post = |pair: &mut Pair| match transport {
            Transport::Ud => pair.post_datagram(0, &send(1, &short), &to),
            _ => {
                pair.post(0, &send(1, &[local]));
                pair.post(0, &write_to(2, &[local], remote));
                pair.post(0, &send(3, &short));
            }
        };
        post(&mut pair);
        pair.run_with(util::drop_all);
        let packets = pair.log.clone();
        let flow = Flow::new(pair.nodes[0].address, pair.nodes[1].address, PORT, PORT);
        let mut random = Random(3);
        for number in 0..20_000 {
            if number % 5 == 0 {
                let node = &mut pair.nodes[1];
                // Full most of the time.
                let _ = node.endpoint.post_receive(
                    node.qpn,
                    &ReceiveRequest {
                        wr_id: 9,
                        sges: &[Sge {
                            len: 40 + random.next(560) as u32,
                            ..remote
                        }],
                    },
                );
            }
            let sent = &packets[random.next(packets.len())];
            let bytes = mutate(&mut random, sent, &flow);
            let src = pair.nodes[0].address;
            handle(&mut pair, 1, src, &bytes);
            while let Some((cq, completion)) = pair.nodes[1].endpoint.poll_completion() {
                assert_eq!((cq, completion.status), (RECV_CQ, Status::Success));
                assert!(completion.byte_len <= 600);
            }
        }
        assert_eq!(pair.state(1), State::Rts);
        assert!(pair.transmit_one(1).is_none(), "nothing is answered");
        let counters = pair.counters(1);
        assert!(counters.malformed > 0 && counters.dropped_messages > 0, "{counters:?}");
        // An empty one fits any receive.
        let node = &mut pair.nodes[1];
        let _ = node.endpoint.post_receive(
            node.qpn,
            &ReceiveRequest {
                wr_id: 9,
                sges: &[remote],
            },
        );
        match transport {
            Transport::Ud => pair.post_datagram(0, &send(4, &[]), &to),
            _ => pair.post(0, &send(4, &[])),
        }
        pair.run();
        assert_eq!(pair.completed(1, RECV_CQ), success([9]), "{transport:?}");
        // Also checks the guards around it.
        assert_eq!(pair.bytes(1, remote).len(), 600);
    }
}

#[test]
fn packets_of_other_peers_leave_no_trace() {
    let mut random = Random(2);
    let (mut pair, packets) = busy();
    let before = [0, 1].map(|at| pair.nodes[at].endpoint.query_qp(pair.nodes[at].qpn));
    let unknown_peer: IpAddr = "10.9.0.77".parse().unwrap();
    for number in 0..20_000 {
        let sent = &packets[random.next(packets.len())];
        let (to, peer) = (1 - sent.from, pair.nodes[sent.from].address);
        let (src, bytes) = match number % 4 {
            // Correct except for its source address.
            0 => (
                unknown_peer,
                mutate(
                    &mut random,
                    sent,
                    &Flow::new(unknown_peer, pair.nodes[to].address, PORT, PORT),
                ),
            ),
            // For another queue pair.
            1 => {
                let mut bytes = sent.bytes.clone();
                let qpn = pair.nodes[to].qpn.get() ^ (1 << random.next(24));
                bytes[5..8].copy_from_slice(&qpn.to_be_bytes()[1..]);
                Flow::new(peer, pair.nodes[to].address, PORT, PORT).seal(0, &mut bytes);
                (peer, bytes)
            }
            2 => {
                let mut bytes = sent.bytes.clone();
                let at = random.next(bytes.len());
                // Byte 4 is not covered.
                bytes[if at == 4 { 5 } else { at }] ^= 1 << random.next(8);
                (peer, bytes)
            }
            _ => (peer, pattern(random.next(200), number)),
        };
        handle(&mut pair, to, src, &bytes);
    }
    let after = [0, 1].map(|at| pair.nodes[at].endpoint.query_qp(pair.nodes[at].qpn));
    assert_eq!(before, after);
    let counted = pair.nodes.iter().map(|node| *node.endpoint.counters());
    let refused =
        counted.map(|counters| counters.malformed + counters.no_qp + counters.wrong_peer + counters.icrc_errors);
    assert_eq!(refused.sum::<u64>(), 20_000);
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success(1..=5));
    assert!(pair.nodes.iter().all(|node| {
        node.completions
            .iter()
            .all(|(_, completion)| completion.status == Status::Success)
    }));
}
