//! Shared receive queues: two queue pairs of one node use one queue (IBTA vol 1, 10.2.9).

mod util;

use doorbell_roce_proto::memory::{PdId, Sge};
use doorbell_roce_proto::qp::{Modify, State};
use doorbell_roce_proto::wire::{Nak, Syndrome, Transport};
use doorbell_roce_proto::work::{Operation, PostError, ReceiveRequest, Status};
use doorbell_roce_proto::{AsyncEvent, SrqAttributes, SrqError, SrqInit};

use util::memory::Rights;
use util::{
    Fate, PD, Pair, RECV_CQ, SEND_CQ, Setup, drop_all, pattern, receive_of, request, send, success, write_operation,
};

const SRQ: SrqInit = SrqInit {
    pd: PD,
    max_wr: 8,
    max_sge: 2,
    xrc: None,
};

fn setup(transport: Transport) -> Setup {
    Setup {
        transport,
        srq: Some(SRQ),
        ..Setup::default()
    }
}

/// Two connections whose receiving ends share a queue; the second one is current.
fn connected(transport: Transport) -> Pair {
    let mut pair = Pair::connected(setup(transport));
    pair.connect_second();
    pair
}

fn receive(pair: &mut Pair, wr_id: u64, len: usize) -> Sge {
    let into = pair.region(1, vec![0; len]);
    pair.receive_shared(wr_id, &[into]).unwrap();
    into
}

fn fill(pair: &mut Pair, wr_ids: std::ops::Range<u64>, len: usize) {
    for wr_id in wr_ids {
        receive(pair, wr_id, len);
    }
}

fn query(pair: &Pair) -> SrqAttributes {
    pair.nodes[1].endpoint.query_srq(pair.nodes[1].srq.unwrap()).unwrap()
}

fn arm(pair: &mut Pair, limit: u32) -> Result<Vec<AsyncEvent>, SrqError> {
    let node = &mut pair.nodes[1];
    node.endpoint.modify_srq(node.srq.unwrap(), None, Some(limit))?;
    Ok(std::iter::from_fn(|| node.endpoint.poll_event()).collect())
}

/// Interleaved messages of several packets: each keeps the receive that it began with.
#[test]
fn messages_of_two_queue_pairs_side_by_side() {
    for transport in [Transport::Rc, Transport::Uc] {
        let mut pair = connected(transport);
        let into = [0, 1, 2, 3].map(|wr_id| receive(&mut pair, wr_id, 700));
        let from = [1, 2].map(|seed| pair.region(0, pattern(700, seed)));
        for wr_id in [10, 11] {
            pair.post(0, &send(wr_id, &from[..1]));
            pair.swap();
            pair.post(0, &send(wr_id, &from[1..]));
            pair.swap();
        }
        // Bursts are 16 packets; delaying each by its number makes the queue pairs alternate.
        pair.run_with(|number, _| Fate::Delay(number % 3 * usize::from(transport == Transport::Rc)));
        let mut done: Vec<_> = pair.nodes[1].completions.iter().map(|(_, done)| *done).collect();
        done.sort_by_key(|done| done.wr_id);
        assert_eq!(done.len(), 4, "{transport:?}");
        let first = pair.nodes[1].qpn;
        for done in done {
            let seed = if done.qpn == first { 1 } else { 2 };
            assert_eq!((done.status, done.byte_len), (Status::Success, 700));
            assert_eq!(pair.bytes(1, into[done.wr_id as usize]), pattern(700, seed), "{done:?}");
        }
        assert_eq!(pair.completed(0, SEND_CQ).len(), 4);
    }
}

/// Packets alternate between the queue pairs: the one that began first holds the first receive.
#[test]
fn a_message_holds_its_receive() {
    let mut pair = connected(Transport::Rc);
    let into = [0, 1].map(|wr_id| receive(&mut pair, wr_id, 600));
    let from = [1, 2].map(|seed| pair.region(0, pattern(600, seed)));
    pair.post(0, &send(1, &from[..1]));
    let mut packets: Vec<_> = std::iter::from_fn(|| pair.transmit_one(0)).collect();
    pair.swap();
    pair.post(0, &send(2, &from[1..]));
    let others: Vec<_> = std::iter::from_fn(|| pair.transmit_one(0)).collect();
    packets = packets
        .into_iter()
        .zip(others)
        .flat_map(|(one, other)| [one, other])
        .collect();
    assert_eq!(packets.len(), 6);
    for packet in &packets[..4] {
        pair.deliver(packet);
    }
    assert!(pair.nodes[1].completions.is_empty());
    pair.deliver(&packets[5]);
    pair.deliver(&packets[4]);
    assert_eq!(pair.completed(1, RECV_CQ), success([1, 0]));
    assert_eq!(pair.bytes(1, into[0]), pattern(600, 1));
    assert_eq!(pair.bytes(1, into[1]), pattern(600, 2));
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ).len(), 2);
}

#[test]
fn datagrams_and_immediates() {
    let mut pair = connected(Transport::Ud);
    let from = pair.region(0, pattern(100, 1));
    for wr_id in 0..4 {
        let into = receive(&mut pair, wr_id, 140);
        let to = pair.destination(0);
        pair.post_datagram(0, &send(wr_id, &[from]), &to);
        pair.run();
        let (_, done) = pair.nodes[1].completions.pop().unwrap();
        assert_eq!((done.wr_id, done.qpn, done.byte_len), (wr_id, pair.nodes[1].qpn, 140));
        assert_eq!(pair.bytes(1, into)[40..], pattern(100, 1));
        pair.swap();
    }
    for transport in [Transport::Rc, Transport::Uc] {
        let mut pair = connected(transport);
        let from = pair.region(0, pattern(600, 1));
        let target = pair.region(1, vec![0; 600]);
        for wr_id in 0..4 {
            receive(&mut pair, wr_id, 0);
            // A WRITE without immediate data consumes none.
            pair.post(0, &request(wr_id, write_operation(target, None), &[from]));
            pair.post(0, &request(wr_id, write_operation(target, Some(9)), &[from]));
            pair.run();
            let (_, done) = pair.nodes[1].completions.pop().unwrap();
            assert_eq!((done.wr_id, receive_of(&done).1), (wr_id, 600));
            assert!(pair.nodes[1].completions.is_empty());
            pair.swap();
        }
    }
}

/// Without a receive RC sends an RNR NAK, and a receive posted then serves the retry.
#[test]
fn empty_srq_sends_rnr_nak() {
    let mut pair = connected(Transport::Rc);
    let from = pair.region(0, pattern(300, 1));
    pair.post(0, &send(1, &[from]));
    pair.exchange(&mut |_, _| Fate::Deliver);
    assert!(
        matches!(pair.syndromes(1)[..], [Syndrome::RnrNak(_)]),
        "{:?}",
        pair.syndromes(1)
    );
    assert!(pair.nodes[1].completions.is_empty());
    let into = receive(&mut pair, 7, 300);
    pair.run();
    assert_eq!(pair.completed(1, RECV_CQ), success([7]));
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
    assert_eq!(pair.bytes(1, into), pattern(300, 1));
}

/// The last slot of the queue is freed when a message takes its receive, not when that completes.
#[test]
fn posting_is_bounded_and_independent_of_qp_state() {
    let mut pair = Pair::connected(setup(Transport::Rc));
    let node = &mut pair.nodes[1];
    let srq = node.srq.unwrap();
    // The queue pair's state does not matter, and it accepts no receives of its own.
    let own = node
        .endpoint
        .post_receive(node.qpn, &ReceiveRequest { wr_id: 1, sges: &[] });
    assert_eq!(own, Err(PostError::Invalid));
    pair.enter(1, State::Err);
    for wr_id in 0..8 {
        receive(&mut pair, wr_id, 1);
    }
    assert_eq!(pair.receive_shared(8, &[]), Err(PostError::Full));
    assert!(
        pair.nodes[1].completions.is_empty(),
        "receives not held are not flushed"
    );
    let into = pair.region(1, vec![0; 8]);
    assert_eq!(pair.receive_shared(8, &[into; 3]), Err(PostError::Invalid));
    let node = &mut pair.nodes[1];
    assert_eq!(node.endpoint.destroy_srq(srq), Err(SrqError::InUse));
    assert!(node.endpoint.destroy_qp(node.qpn));
    assert_eq!(node.endpoint.destroy_srq(srq), Ok(()));
    assert_eq!(node.endpoint.destroy_srq(srq), Err(SrqError::Unknown));
    assert_eq!(node.endpoint.modify_srq(srq, None, Some(0)), Err(SrqError::Unknown));
    assert_eq!(node.endpoint.query_srq(srq), None);
    assert_eq!(pair.receive_shared(8, &[]), Err(PostError::UnknownQp));
}

/// The error state flushes the held receive and nothing else; the other queue pair continues.
#[test]
fn err_flushes_the_held_receive() {
    for transport in [Transport::Rc, Transport::Uc] {
        let mut pair = connected(transport);
        fill(&mut pair, 0..3, 600);
        let from = pair.region(0, pattern(600, 1));
        pair.post(0, &send(1, &[from]));
        let first = pair.transmit_one(0).unwrap();
        pair.deliver(&first);
        assert!(pair.nodes[1].completions.is_empty());
        pair.enter(1, State::Err);
        // RC retries until it fails; UC is idle at once.
        pair.run_with(drop_all);
        assert_eq!(pair.completed(1, RECV_CQ), [(0, Status::Flushed)]);
        let reached = AsyncEvent::LastWqeReached(pair.nodes[1].qpn);
        assert_eq!(pair.nodes[1].events, [reached]);
        // Once per entry into ERR.
        pair.enter(1, State::Err);
        assert_eq!(pair.nodes[1].events, [reached]);
        pair.swap();
        pair.nodes[1].completions.clear();
        pair.post(0, &send(2, &[from]));
        pair.run();
        assert_eq!(pair.completed(1, RECV_CQ), success([1]));
        pair.enter(1, State::Err);
        pair.exchange(&mut drop_all);
        assert_eq!(pair.completed(1, RECV_CQ), success([1]), "it held nothing");
        assert_eq!(
            pair.nodes[1].events,
            [reached, AsyncEvent::LastWqeReached(pair.nodes[1].qpn)]
        );
    }
}

#[test]
fn a_message_too_long_ends_its_queue_pair_only() {
    let mut pair = connected(Transport::Rc);
    receive(&mut pair, 0, 599);
    receive(&mut pair, 1, 600);
    let from = pair.region(0, pattern(600, 1));
    pair.post(0, &send(1, &[from]));
    pair.run();
    assert_eq!(pair.completed(1, RECV_CQ), [(0, Status::LocalLength)]);
    assert!(pair.syndromes(1).contains(&Syndrome::Nak(Nak::InvalidRequest)));
    assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::RemoteInvalidRequest)]);
    assert_eq!(pair.nodes[1].events, [AsyncEvent::LastWqeReached(pair.nodes[1].qpn)]);
    pair.swap();
    pair.post(0, &send(2, &[from]));
    pair.run();
    assert_eq!(pair.completed(1, RECV_CQ)[1..], success([1]));
}

#[test]
fn dropped_unreliable_message_keeps_its_receive() {
    let mut pair = connected(Transport::Uc);
    let into = [0, 1].map(|wr_id| receive(&mut pair, wr_id, 600));
    let from = [1, 2].map(|seed| pair.region(0, pattern(600, seed)));
    pair.post(0, &send(1, &from[..1]));
    pair.run_with(|number, _| if number == 1 { Fate::Drop } else { Fate::Deliver });
    assert!(pair.nodes[1].completions.is_empty());
    pair.post(0, &send(2, &from[1..]));
    pair.run();
    assert_eq!(pair.completed(1, RECV_CQ), success([0]));
    assert_eq!(pair.bytes(1, into[0]), pattern(600, 2));
}

/// Reported when fewer receives are left, and not again (IBTA vol 1, 10.2.9.5).
#[test]
fn the_limit_event_comes_once() {
    let mut pair = connected(Transport::Rc);
    let limit = AsyncEvent::SrqLimitReached(pair.nodes[1].srq.unwrap());
    let from = pair.region(0, pattern(8, 1));
    fill(&mut pair, 0..4, 8);
    assert_eq!(arm(&mut pair, 3), Ok(vec![]));
    assert_eq!(query(&pair).limit, 3);
    let mut events = Vec::new();
    for wr_id in 0..4 {
        pair.post(0, &send(wr_id, &[from]));
        pair.run();
        events.push(pair.nodes[1].events.len());
        pair.swap();
    }
    assert_eq!(events, [0, 1, 1, 1]);
    assert_eq!(pair.nodes[1].events, [limit]);
    assert_eq!(query(&pair).limit, 0);
    // Armed when fewer are queued already: at once.
    receive(&mut pair, 4, 8);
    assert_eq!(arm(&mut pair, 1), Ok(vec![]));
    assert_eq!(arm(&mut pair, 0), Ok(vec![]));
    assert_eq!(arm(&mut pair, 2), Ok(vec![limit]));
    assert_eq!(arm(&mut pair, 9), Err(SrqError::Value));
}

#[test]
fn resizing_keeps_what_is_queued() {
    let mut pair = connected(Transport::Rc);
    let srq = pair.nodes[1].srq.unwrap();
    let from = pair.region(0, pattern(8, 1));
    fill(&mut pair, 0..5, 8);
    let resize = |pair: &mut Pair, max_wr, limit| pair.nodes[1].endpoint.modify_srq(srq, Some(max_wr), limit);
    assert_eq!(resize(&mut pair, 4, None), Err(SrqError::Value));
    assert_eq!(resize(&mut pair, 6, Some(7)), Err(SrqError::Value));
    assert_eq!(
        query(&pair),
        SrqAttributes {
            max_wr: 8,
            max_sge: 2,
            limit: 0
        }
    );
    assert_eq!(resize(&mut pair, 5, Some(1)), Ok(()));
    assert_eq!(pair.receive_shared(5, &[]), Err(PostError::Full));
    assert_eq!(resize(&mut pair, 100, None), Ok(()));
    fill(&mut pair, 5..100, 8);
    assert_eq!(pair.receive_shared(100, &[]), Err(PostError::Full));
    for wr_id in 0..100 {
        pair.post(0, &send(wr_id, &[from]));
        pair.run();
        pair.swap();
    }
    assert_eq!(pair.completed(1, RECV_CQ), success(0..100));
    // Limit 1: reached with the last one.
    assert_eq!(pair.nodes[1].events, [AsyncEvent::SrqLimitReached(srq)]);
}

/// The keys of its receives are checked against its own protection domain, not the queue pairs'.
#[test]
fn srq_protection_domain_is_checked() {
    for transport in [Transport::Rc, Transport::Ud] {
        let other = PdId(PD.0 + 1);
        let mut pair = Pair::connected(Setup {
            srq: Some(SrqInit { pd: other, ..SRQ }),
            ..setup(transport)
        });
        let to = pair.destination(0);
        let from = pair.region(0, pattern(20, 1));
        let post = |pair: &mut Pair, wr_id| match transport {
            Transport::Ud => pair.post_datagram(0, &send(wr_id, &[from]), &to),
            _ => pair.post(0, &request(wr_id, Operation::Send { imm: None }, &[from])),
        };
        let theirs = pair.nodes[1].memory.register_in(other, vec![0; 60], Rights::ALL);
        pair.receive_shared(1, &[theirs]).unwrap();
        post(&mut pair, 1);
        pair.run();
        assert_eq!(pair.completed(1, RECV_CQ), success([1]));
        receive(&mut pair, 2, 60);
        post(&mut pair, 2);
        pair.run();
        assert_eq!(pair.completed(1, RECV_CQ)[1..], [(2, Status::LocalProtection)]);
    }
}

/// Reset discards the held receive; the queue remains usable, also by this queue pair.
#[test]
fn reset_drops_the_held_receive() {
    let mut pair = connected(Transport::Uc);
    fill(&mut pair, 0..2, 600);
    let from = pair.region(0, pattern(600, 1));
    pair.post(0, &send(1, &[from]));
    let first = pair.transmit_one(0).unwrap();
    pair.deliver(&first);
    pair.modify(
        1,
        &Modify {
            state: Some(State::Reset),
            ..Modify::default()
        },
    );
    assert!(pair.nodes[1].completions.is_empty() && pair.nodes[1].events.is_empty());
    pair.swap();
    pair.post(0, &send(2, &[from]));
    pair.run();
    assert_eq!(pair.completed(1, RECV_CQ), success([1]));
}
