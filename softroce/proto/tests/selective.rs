//! Selective repeat (decision 111): who uses it, what is resent, and that order is kept.

mod util;

use doorbell_roce_proto::Mtu;
use doorbell_roce_proto::memory::Sge;
use doorbell_roce_proto::qp::State;
use doorbell_roce_proto::wire::{Extension, Opcode, SelectiveEth};

use util::{Fate, Pair, RECV_CQ, SEND_CQ, Setup, drop_all, pattern, send, success, with_regions, write_to};

/// The PSN of the first packet after the one by which the ends know each other.
const FIRST: u32 = 101;

fn both() -> Setup {
    Setup {
        mtu: Mtu::Mtu256,
        selective_repeat: [true; 2],
        tail_loss_probes: true,
        ..Setup::default()
    }
}

/// A pair that has exchanged one packet and its ACK.
fn acquainted(setup: Setup, len: usize) -> (Pair, Sge, Sge) {
    let (mut pair, local, remote) = with_regions(setup, len);
    pair.post(0, &write_to(0, &[Sge { len: 1, ..local }], remote));
    pair.run();
    pair.nodes[0].completions.clear();
    pair.log.clear();
    (pair, local, remote)
}

/// Loses packets of node 0, by PSN after the first, once each.
fn lose(lost: &[u32]) -> impl FnMut(usize, &util::Sent) -> Fate {
    let mut left: Vec<u32> = lost.iter().map(|index| FIRST + index).collect();
    move |_, sent| {
        let psn = sent.packet().bth.psn.get();
        match left.iter().position(|&lost| lost == psn).filter(|_| sent.from == 0) {
            Some(at) => {
                left.swap_remove(at);
                Fate::Drop
            }
            None => Fate::Deliver,
        }
    }
}

fn is_selective(sent: &util::Sent) -> bool {
    sent.opcode() == Opcode::RcSelectiveAcknowledge || sent.bytes[8] & 0x7f != 0
}

#[test]
fn only_missing_packets_are_resent() {
    let (mut pair, local, remote) = acquainted(both(), 256 * 20);
    pair.post(0, &write_to(1, &[local], remote));
    pair.run_with(lose(&[3, 4, 11]));
    let counters = pair.counters(0);
    assert_eq!((counters.retransmits, counters.timeouts), (3, 0));
    assert_eq!(pair.counters(1).sequence_naks_sent, 0);
    assert_eq!(pair.bytes(1, remote), pattern(256 * 20, 1));
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
}

#[test]
fn resent_packets_that_are_lost_again_cost_no_timeout() {
    let (mut pair, local, remote) = acquainted(both(), 256 * 20);
    pair.post(0, &write_to(1, &[local], remote));
    pair.run_with(lose(&[3, 3, 7, 7]));
    let counters = pair.counters(0);
    assert_eq!(counters.timeouts, 0);
    // The answer to the first may leave more: then the second follows at once.
    assert!((1..=2).contains(&counters.tail_loss_probes));
    assert_eq!(pair.bytes(1, remote), pattern(256 * 20, 1));
}

#[test]
fn the_window_is_what_a_responder_keeps() {
    let setup = Setup { window: 1024, ..both() };
    let (mut pair, local, remote) = acquainted(setup, 256 * 600);
    pair.post(0, &write_to(1, &[local], remote));
    pair.run_with(lose(&[0]));
    let counters = pair.counters(0);
    assert_eq!((counters.retransmits, counters.timeouts), (1, 0));
    assert_eq!(pair.bytes(1, remote), pattern(256 * 600, 1));
}

#[test]
fn nothing_is_visible_before_what_precedes_it() {
    let (mut pair, local, remote) = acquainted(both(), 8);
    let inboxes: Vec<Sge> = (0..3).map(|_| pair.region(1, vec![0; 8])).collect();
    for (wr_id, inbox) in inboxes.iter().enumerate() {
        pair.receive(1, wr_id as u64, &[*inbox]);
    }
    pair.post(0, &send(1, &[local]));
    pair.post(0, &write_to(2, &[local], remote));
    pair.post(0, &send(3, &[local]));
    let sent: Vec<_> = std::iter::from_fn(|| pair.transmit_one(0)).collect();
    pair.deliver(&sent[2]);
    pair.deliver(&sent[1]);
    assert_eq!(pair.completed(1, RECV_CQ), []);
    assert_eq!(
        (pair.bytes(1, inboxes[0]), pair.bytes(1, inboxes[1])),
        (&[0; 8][..], &[0; 8][..])
    );
    assert_ne!(pair.bytes(1, remote), pattern(8, 1));
    pair.deliver(&sent[0]);
    assert_eq!(pair.completed(1, RECV_CQ), success([0, 1]));
    assert_eq!(pair.bytes(1, remote), pattern(8, 1));
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success([1, 2, 3]));
}

#[test]
fn what_was_kept_behind_an_rnr_nak_is_resent() {
    let (mut pair, local, _) = acquainted(both(), 8);
    for wr_id in 0..4 {
        pair.post(0, &send(wr_id, &[local]));
    }
    // The first is lost, and there is no receive when it arrives.
    pair.exchange(&mut lose(&[0]));
    assert!(pair.counters(1).rnr_naks_sent > 0);
    let inboxes: Vec<Sge> = (0..4).map(|_| pair.region(1, vec![0; 8])).collect();
    for (wr_id, inbox) in inboxes.iter().enumerate() {
        pair.receive(1, wr_id as u64, &[*inbox]);
    }
    pair.run();
    assert_eq!(pair.completed(1, RECV_CQ), success(0..4));
    assert_eq!(pair.completed(0, SEND_CQ), success(0..4));
}

#[test]
fn others_get_what_the_standard_has() {
    let adapters = [[4791, 0xc123], [0xc123, 4791], [0xc123, 0xd456]];
    let ports = adapters.map(|ports| Setup { ports, ..both() });
    let off = [[true, false], [false, true]].map(|selective_repeat| Setup {
        selective_repeat,
        ..both()
    });
    for setup in ports.into_iter().chain(off) {
        let (mut pair, local, remote) = acquainted(setup, 256 * 20);
        pair.post(0, &write_to(1, &[local], remote));
        pair.run_with(lose(&[3, 11]));
        assert_eq!(pair.completed(0, SEND_CQ), success([1]));
        assert!(pair.counters(1).sequence_naks_sent > 0, "{setup:?}");
        let offered = pair.log.iter().filter(|sent| is_selective(sent));
        for sent in offered {
            // Only to a socket's port, by one that has it on, and only as bits that others ignore.
            assert!(
                setup.selective_repeat[sent.from] && setup.ports[1 - sent.from] < 0xc000,
                "{setup:?}"
            );
            assert_ne!(sent.opcode(), Opcode::RcSelectiveAcknowledge, "{setup:?}");
        }
    }
}

#[test]
fn forged_bitmaps_cause_one_retransmission_of_what_is_in_flight() {
    let (mut pair, local, remote) = acquainted(both(), 256 * 20);
    pair.post(0, &write_to(1, &[local], remote));
    pair.transmit(0, &mut drop_all);
    let before = pair.counters(0).retransmits;
    for bits in [0xff, 0x55, 0xaa, 0x00] {
        let received = SelectiveEth::from_bytes(&[bits; SelectiveEth::LEN]);
        for psn in [FIRST, FIRST + 5, FIRST + 19, FIRST + 20, 0] {
            for _ in 0..3 {
                let extension = Extension::Selective(received);
                pair.forge(0, Opcode::RcSelectiveAcknowledge, psn, &extension, &[]);
                pair.transmit(0, &mut drop_all);
            }
        }
    }
    assert!(pair.counters(0).retransmits - before <= 20);
    assert_eq!(pair.state(0), State::Rts);
}

#[test]
fn selective_acks_that_were_not_offered_are_ignored() {
    let setup = Setup {
        selective_repeat: [false; 2],
        ..both()
    };
    let (mut pair, local, remote) = acquainted(setup, 256 * 20);
    pair.post(0, &write_to(1, &[local], remote));
    pair.transmit(0, &mut drop_all);
    let received = SelectiveEth::from_bytes(&[0xaa; SelectiveEth::LEN]);
    let extension = Extension::Selective(received);
    pair.forge(0, Opcode::RcSelectiveAcknowledge, FIRST, &extension, &[]);
    assert!(pair.transmit_one(0).is_none());
    assert_eq!(pair.counters(0).unexpected_responses, 1);
}
