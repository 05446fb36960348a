//! The rules of the conversation: windows, acknowledgements, retries, waits, limits, order.

mod util;

use std::time::Duration;

use doorbell_roce_proto::memory::{AtomicOp, Sge};
use doorbell_roce_proto::qp::State;
use doorbell_roce_proto::wire::{Extension, Nak, Opcode, RnrTimer, Syndrome};
use doorbell_roce_proto::work::{Operation, Payload, SendRequest, Status};
use doorbell_roce_proto::{AsyncEvent, Instant, Mtu};

use util::{
    Fate, Pair, RECV_CQ, SEND_CQ, Setup, atomic_on, pattern, read_from, request, send, write_operation, write_to,
};

const ADD: AtomicOp = AtomicOp::FetchAdd { add: 1 };

fn success(wr_ids: impl IntoIterator<Item = u64>) -> Vec<(u64, Status)> {
    wr_ids.into_iter().map(|wr_id| (wr_id, Status::Success)).collect()
}

/// A connected pair with a region of `len` bytes at each end.
fn with_regions(setup: Setup, len: usize) -> (Pair, Sge, Sge) {
    let mut pair = Pair::connected(setup);
    let local = pair.region(0, pattern(len, 1));
    let remote = pair.region(1, pattern(len, 2));
    (pair, local, remote)
}

fn drop_all(_: usize, _: &util::Sent) -> Fate {
    Fate::Drop
}

// Window and acknowledgements

#[test]
fn window_is_kept_and_asks_at_its_end() {
    for window in [1, 2, 5, 100] {
        let (mut pair, local, remote) = with_regions(
            Setup {
                window,
                ..Setup::default()
            },
            256 * 200,
        );
        pair.post(0, &write_to(1, &[local], remote));
        pair.transmit(0, &mut drop_all);
        assert_eq!(pair.log.len(), window as usize);
        assert!(pair.log.last().unwrap().packet().bth.ack_req);
        pair.run();
        assert_eq!(pair.completed(0, SEND_CQ), success([1]));
        assert_eq!(pair.bytes(1, remote), pattern(256 * 200, 1));
    }
}

#[test]
fn an_acknowledgement_is_asked_for_every_64_packets() {
    let (mut pair, local, remote) = with_regions(
        Setup {
            window: 1000,
            ..Setup::default()
        },
        256 * 200,
    );
    pair.post(0, &write_to(1, &[local], remote));
    pair.transmit(0, &mut drop_all);
    let asked = pair
        .log
        .iter()
        .enumerate()
        .filter(|(_, sent)| sent.packet().bth.ack_req)
        .map(|(at, _)| at);
    assert_eq!(asked.collect::<Vec<_>>(), [63, 127, 191, 199]);
}

#[test]
fn a_batch_of_requests_is_acknowledged_once() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 8);
    (0..20).for_each(|wr_id| pair.post(0, &write_to(wr_id, &[local], remote)));
    pair.run();
    assert_eq!(pair.opcodes(1), [Opcode::RcAcknowledge]);
    assert_eq!(pair.log.last().unwrap().packet().bth.psn.get(), 119);
    assert_eq!(pair.log.last().unwrap().packet().extension.aeth().unwrap().msn, 20);
    assert_eq!(pair.completed(0, SEND_CQ), success(0..20));
}

#[test]
fn responses_keep_the_order_of_requests() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 600);
    let word = [Sge { len: 8, ..local }];
    pair.post(0, &write_to(1, &word, remote));
    pair.post(0, &read_from(2, &[local], remote));
    pair.post(0, &write_to(3, &word, remote));
    pair.post(0, &atomic_on(4, &word, remote, ADD));
    pair.post(0, &write_to(5, &word, remote));
    pair.run();
    use Opcode::{RcAcknowledge, RcAtomicAcknowledge, RcReadResponseFirst, RcReadResponseLast, RcReadResponseMiddle};
    let read = [RcReadResponseFirst, RcReadResponseMiddle, RcReadResponseLast];
    let expected = [
        &[RcAcknowledge][..],
        &read,
        &[RcAcknowledge, RcAtomicAcknowledge, RcAcknowledge],
    ]
    .concat();
    assert_eq!(pair.opcodes(1), expected);
    let psns = pair
        .log
        .iter()
        .filter(|sent| sent.from == 1)
        .map(|sent| sent.packet().bth.psn.get());
    assert_eq!(psns.collect::<Vec<_>>(), [100, 101, 102, 103, 104, 105, 106]);
    assert_eq!(pair.completed(0, SEND_CQ), success(1..=5));
}

#[test]
fn read_responses_acknowledge_what_was_before() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 600);
    pair.post(0, &write_to(1, &[local], remote));
    pair.post(0, &read_from(2, &[local], remote));
    // The acknowledgement of the WRITE is lost.
    pair.run_with(|_, sent| {
        if sent.opcode() == Opcode::RcAcknowledge {
            Fate::Drop
        } else {
            Fate::Deliver
        }
    });
    assert_eq!(pair.completed(0, SEND_CQ), success([1, 2]));
    assert_eq!(pair.nodes[0].endpoint.counters().retransmits, 0);
}

#[test]
fn unsignalled_requests_complete_silently() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 8);
    for wr_id in 0..6 {
        let list = [local];
        let request = SendRequest {
            signalled: wr_id == 3,
            ..write_to(wr_id, &list, remote)
        };
        pair.post(0, &request);
    }
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success([3]));
    // Their places in the queue are free again: 64 fit.
    (0..64).for_each(|wr_id| pair.post(0, &write_to(wr_id, &[local], remote)));
}

#[test]
fn signal_all_completes_every_request() {
    let (mut pair, local, remote) = with_regions(
        Setup {
            signal_all: true,
            ..Setup::default()
        },
        8,
    );
    let list = [local];
    pair.post(
        0,
        &SendRequest {
            signalled: false,
            ..write_to(1, &list, remote)
        },
    );
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
}

#[test]
fn solicited_reaches_the_receiver() {
    for solicited in [false, true] {
        let (mut pair, local, remote) = with_regions(Setup::default(), 600);
        pair.receive(1, 10, &[remote]);
        pair.receive(1, 11, &[]);
        let list = [local];
        pair.post(
            0,
            &SendRequest {
                solicited,
                ..send(1, &list)
            },
        );
        pair.post(
            0,
            &SendRequest {
                solicited,
                ..request(2, write_operation(remote, Some(1)), &list)
            },
        );
        pair.run();
        let received = &pair.nodes[1].completions;
        assert_eq!(
            (received[0].1.solicited, received[1].1.solicited),
            (solicited, solicited)
        );
    }
}

#[test]
fn inline_bytes_are_those_at_posting() {
    let (mut pair, _, remote) = with_regions(Setup::default(), 600);
    let mut bytes = pattern(600, 5);
    let payload = Payload::Inline(&bytes);
    let first = SendRequest {
        payload,
        ..write_to(1, &[], remote)
    };
    let node = &mut pair.nodes[0];
    node.endpoint.post_send(Instant(0), node.qpn, &first).unwrap();
    bytes.fill(0);
    // Also when they go a second time.
    pair.run_with(|number, _| if number < 3 { Fate::Drop } else { Fate::Deliver });
    assert_eq!(pair.bytes(1, remote), pattern(600, 5));
}

// Loss

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
    // Everything from the gap on went again, and nothing waited for the timer.
    assert_eq!(pair.nodes[0].endpoint.counters().retransmits, 15);
    assert_eq!(pair.nodes[0].endpoint.counters().timeouts, 0);
    assert_eq!(pair.bytes(1, remote), pattern(256 * 20, 1));
}

#[test]
fn duplicated_naks_go_back_once() {
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
fn a_read_is_asked_for_from_the_first_response_missing() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 256 * 10);
    pair.post(0, &read_from(1, &[local], remote));
    // The request is number 0, the fifth response number 5.
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
fn an_atomic_is_done_once_however_often_it_comes() {
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
    // Every answer is lost twice.
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
fn a_duplicate_send_is_acknowledged_and_not_received_again() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 8);
    pair.receive(1, 10, &[remote]);
    pair.receive(1, 11, &[remote]);
    pair.post(0, &send(1, &[local]));
    // The first acknowledgement is lost.
    pair.run_with(|number, _| if number == 1 { Fate::Drop } else { Fate::Deliver });
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
    assert_eq!(pair.completed(1, RECV_CQ), success([10]));
    assert_eq!(pair.opcodes(0), [Opcode::RcSendOnly; 2]);
    assert_eq!(pair.opcodes(1), [Opcode::RcAcknowledge; 2]);
}

// Retries and timers

#[test]
fn the_timer_retries_as_often_as_agreed_and_then_fails() {
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
fn progress_gives_the_retries_back() {
    // Each packet gets through the third time only: 20 packets need more retries than there are.
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

// Receiver not ready

#[test]
fn without_a_receive_the_sender_waits_as_asked() {
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
        // Whatever is posted meanwhile waits too.
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
        // The receiver is none the wiser.
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
fn an_alive_receiver_that_is_not_ready_uses_up_no_transport_retries() {
    // Between two RNR NAKs one packet is lost: with one retry, that must not add up.
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

// Order and limits

#[test]
fn a_fenced_request_waits_for_reads_and_atomics() {
    for fence in [false, true] {
        let (mut pair, local, remote) = with_regions(Setup::default(), 600);
        let word = [Sge { len: 8, ..local }];
        pair.post(0, &read_from(1, &[local], remote));
        pair.post(0, &atomic_on(2, &word, remote, ADD));
        pair.post(
            0,
            &SendRequest {
                fence,
                ..write_to(3, &word, remote)
            },
        );
        pair.transmit(0, &mut |_, _| Fate::Deliver);
        assert_eq!(pair.log.len(), if fence { 2 } else { 3 });
        pair.run();
        assert_eq!(pair.completed(0, SEND_CQ), success([1, 2, 3]));
    }
}

#[test]
fn reads_and_atomics_outstanding_are_limited() {
    let (mut pair, local, remote) = with_regions(
        Setup {
            rd_atomic: 2,
            dest_rd_atomic: 2,
            ..Setup::default()
        },
        600,
    );
    let word = [Sge { len: 8, ..local }];
    for wr_id in 0..3 {
        pair.post(0, &read_from(2 * wr_id, &[local], remote));
        pair.post(0, &atomic_on(2 * wr_id + 1, &word, remote, ADD));
    }
    pair.transmit(0, &mut |_, _| Fate::Deliver);
    assert_eq!(pair.log.len(), 2);
    pair.run_with(|number, _| if number % 7 == 3 { Fate::Drop } else { Fate::Deliver });
    assert_eq!(pair.completed(0, SEND_CQ), success(0..6));
}

#[test]
fn reads_where_none_may_be_outstanding_fail() {
    let (mut pair, local, remote) = with_regions(
        Setup {
            rd_atomic: 0,
            ..Setup::default()
        },
        600,
    );
    pair.post(0, &write_to(1, &[local], remote));
    pair.post(0, &read_from(2, &[local], remote));
    pair.run();
    assert_eq!(
        pair.completed(0, SEND_CQ),
        [(1, Status::Success), (2, Status::LocalQpOperation)]
    );
}

#[test]
fn draining_finishes_what_began_and_begins_nothing() {
    for sqd_notify in [false, true] {
        let (mut pair, local, remote) = with_regions(
            Setup {
                window: 2,
                sqd_notify,
                ..Setup::default()
            },
            600,
        );
        pair.post(0, &write_to(1, &[local], remote));
        pair.post(0, &write_to(2, &[local], remote));
        pair.transmit(0, &mut |_, _| Fate::Drop);
        pair.enter(0, State::Sqd);
        assert!(pair.nodes[0].endpoint.query_qp(pair.nodes[0].qpn).unwrap().sq_draining);
        pair.post(0, &write_to(3, &[local], remote));
        assert_eq!(pair.nodes[0].events, []);
        pair.run();
        assert_eq!(pair.completed(0, SEND_CQ), success([1]));
        let drained = AsyncEvent::SendQueueDrained(pair.nodes[0].qpn);
        assert_eq!(pair.nodes[0].events, if sqd_notify { vec![drained] } else { vec![] });
        assert!(!pair.nodes[0].endpoint.query_qp(pair.nodes[0].qpn).unwrap().sq_draining);
        pair.enter(0, State::Rts);
        pair.run();
        assert_eq!(pair.completed(0, SEND_CQ), success([1, 2, 3]));
    }
}

#[test]
fn an_idle_queue_pair_is_drained_at_once() {
    let mut pair = Pair::connected(Setup::default());
    pair.enter(0, State::Sqd);
    pair.run();
    assert_eq!(pair.nodes[0].events, [AsyncEvent::SendQueueDrained(pair.nodes[0].qpn)]);
}

#[test]
fn the_first_message_in_rtr_is_an_event() {
    let mut pair = Pair::in_rtr(Setup::default());
    pair.enter_rts(0);
    let (local, remote) = (pair.region(0, pattern(600, 1)), pair.region(1, vec![0; 600]));
    pair.post(0, &write_to(1, &[local], remote));
    pair.post(0, &write_to(2, &[local], remote));
    pair.run();
    assert_eq!(
        pair.nodes[1].events,
        [AsyncEvent::CommunicationEstablished(pair.nodes[1].qpn)]
    );
    assert_eq!(pair.completed(0, SEND_CQ), success([1, 2]));
    // Into RTS now, and back the other way, without another event.
    pair.enter_rts(1);
    pair.post(1, &write_to(3, &[remote], local));
    pair.run();
    assert_eq!((pair.nodes[0].events.len(), pair.nodes[1].events.len()), (0, 1));
}

#[test]
fn both_directions_at_once() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 20_000);
    let (from_left, from_right) = (pair.region(0, pattern(20_000, 8)), pair.region(1, pattern(20_000, 9)));
    pair.post(0, &write_to(1, &[from_left], remote));
    pair.post(1, &write_to(1, &[from_right], local));
    pair.post(0, &read_from(2, &[from_left], from_right));
    pair.run_with(|number, _| if number % 17 == 4 { Fate::Drop } else { Fate::Deliver });
    assert_eq!(pair.bytes(1, remote), pattern(20_000, 8));
    assert_eq!(pair.bytes(0, local), pattern(20_000, 9));
    assert_eq!(pair.bytes(0, from_left), pattern(20_000, 9));
    assert_eq!(
        (pair.completed(0, SEND_CQ), pair.completed(1, SEND_CQ)),
        (success([1, 2]), success([1]))
    );
}

#[test]
fn a_long_answer_does_not_hold_up_requests() {
    let (mut pair, local, remote) = with_regions(
        Setup {
            window: 1000,
            ..Setup::default()
        },
        256 * 100,
    );
    pair.post(0, &read_from(1, &[local], remote));
    pair.transmit(0, &mut drop_all);
    let asked = pair.log[0].clone();
    pair.deliver(&asked);
    pair.post(1, &write_to(1, &[remote], local));
    pair.log.clear();
    pair.transmit(1, &mut drop_all);
    let opcodes = pair.opcodes(1);
    let first_request = opcodes.iter().position(|opcode| opcode.is_request());
    assert_eq!(first_request, Some(16));
    assert_eq!(opcodes.len(), 200);
    // Runs stay together: few changes between answers and requests.
    let changes = opcodes
        .windows(2)
        .filter(|pair| pair[0].is_request() != pair[1].is_request())
        .count();
    assert!(changes <= 200 / 16 + 1, "{changes}");
}

#[test]
fn a_message_of_many_windows_across_the_wrap() {
    let len = 256 * 20_000 + 3;
    let setup = Setup {
        psns: [0xff_f000, 0xff_ff00],
        window: 1000,
        ..Setup::default()
    };
    let (mut pair, local, remote) = with_regions(setup, len);
    pair.post(0, &write_to(1, &[local], remote));
    pair.post(0, &read_from(2, &[local], remote));
    pair.run_with(|number, _| if number % 997 == 5 { Fate::Drop } else { Fate::Deliver });
    pair.log.clear();
    assert_eq!(pair.completed(0, SEND_CQ), success([1, 2]));
    assert!(pair.bytes(1, remote) == pattern(len, 1));
    assert_eq!(pair.expected_psn(1), (0xff_f000 + 2 * 20_001) & 0xff_ffff);
}

#[test]
fn bursts_take_turns_between_queue_pairs() {
    use doorbell_roce_proto::qp::Modify;
    let setup = Setup {
        mtu: Mtu::Mtu256,
        window: 1000,
        ..Setup::default()
    };
    let (mut pair, local, remote) = with_regions(setup, 256 * 100);
    let (init, rtr, rts) = (pair.init_modify(), pair.rtr_modify(0), pair.rts_modify(0));
    let first = pair.nodes[0].qpn;
    let second = pair.nodes[0].endpoint.create_qp(util::qp_init(false));
    for modify in [init, rtr, rts] {
        pair.nodes[0]
            .endpoint
            .modify_qp(pair.now, second, &Modify { ..modify })
            .unwrap();
    }
    for qpn in [first, second] {
        pair.nodes[0]
            .endpoint
            .post_send(pair.now, qpn, &write_to(1, &[local], remote))
            .unwrap();
    }
    let mut buf = [0; 4096 + 128];
    let node = &mut pair.nodes[0];
    let sent = std::iter::from_fn(|| node.endpoint.poll_transmit(Instant(0), &mut node.memory, &mut buf));
    let order: Vec<_> = sent.map(|transmit| transmit.qpn).collect();
    assert_eq!(order.len(), 200);
    assert!(order.chunks(16).take(12).enumerate().all(|(turn, chunk)| {
        let expected = if turn % 2 == 0 { first } else { second };
        chunk.iter().all(|qpn| *qpn == expected)
    }));
}
