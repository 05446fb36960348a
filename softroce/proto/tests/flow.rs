//! Lossless operation: windows, ACKs, order, limits, round-robin.

mod util;

use doorbell_roce_proto::memory::{AtomicOp, Sge};
use doorbell_roce_proto::qp::State;
use doorbell_roce_proto::wire::Opcode;
use doorbell_roce_proto::work::{Payload, SendRequest, Status};
use doorbell_roce_proto::{AsyncEvent, Instant, Mtu};

use util::{
    Fate, Pair, SEND_CQ, Setup, atomic_on, drop_all, pattern, read_from, request, send, success, with_regions,
    write_operation, write_to,
};

const ADD: AtomicOp = AtomicOp::FetchAdd { add: 1 };

#[test]
fn window_is_kept_and_its_last_packet_requests_an_ack() {
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
fn an_ack_is_requested_every_64_packets() {
    let (mut pair, local, remote) = with_regions(
        Setup {
            window: 1000,
            ..Setup::default()
        },
        256 * 200,
    );
    pair.post(0, &write_to(1, &[local], remote));
    pair.transmit(0, &mut drop_all);
    let ack_requests = pair
        .log
        .iter()
        .enumerate()
        .filter(|(_, sent)| sent.packet().bth.ack_req)
        .map(|(at, _)| at);
    assert_eq!(ack_requests.collect::<Vec<_>>(), [63, 127, 191, 199]);
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
    // Also in retransmissions.
    pair.run_with(|number, _| if number < 3 { Fate::Drop } else { Fate::Deliver });
    assert_eq!(pair.bytes(1, remote), pattern(600, 5));
}

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
    // RTS now, then in the other direction, without another event.
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
fn long_read_response_does_not_block_requests() {
    let (mut pair, local, remote) = with_regions(
        Setup {
            window: 1000,
            ..Setup::default()
        },
        256 * 100,
    );
    pair.post(0, &read_from(1, &[local], remote));
    pair.transmit(0, &mut drop_all);
    let read_request = pair.log[0].clone();
    pair.deliver(&read_request);
    pair.post(1, &write_to(1, &[remote], local));
    pair.log.clear();
    pair.transmit(1, &mut drop_all);
    let opcodes = pair.opcodes(1);
    let first_request = opcodes.iter().position(|opcode| opcode.is_request());
    assert_eq!(first_request, Some(16));
    assert_eq!(opcodes.len(), 200);
    // Runs stay together: few alternations between replies and requests.
    let changes = opcodes
        .windows(2)
        .filter(|pair| pair[0].is_request() != pair[1].is_request())
        .count();
    assert!(changes <= 200 / 16 + 1, "{changes}");
}

#[test]
fn a_message_of_many_windows_across_the_wrap() {
    let len = 256 * 5_000 + 3;
    let setup = Setup {
        psns: [0xff_f800, 0xff_ff00],
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
    assert_eq!(pair.expected_psn(1), (0xff_f800 + 2 * 5_001) & 0xff_ffff);
}

#[test]
fn bursts_alternate_round_robin_between_qps() {
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

/// The packets of the second node when it answers a SEND before it has transmitted the ACK.
fn answered(setup: Setup) -> Vec<Opcode> {
    let (mut pair, local, remote) = with_regions(setup, 8);
    pair.receive(1, 1, &[remote]);
    pair.post(0, &send(2, &[local]));
    let sent = pair.transmit_one(0).unwrap();
    pair.deliver(&sent);
    pair.receive(0, 3, &[local]);
    pair.post(1, &send(4, &[remote]));
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success([2]));
    pair.opcodes(1)
}

#[test]
fn ack_follows_the_request_unless_configured_before() {
    let (acknowledgement, answer) = (Opcode::RcAcknowledge, Opcode::RcSendOnly);
    let ack_first = Setup {
        ack_before_requests: true,
        ..Setup::default()
    };
    assert_eq!(answered(ack_first), [acknowledgement, answer]);
    // One GSO run, of which the last segment may be shorter. A lossless link has no runs.
    let default_order = if util::over_link() {
        [acknowledgement, answer]
    } else {
        [answer, acknowledgement]
    };
    assert_eq!(answered(Setup::default()), default_order);
}
