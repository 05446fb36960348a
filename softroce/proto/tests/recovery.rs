//! Recovery: lost packets (go-back-N), duplicates, RNR NAKs, retry counts, replay of atomics.

mod util;

use std::time::Duration;

use doorbell_roce_proto::memory::{AtomicOp, Sge};
use doorbell_roce_proto::qp::State;
use doorbell_roce_proto::wire::{Aeth, AtomicEth, Extension, Nak, Opcode, Reth, RnrTimer, Syndrome};
use doorbell_roce_proto::work::{Operation, Status};

use util::memory::rkey;
use util::{
    Fate, Pair, RECV_CQ, SEND_CQ, Setup, atomic_on, drop_all, pattern, read_from, request, send, success, with_regions,
    write_operation, write_to,
};

const ADD: AtomicOp = AtomicOp::FetchAdd { add: 1 };

#[test]
fn one_nak_per_gap() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 256 * 20);
    pair.post(0, &write_to(1, &[local], remote));
    pair.run_with(|number, _| if number == 5 { Fate::Drop } else { Fate::Deliver });
    let naks: Vec<_> = pair.log.iter().filter(|sent| sent.from == 1).collect();
    assert_eq!(pair.syndromes(1)[0], Syndrome::Nak(Nak::PsnSequence));
    assert_eq!(naks[0].packet().bth.psn.get(), 105);
    assert_eq!(pair.syndromes(1).len(), 2);
    let counters = pair.nodes[1].endpoint.counters();
    assert_eq!((counters.sequence_naks_sent, counters.out_of_sequence), (1, 14));
    // Go-back-N: everything from the gap on was retransmitted, without a timeout.
    assert_eq!(pair.nodes[0].endpoint.counters().retransmits, 15);
    assert_eq!(pair.nodes[0].endpoint.counters().timeouts, 0);
    assert_eq!(pair.bytes(1, remote), pattern(256 * 20, 1));
}

#[test]
fn duplicated_naks_cause_one_go_back_n() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 256 * 20);
    pair.post(0, &write_to(1, &[local], remote));
    pair.run_with(|number, sent| match number {
        5 => Fate::Drop,
        _ if sent.from == 1 => Fate::Duplicate,
        _ => Fate::Deliver,
    });
    assert_eq!(pair.nodes[0].endpoint.counters().retransmits, 15);
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
}

#[test]
fn read_is_reissued_from_the_first_missing_response() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 256 * 10);
    pair.post(0, &read_from(1, &[local], remote));
    // The request is packet 0, the fifth response packet 5.
    pair.run_with(|number, _| if number == 5 { Fate::Drop } else { Fate::Deliver });
    let requests: Vec<_> = pair.log.iter().filter(|sent| sent.from == 0).collect();
    assert_eq!(requests.len(), 2);
    let again = requests[1].packet();
    let Extension::Reth(reth) = again.extension else {
        panic!("{again:?}")
    };
    assert_eq!(
        (again.bth.psn.get(), reth.va, reth.len),
        (104, remote.addr + 4 * 256, 6 * 256)
    );
    assert_eq!(pair.bytes(0, local), pattern(256 * 10, 2));
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
    assert_eq!(pair.nodes[0].endpoint.counters().timeouts, 0);
}

#[test]
fn duplicate_atomic_is_replayed() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 64);
    let word = Sge { len: 8, ..local };
    let before = u64::from_ne_bytes(pattern(64, 2)[..8].try_into().unwrap());
    for wr_id in 0..4 {
        let result = Sge {
            addr: word.addr + 8 * wr_id,
            ..word
        };
        pair.post(0, &atomic_on(wr_id, &[result], remote, ADD));
    }
    let mut answers = 0;
    pair.run_with(|_, sent| {
        answers += usize::from(sent.from == 1);
        if sent.from == 1 && answers <= 8 {
            Fate::Drop
        } else {
            Fate::Deliver
        }
    });
    let words = |bytes: &[u8]| -> Vec<u64> {
        bytes
            .chunks(8)
            .map(|word| u64::from_ne_bytes(word.try_into().unwrap()))
            .collect()
    };
    let results = words(&pair.bytes(0, local)[..32]);
    assert_eq!(
        results,
        (0..4).map(|done| before.wrapping_add(done)).collect::<Vec<_>>()
    );
    assert_eq!(words(pair.bytes(1, remote))[0], before.wrapping_add(4));
    assert!(pair.nodes[1].endpoint.counters().duplicates >= 8);
}

#[test]
fn duplicate_send_is_acknowledged_and_not_executed() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 8);
    pair.receive(1, 10, &[remote]);
    pair.receive(1, 11, &[remote]);
    pair.post(0, &send(1, &[local]));
    pair.run_with(|number, _| if number == 1 { Fate::Drop } else { Fate::Deliver });
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
    assert_eq!(pair.completed(1, RECV_CQ), success([10]));
    assert_eq!(pair.opcodes(0), [Opcode::RcSendOnly; 2]);
    assert_eq!(pair.opcodes(1), [Opcode::RcAcknowledge; 2]);
}

#[test]
fn each_gap_is_reported() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 256 * 30);
    pair.post(0, &write_to(1, &[local], remote));
    // 30 packets, a NAK, 25 retransmissions, a NAK, and so on.
    pair.run_with(|number, _| {
        if matches!(number, 5 | 40 | 60) {
            Fate::Drop
        } else {
            Fate::Deliver
        }
    });
    assert_eq!(pair.nodes[1].endpoint.counters().sequence_naks_sent, 3);
    assert_eq!(pair.nodes[0].endpoint.counters().timeouts, 0);
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
}

fn answers(pair: &mut Pair, at: usize) -> Vec<(Opcode, u32)> {
    pair.log.clear();
    pair.transmit(at, &mut drop_all);
    pair.log
        .iter()
        .map(|sent| (sent.opcode(), sent.packet().bth.psn.get()))
        .collect()
}

const READ_OF_3: [(Opcode, u32); 3] = [
    (Opcode::RcReadResponseFirst, 100),
    (Opcode::RcReadResponseMiddle, 101),
    (Opcode::RcReadResponseLast, 102),
];

fn reth(at: Sge, offset: u64, len: u32) -> Extension {
    Extension::Reth(Reth {
        va: at.addr + offset,
        rkey: rkey(at),
        len,
    })
}

#[test]
fn duplicate_read_during_its_responses_rewinds() {
    let (mut pair, _, remote) = with_regions(Setup::default(), 600);
    pair.forge(1, Opcode::RcReadRequest, 100, &reth(remote, 0, 600), &[]);
    // Before anything of it was sent, the duplicate changes nothing.
    pair.forge(1, Opcode::RcReadRequest, 100, &reth(remote, 0, 600), &[]);
    assert_eq!(
        pair.transmit_one(1).map(|sent| sent.opcode()),
        Some(Opcode::RcReadResponseFirst)
    );
    // Pending responses are not sent twice, sent ones are.
    pair.forge(1, Opcode::RcReadRequest, 101, &reth(remote, 256, 344), &[]);
    assert_eq!(answers(&mut pair, 1), READ_OF_3[1..]);
    pair.forge(1, Opcode::RcReadRequest, 100, &reth(remote, 0, 600), &[]);
    assert_eq!(
        pair.transmit_one(1).map(|sent| sent.opcode()),
        Some(Opcode::RcReadResponseFirst)
    );
    assert_eq!(
        pair.transmit_one(1).map(|sent| sent.opcode()),
        Some(Opcode::RcReadResponseMiddle)
    );
    pair.forge(1, Opcode::RcReadRequest, 100, &reth(remote, 0, 600), &[]);
    assert_eq!(answers(&mut pair, 1), READ_OF_3);
}

#[test]
fn duplicate_read_is_answered_in_psn_order() {
    let (mut pair, _, remote) = with_regions(Setup::default(), 600);
    pair.forge(1, Opcode::RcReadRequest, 100, &reth(remote, 0, 600), &[]);
    assert_eq!(answers(&mut pair, 1), READ_OF_3);
    pair.forge(1, Opcode::RcWriteOnly, 103, &reth(remote, 0, 4), &[1; 4]);
    pair.forge(1, Opcode::RcReadRequest, 100, &reth(remote, 0, 600), &[]);
    let expected = [&READ_OF_3[..], &[(Opcode::RcAcknowledge, 103)]].concat();
    assert_eq!(answers(&mut pair, 1), expected);
}

#[test]
fn mismatched_duplicate_read_is_not_answered() {
    let (mut pair, _, remote) = with_regions(Setup::default(), 600);
    pair.forge(1, Opcode::RcReadRequest, 100, &reth(remote, 0, 600), &[]);
    assert_eq!(answers(&mut pair, 1), READ_OF_3);
    // It would take PSNs beyond the expected one.
    pair.forge(1, Opcode::RcReadRequest, 102, &reth(remote, 0, 600), &[]);
    assert_eq!(answers(&mut pair, 1), []);
    assert_eq!((pair.state(1), pair.expected_psn(1)), (State::Rts, 103));
}

#[test]
fn duplicate_read_of_deregistered_memory_is_not_answered() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 600);
    pair.post(0, &read_from(1, &[local], remote));
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
    pair.nodes[1].memory.deregister(remote);
    let late = pair.log[0].clone();
    pair.deliver(&late);
    assert_eq!(answers(&mut pair, 1), []);
    assert_eq!(pair.state(1), State::Rts);
}

#[test]
fn duplicates_cannot_fill_the_reply_queue() {
    let (mut pair, _, remote) = with_regions(
        Setup {
            dest_rd_atomic: 4,
            ..Setup::default()
        },
        8,
    );
    for psn in 100..150 {
        pair.forge(1, Opcode::RcReadRequest, psn, &reth(remote, 0, 8), &[]);
        pair.transmit(1, &mut drop_all);
    }
    (100..150).for_each(|psn| pair.forge(1, Opcode::RcReadRequest, psn, &reth(remote, 0, 8), &[]));
    let first_four: Vec<_> = (100..104).map(|psn| (Opcode::RcReadResponseOnly, psn)).collect();
    assert_eq!(answers(&mut pair, 1), first_four);
    // Nor do they count against new ones.
    (100..104).for_each(|psn| pair.forge(1, Opcode::RcReadRequest, psn, &reth(remote, 0, 8), &[]));
    (150..154).for_each(|psn| pair.forge(1, Opcode::RcReadRequest, psn, &reth(remote, 0, 8), &[]));
    assert_eq!((answers(&mut pair, 1).len(), pair.state(1)), (8, State::Rts));
}

#[test]
fn atomic_evicted_from_the_replay_buffer_is_not_answered() {
    let (mut pair, _, remote) = with_regions(
        Setup {
            dest_rd_atomic: 2,
            ..Setup::default()
        },
        8,
    );
    let atomic = AtomicEth {
        va: remote.addr,
        rkey: rkey(remote),
        swap_add: 1,
        compare: 0,
    };
    for psn in 100..105 {
        pair.forge(1, Opcode::RcFetchAdd, psn, &Extension::Atomic(atomic), &[]);
        assert_eq!(answers(&mut pair, 1), [(Opcode::RcAtomicAcknowledge, psn)]);
    }
    (100..105).for_each(|psn| pair.forge(1, Opcode::RcFetchAdd, psn, &Extension::Atomic(atomic), &[]));
    assert_eq!(
        answers(&mut pair, 1),
        [(Opcode::RcAtomicAcknowledge, 103), (Opcode::RcAtomicAcknowledge, 104)]
    );
    let before = u64::from_ne_bytes(pattern(8, 2).try_into().unwrap());
    let after = u64::from_ne_bytes(pair.bytes(1, remote).try_into().unwrap());
    assert_eq!(after, before.wrapping_add(5));
}

#[test]
fn duplicate_sends_and_writes_are_acknowledged_with_the_last_psn() {
    let (mut pair, _, remote) = with_regions(Setup::default(), 600);
    (10..13).for_each(|wr_id| pair.receive(1, wr_id, &[remote]));
    pair.forge(1, Opcode::RcSendOnly, 100, &Extension::Bare, b"one.");
    pair.forge(1, Opcode::RcSendOnly, 101, &Extension::Bare, b"two.");
    assert_eq!(answers(&mut pair, 1), [(Opcode::RcAcknowledge, 101)]);
    pair.forge(1, Opcode::RcSendOnly, 100, &Extension::Bare, b"one.");
    assert_eq!(answers(&mut pair, 1), [(Opcode::RcAcknowledge, 101)]);
    assert_eq!(pair.bytes(1, remote)[..4], *b"two.");
    assert_eq!(pair.completed(1, RECV_CQ), success([10, 11]));
}

#[test]
fn ack_timeout_retries_retry_cnt_times_then_fails() {
    for retry_cnt in [0, 1, 3, 7] {
        let (mut pair, local, remote) = with_regions(
            Setup {
                retry_cnt,
                timeout: 8,
                ..Setup::default()
            },
            8,
        );
        let start = pair.now;
        pair.post(0, &write_to(1, &[local], remote));
        pair.post(0, &write_to(2, &[local], remote));
        pair.run_with(drop_all);
        assert_eq!(
            pair.completed(0, SEND_CQ),
            [(1, Status::RetryExceeded), (2, Status::Flushed)]
        );
        let tries = u32::from(retry_cnt) + 1;
        assert_eq!(pair.log.len() as u32, 2 * tries);
        let period = Duration::from_nanos(4096 << 8);
        assert_eq!(pair.now - start, period * tries);
        assert_eq!(pair.state(0), State::Err);
        assert_eq!(pair.nodes[0].endpoint.counters().timeouts, u64::from(tries));
        assert_eq!(pair.nodes[0].endpoint.poll_timeout(), None);
    }
}

#[test]
fn progress_resets_the_retry_count() {
    // Each packet gets through at the third attempt: 20 packets need more retries than the count.
    let (mut pair, local, remote) = with_regions(
        Setup {
            retry_cnt: 2,
            window: 1,
            ..Setup::default()
        },
        256 * 20,
    );
    pair.post(0, &write_to(1, &[local], remote));
    let mut tries = 0;
    pair.run_with(|_, sent| {
        tries += usize::from(sent.from == 0);
        if sent.from == 0 && tries % 3 != 0 {
            Fate::Drop
        } else {
            Fate::Deliver
        }
    });
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
    assert_eq!(pair.nodes[0].endpoint.counters().timeouts, 40);
}

#[test]
fn without_a_timeout_nothing_is_due() {
    let (mut pair, local, remote) = with_regions(
        Setup {
            timeout: 0,
            ..Setup::default()
        },
        8,
    );
    pair.post(0, &write_to(1, &[local], remote));
    pair.run_with(drop_all);
    assert_eq!(pair.completed(0, SEND_CQ), []);
    assert_eq!(pair.nodes[0].endpoint.poll_timeout(), None);
}

#[test]
fn nothing_is_due_when_all_is_acknowledged() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 600);
    pair.post(0, &write_to(1, &[local], remote));
    pair.transmit(0, &mut |_, _| Fate::Deliver);
    assert_eq!(
        pair.nodes[0].endpoint.poll_timeout(),
        Some(pair.now + Duration::from_nanos(4096 << 10))
    );
    pair.exchange(&mut |_, _| Fate::Deliver);
    assert_eq!(pair.nodes[0].endpoint.poll_timeout(), None);
    assert_eq!(pair.nodes[1].endpoint.poll_timeout(), None);
}

#[test]
fn rnr_nak_delays_the_sender_by_the_rnr_timer() {
    for imm in [false, true] {
        let (mut pair, local, remote) = with_regions(
            Setup {
                rnr_timer: 14,
                ..Setup::default()
            },
            600,
        );
        let start = pair.now;
        let operation = if imm {
            write_operation(remote, Some(3))
        } else {
            Operation::Send { imm: None }
        };
        pair.post(0, &request(1, operation, &[local]));
        pair.exchange(&mut |_, _| Fate::Deliver);
        let wait = RnrTimer::from_code(14);
        assert_eq!(pair.syndromes(1), [Syndrome::RnrNak(wait)]);
        assert_eq!(pair.nodes[0].endpoint.poll_timeout(), Some(start + wait.duration()));
        pair.post(0, &write_to(2, &[local], remote));
        pair.exchange(&mut |_, _| Fate::Deliver);
        let sent = pair.opcodes(0).len();
        assert_eq!(sent, 3);
        pair.receive(1, 10, &[remote]);
        pair.run();
        assert_eq!(pair.completed(0, SEND_CQ), success([1, 2]));
        assert_eq!(pair.completed(1, RECV_CQ), success([10]));
        assert_eq!(pair.now - start, wait.duration());
        assert_eq!(pair.bytes(1, remote), pattern(600, 1));
    }
}

#[test]
fn rnr_retries_are_counted() {
    for rnr_retry in [0, 1, 6] {
        let (mut pair, local, _) = with_regions(
            Setup {
                rnr_retry,
                ..Setup::default()
            },
            8,
        );
        pair.post(0, &send(1, &[local]));
        pair.run();
        assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::RnrRetryExceeded)]);
        assert_eq!(pair.opcodes(0).len(), usize::from(rnr_retry) + 1);
        assert_eq!(pair.state(0), State::Err);
        assert_eq!(pair.state(1), State::Rts);
    }
}

#[test]
fn rnr_retry_7_is_for_ever() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 8);
    pair.post(0, &send(1, &[local]));
    for _ in 0..100 {
        pair.exchange(&mut |_, _| Fate::Deliver);
        pair.now = pair.nodes[0].endpoint.poll_timeout().unwrap();
        let now = pair.now;
        pair.nodes[0].endpoint.handle_timeout(now);
    }
    assert_eq!(pair.completed(0, SEND_CQ), []);
    pair.receive(1, 10, &[remote]);
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
    assert_eq!(pair.nodes[0].endpoint.counters().rnr_naks_received, 100);
}

#[test]
fn rnr_naks_consume_no_transport_retries() {
    // One packet is lost between two RNR NAKs: with a retry count of one, these must not add up.
    let (mut pair, local, remote) = with_regions(
        Setup {
            retry_cnt: 1,
            ..Setup::default()
        },
        8,
    );
    pair.post(0, &send(1, &[local]));
    let mut sends = 0;
    for _ in 0..20 {
        pair.exchange(&mut |_, sent| {
            sends += usize::from(sent.from == 0);
            if sent.from == 0 && sends % 2 == 0 {
                Fate::Drop
            } else {
                Fate::Deliver
            }
        });
        pair.now = pair.nodes[0].endpoint.poll_timeout().unwrap();
        let now = pair.now;
        pair.nodes[0].endpoint.handle_timeout(now);
    }
    pair.receive(1, 10, &[remote]);
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
}

#[test]
fn progress_resets_the_rnr_retry_count() {
    let (mut pair, local, remote) = with_regions(
        Setup {
            rnr_retry: 1,
            ..Setup::default()
        },
        8,
    );
    (1..=4).for_each(|wr_id| pair.post(0, &send(wr_id, &[local])));
    for wr_id in 10..14 {
        pair.exchange(&mut |_, _| Fate::Deliver);
        pair.receive(1, wr_id, &[remote]);
        pair.now = pair.nodes[0].endpoint.poll_timeout().unwrap();
        let now = pair.now;
        pair.nodes[0].endpoint.handle_timeout(now);
    }
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success(1..=4));
    assert_eq!(pair.nodes[0].endpoint.counters().rnr_naks_received, 4);
}

#[test]
fn rnr_wait_is_not_cut_short() {
    let (mut pair, local, remote) = with_regions(
        Setup {
            rnr_retry: 1,
            rnr_timer: 14,
            ..Setup::default()
        },
        8,
    );
    let start = pair.now;
    (1..=3).for_each(|wr_id| pair.post(0, &send(wr_id, &[local])));
    // The RNR NAK is duplicated, then a sequence NAK for the same packet.
    pair.exchange(&mut |_, sent| if sent.from == 1 { Fate::Duplicate } else { Fate::Deliver });
    let nak = Aeth {
        syndrome: Syndrome::Nak(Nak::PsnSequence),
        msn: 0,
    };
    pair.forge(0, Opcode::RcAcknowledge, 100, &Extension::Aeth(nak), &[]);
    pair.exchange(&mut |_, _| Fate::Deliver);
    assert_eq!(pair.opcodes(0).len(), 3);
    assert_eq!(
        pair.nodes[0].endpoint.poll_timeout(),
        Some(start + RnrTimer::from_code(14).duration())
    );
    (10..13).for_each(|wr_id| pair.receive(1, wr_id, &[remote]));
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success(1..=3));
}

#[test]
fn a_nak_after_the_timer_counts_again() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 600);
    pair.post(0, &write_to(1, &[local], remote));
    let nak = Extension::Aeth(Aeth {
        syndrome: Syndrome::Nak(Nak::PsnSequence),
        msn: 0,
    });
    let sent_after = |pair: &mut Pair, what: &mut dyn FnMut(&mut Pair)| {
        what(pair);
        answers(pair, 0).len()
    };
    assert_eq!(sent_after(&mut pair, &mut |_| {}), 3);
    assert_eq!(
        sent_after(&mut pair, &mut |pair| pair.forge(
            0,
            Opcode::RcAcknowledge,
            100,
            &nak,
            &[]
        )),
        3
    );
    assert_eq!(
        sent_after(&mut pair, &mut |pair| pair.forge(
            0,
            Opcode::RcAcknowledge,
            100,
            &nak,
            &[]
        )),
        0
    );
    let timeout = pair.nodes[0].endpoint.poll_timeout().unwrap();
    assert_eq!(
        sent_after(&mut pair, &mut |pair| pair.nodes[0].endpoint.handle_timeout(timeout)),
        3
    );
    assert_eq!(
        sent_after(&mut pair, &mut |pair| pair.forge(
            0,
            Opcode::RcAcknowledge,
            100,
            &nak,
            &[]
        )),
        3
    );
}
