//! Unsignaled requests on lossless links: sent without AckReq, which follows when something waits.

#[path = "../util/mod.rs"]
mod util;

use core::time::Duration;

use doorbell_roce_proto::AsyncEvent;
use doorbell_roce_proto::memory::{Bind, Sge};
use doorbell_roce_proto::qp::{RemoteAccess, State};
use doorbell_roce_proto::wire::Opcode;
use doorbell_roce_proto::work::{Operation, SendRequest, Status};

use util::memory::Rights;
use util::{
    Fate, Pair, RECV_CQ, SEND_CQ, Setup, link_to, pattern, read_from, request, send, success, with_regions, write_to,
};

fn unsignaled<'a>(request: SendRequest<'a>) -> SendRequest<'a> {
    SendRequest {
        signaled: false,
        ..request
    }
}

fn deliver(pair: &mut Pair) {
    pair.exchange(&mut |_, _| Fate::Deliver);
}

fn acknowledgements(pair: &Pair) -> usize {
    let of = |opcode: &&Opcode| **opcode == Opcode::RcAcknowledge;
    pair.opcodes(1).iter().filter(of).count()
}

/// A pair whose first node has posted an unsignaled WRITE that was executed.
fn with_suppressed_ack(setup: Setup) -> (Pair, Sge, Sge) {
    let (mut pair, local, remote) = with_regions(setup, 8);
    pair.post(0, &unsignaled(write_to(1, &[local], remote)));
    deliver(&mut pair);
    assert_eq!(pair.bytes(1, remote), pattern(8, 1));
    assert_eq!(acknowledgements(&pair), 0);
    (pair, local, remote)
}

#[test]
fn one_ack_covers_all_before_the_ack_request() {
    let (mut pair, local, remote) = with_suppressed_ack(Setup::default());
    for wr_id in 2..5 {
        pair.post(0, &unsignaled(write_to(wr_id, &[local], remote)));
    }
    pair.post(0, &write_to(5, &[local], remote));
    deliver(&mut pair);
    assert_eq!(acknowledgements(&pair), 1);
    assert_eq!(pair.completed(0, SEND_CQ), success([5]));
    assert_eq!(pair.nodes[0].endpoint.poll_timeout(), None);
    assert_eq!(pair.opcodes(0).len(), 5);
}

#[test]
fn read_response_acknowledges_all_before_it() {
    let (mut pair, local, remote) = with_suppressed_ack(Setup::default());
    pair.post(0, &read_from(2, &[local], remote));
    deliver(&mut pair);
    assert_eq!(pair.completed(0, SEND_CQ), success([2]));
    assert_eq!(pair.nodes[0].endpoint.poll_timeout(), None);
}

#[test]
fn half_full_queue_requests_acks() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 8);
    // The queue has 64 slots.
    for wr_id in 0..1000 {
        pair.post(0, &unsignaled(write_to(wr_id, &[local], remote)));
        deliver(&mut pair);
    }
    assert_eq!(pair.opcodes(0).len(), 1000);
    assert!(
        (16..=63).contains(&acknowledgements(&pair)),
        "{}",
        acknowledgements(&pair)
    );
}

#[test]
fn on_ack_timeout_the_last_packet_requests_an_ack() {
    let (mut pair, ..) = with_suppressed_ack(Setup::default());
    pair.run();
    assert_eq!(pair.opcodes(0), [Opcode::RcWriteOnly; 2]);
    assert_eq!(acknowledgements(&pair), 1);
    assert_eq!(pair.counters(0).timeouts, 0);
    assert_eq!(pair.completed(0, SEND_CQ), []);
    assert_eq!(pair.nodes[0].endpoint.poll_timeout(), None);
}

#[test]
fn last_packet_of_a_long_message_requests_the_ack() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 600);
    pair.post(0, &unsignaled(write_to(1, &[local], remote)));
    pair.run();
    let [last, again] = pair.opcodes(0)[2..] else {
        panic!("{:?}", pair.opcodes(0));
    };
    assert_eq!((last, again), (Opcode::RcWriteLast, Opcode::RcWriteLast));
    assert_eq!(pair.bytes(1, remote), pattern(600, 1));
}

/// No ACK is missing: a retry would send again what the peer has, over a link that is slow already.
#[test]
fn a_timeout_before_the_first_ack_request_is_no_retry() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 600);
    pair.post(0, &unsignaled(write_to(1, &[local], remote)));
    let first = pair.transmit_one(0).unwrap();
    assert!(!first.packet().bth.ack_req);
    let link = link_to(1).unwrap();
    pair.nodes[0].endpoint.link_full(link);
    pair.now = pair.nodes[0].endpoint.poll_timeout().unwrap();
    pair.nodes[0].endpoint.handle_timeout(pair.now);
    pair.nodes[0].endpoint.link_ready(link);
    let second = pair.transmit_one(0).unwrap();
    assert_eq!(second.packet().bth.opcode, Opcode::RcWriteMiddle);
    assert!(second.packet().bth.ack_req);
    assert_eq!((pair.counters(0).timeouts, pair.counters(0).retransmits), (0, 0));
}

#[test]
fn dead_peer_is_detected() {
    let setup = Setup {
        retry_cnt: 2,
        timeout: 8,
        ..Setup::default()
    };
    let (mut pair, ..) = with_suppressed_ack(setup);
    let start = pair.now;
    pair.run_with(|_, _| Fate::Drop);
    assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::RetryExceeded)]);
    assert_eq!(pair.state(0), State::Err);
    // One period until AckReq is sent, then the usual retries.
    assert_eq!(pair.now - start, Duration::from_nanos(4096 << 8) * 4);
}

#[test]
fn sqd_requests_the_suppressed_ack() {
    let (mut pair, local, remote) = with_suppressed_ack(Setup::default());
    pair.enter(0, State::Sqd);
    pair.post(0, &write_to(2, &[local], remote));
    deliver(&mut pair);
    assert_eq!(pair.nodes[0].events, [AsyncEvent::SendQueueDrained(pair.nodes[0].qpn)]);
    pair.enter(0, State::Rts);
    deliver(&mut pair);
    assert_eq!(pair.completed(0, SEND_CQ), success([2]));
}

#[test]
fn local_request_triggers_an_ack_request() {
    let (mut pair, local, remote) = with_suppressed_ack(Setup::default());
    let region = pair.nodes[0].memory.register(pattern(8, 2), Rights::NONE);
    let rkey = pair.nodes[0].memory.window();
    let access = RemoteAccess {
        write: true,
        ..RemoteAccess::default()
    };
    let bind = Bind {
        rkey,
        region: region.lkey,
        addr: region.addr,
        len: region.len.into(),
        access,
        zero_based: false,
    };
    pair.post(0, &request(2, Operation::Bind(bind), &[]));
    deliver(&mut pair);
    assert_eq!(pair.completed(0, SEND_CQ), success([2]));
    // The same with an unsignaled request already behind it.
    pair.post(0, &unsignaled(write_to(3, &[local], remote)));
    pair.post(0, &request(4, Operation::Invalidate { rkey }, &[]));
    pair.post(0, &unsignaled(write_to(5, &[local], remote)));
    deliver(&mut pair);
    assert_eq!(pair.completed(0, SEND_CQ), success([2, 4]));
}

#[test]
fn rnr_nak_of_an_unsignalled_send_is_retried() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 8);
    pair.post(0, &unsignaled(send(1, &[local])));
    deliver(&mut pair);
    pair.receive(1, 10, &[remote]);
    pair.run();
    assert_eq!(pair.completed(1, RECV_CQ), success([10]));
}

#[test]
fn nak_of_an_unsignalled_request_is_reported() {
    let (mut pair, local, remote) = with_regions(Setup::default(), 8);
    let beyond = Sge {
        addr: remote.addr + 1,
        ..remote
    };
    pair.post(0, &unsignaled(write_to(1, &[local], beyond)));
    deliver(&mut pair);
    assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::RemoteAccess)]);
}
