//! The UDP source port of a connected peer: pinned by its first valid packet, unless it is one that
//! adapters choose for entropy.

mod util;

use doorbell_roce_proto::icrc::Flow;
use doorbell_roce_proto::qp::State;
use doorbell_roce_proto::wire::{self, Aeth, Bth, Credits, Extension, Nak, Opcode, Syndrome, Transport, packet_len};
use doorbell_roce_proto::work::Status;
use doorbell_roce_proto::{Datagram, Ident, Psn};

use util::{Pair, RECV_CQ, SEND_CQ, Setup, pattern, send, success};

const ROCE_PORT: u16 = 4791;

/// Delivers a packet as if its sender had another source port.
fn arrive(pair: &mut Pair, to: usize, port: u16, bytes: &[u8]) {
    let (src, dst) = (pair.nodes[1 - to].address, pair.nodes[to].address);
    let mut bytes = bytes.to_vec();
    Flow::new(src, dst, port, ROCE_PORT).seal(0, &mut bytes);
    let datagram = Datagram {
        src,
        dst,
        src_port: port,
        dst_port: ROCE_PORT,
        ident: Ident::Known(0),
        traffic_class: 0,
        payload: &bytes,
    };
    let node = &mut pair.nodes[to];
    node.endpoint.handle_datagram(pair.now, &datagram, &mut node.memory);
    util::drain(node);
}

fn forge(pair: &Pair, to: usize, opcode: Opcode, psn: Psn, extension: &Extension) -> Vec<u8> {
    let mut bytes = vec![0; packet_len(opcode, 0)];
    let bth = Bth::new(opcode, pair.nodes[to].qpn, psn);
    wire::write(&mut bytes, &bth, extension, 0).unwrap();
    bytes
}

fn response(pair: &Pair, to: usize, psn: Psn, syndrome: Syndrome) -> Vec<u8> {
    let aeth = Extension::Aeth(Aeth { syndrome, msn: 1 });
    forge(pair, to, Opcode::RcAcknowledge, psn, &aeth)
}

/// A pair of which each end has sent a message of `len` bytes from `port`.
fn connected_from(port: u16) -> Pair {
    let mut pair = Pair::connected(Setup::default());
    let sge = [0, 1].map(|at| pair.region(at, pattern(300, 1)));
    for at in [0, 1] {
        (0..20).for_each(|wr_id| pair.receive(at, wr_id, &[sge[at]]));
    }
    for at in [0, 1] {
        pair.post(at, &send(1, &[sge[at]]));
        let mut moved = true;
        while moved {
            moved = false;
            for from in [0, 1] {
                while let Some(sent) = pair.transmit_one(from) {
                    arrive(&mut pair, 1 - from, port, &sent.bytes);
                    moved = true;
                }
            }
        }
        assert_eq!(pair.completed(at, SEND_CQ), success([1]));
        assert_eq!(pair.completed(1 - at, RECV_CQ), success([0]));
    }
    pair
}

/// Another user on the peer's host has its address, but not the port of its socket.
#[test]
fn packets_from_another_port_change_nothing() {
    let mut pair = connected_from(ROCE_PORT);
    let sge = pair.region(0, pattern(300, 3));
    pair.post(0, &send(2, &[sge]));
    let lost: Vec<_> = std::iter::from_fn(|| pair.transmit_one(0)).collect();
    let [first, last] = [0, 1].map(|at: usize| lost[at].packet().bth.psn);
    let ack = response(&pair, 0, last, Syndrome::Ack(Credits::UNLIMITED));
    let nak = response(&pair, 0, first, Syndrome::Nak(Nak::InvalidRequest));
    let request = forge(&pair, 1, Opcode::RcSendOnly, first, &Extension::Bare);
    let before = pair.completed(1, RECV_CQ);
    for port in [40_000, 50_000] {
        [&ack, &nak]
            .iter()
            .for_each(|forged| arrive(&mut pair, 0, port, forged));
        arrive(&mut pair, 1, port, &request);
    }
    assert_eq!((pair.state(0), pair.completed(0, SEND_CQ)), (State::Rts, success([1])));
    assert_eq!(pair.completed(1, RECV_CQ), before);
    assert_eq!([0, 1].map(|at| pair.counters(at).wrong_peer), [4, 2]);

    // From the peer's port each does what it says.
    arrive(&mut pair, 1, ROCE_PORT, &request);
    assert_eq!(pair.completed(1, RECV_CQ).len(), before.len() + 1);
    arrive(&mut pair, 0, ROCE_PORT, &ack);
    assert_eq!(pair.completed(0, SEND_CQ), success([1, 2]));
    pair.post(0, &send(3, &[sge]));
    let sent = pair.transmit_one(0).unwrap();
    let nak = response(&pair, 0, sent.packet().bth.psn, Syndrome::Nak(Nak::InvalidRequest));
    arrive(&mut pair, 0, ROCE_PORT, &nak);
    assert_eq!(
        pair.completed(0, SEND_CQ).last(),
        Some(&(3, Status::RemoteInvalidRequest))
    );
}

#[test]
fn only_a_valid_packet_pins() {
    for transport in [Transport::Rc, Transport::Uc] {
        let mut pair = Pair::connected(Setup {
            transport,
            ..Setup::default()
        });
        let sges = [0, 1].map(|at| pair.region(at, pattern(100, 1)));
        (0..4).for_each(|wr_id| pair.receive(1, wr_id, &[sges[1]]));
        pair.post(0, &send(1, &[sges[0]]));
        let first = pair.transmit_one(0).unwrap();
        // Not the expected PSN: refused by RC, a new message of UC.
        let mut forged = first.bytes.clone();
        forged[11] = forged[11].wrapping_add(9);
        arrive(&mut pair, 1, 40_000, &forged);
        if transport == Transport::Rc {
            arrive(&mut pair, 1, ROCE_PORT, &first.bytes);
        } else {
            // In sequence after the forged one, which may have been one after lost ones.
            forged[11] = forged[11].wrapping_add(1);
            arrive(&mut pair, 1, ROCE_PORT, &forged);
        }
        let received = pair.completed(1, RECV_CQ).len();
        assert_eq!(received, if transport == Transport::Rc { 1 } else { 2 });
        assert_eq!(pair.counters(1).wrong_peer, 0, "nothing was pinned before");
        arrive(&mut pair, 1, 40_000, &first.bytes);
        assert_eq!(pair.counters(1).wrong_peer, 1);
    }
}

/// rxe and adapters send from ports from 49152 on, by flow label, and may change them.
#[test]
fn ports_for_entropy_may_change() {
    let mut pair = connected_from(49_152 + 17);
    let sge = pair.region(0, pattern(100, 3));
    pair.post(0, &send(2, &[sge]));
    let sent = pair.transmit_one(0).unwrap();
    arrive(&mut pair, 1, 49_151, &sent.bytes);
    assert_eq!(pair.counters(1).wrong_peer, 1);
    arrive(&mut pair, 1, 65_535, &sent.bytes);
    assert_eq!(pair.completed(1, RECV_CQ), success([0, 1]));
}

/// A queue pair that is connected anew, as after a restart of the peer, has no pin.
#[test]
fn a_new_connection_takes_a_new_port() {
    let mut pair = connected_from(33_000);
    for at in [0, 1] {
        pair.enter(at, State::Reset);
    }
    for at in [0, 1] {
        for modify in [pair.init_modify(), pair.rtr_modify(at), pair.rts_modify(at)] {
            pair.modify(at, &modify);
        }
    }
    let sges = [0, 1].map(|at| pair.region(at, pattern(100, 1)));
    pair.receive(1, 5, &[sges[1]]);
    pair.post(0, &send(7, &[sges[0]]));
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ).last(), Some(&(7, Status::Success)));
}
