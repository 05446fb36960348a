//! Unreliable connection: messages arrive whole and in order, or not at all (IBTA vol 1, 9.8.2).

mod util;

use doorbell_roce_proto::memory::Sge;
use doorbell_roce_proto::qp::{RemoteAccess, State};
use doorbell_roce_proto::wire::{Extension, Opcode, Transport};
use doorbell_roce_proto::work::{CompletionOpcode, Operation, PostError, Status};
use doorbell_roce_proto::{AsyncEvent, LKey};

use util::memory::Rights;
use util::{
    Fate, Pair, RECV_CQ, SEND_CQ, Setup, drop_all, fail_sending, pattern, read_from, receive_of, request, send,
    success, with_regions, write_operation, write_to,
};

const SETUP: fn() -> Setup = || Setup {
    transport: Transport::Uc,
    ..Setup::default()
};

const SIZES: [u32; 7] = [0, 1, 255, 256, 257, 768, 1000];

#[test]
fn sends_and_writes_of_every_size() {
    for v6 in [false, true] {
        let (mut pair, local, remote) = with_regions(Setup { v6, ..SETUP() }, 1000);
        let into = pair.region(1, vec![0; 1000]);
        for (wr_id, len) in (0..).zip(SIZES) {
            let part = [Sge { len, ..local }];
            for imm in [None, Some(0xd00b)] {
                pair.receive(1, wr_id, &[into]);
                pair.post(0, &request(wr_id, Operation::Send { imm }, &part));
                pair.run();
                let (_, done) = pair.nodes[1].completions.pop().unwrap();
                assert_eq!(receive_of(&done), (CompletionOpcode::Receive, len, imm));
                assert_eq!((done.src_qpn, done.grh), (pair.nodes[0].qpn, None));
                assert_eq!(
                    pair.bytes(1, into)[..len as usize],
                    pair.bytes(0, local)[..len as usize]
                );
            }
            pair.post(0, &write_to(wr_id, &part, remote));
            pair.receive(1, wr_id, &[]);
            pair.post(0, &request(wr_id, write_operation(remote, Some(7)), &part));
            pair.run();
            let (_, done) = pair.nodes[1].completions.pop().unwrap();
            assert_eq!(receive_of(&done), (CompletionOpcode::ReceiveWriteImm, len, Some(7)));
            assert_eq!(
                pair.bytes(1, remote)[..len as usize],
                pair.bytes(0, local)[..len as usize]
            );
            assert_eq!(pair.completed(0, SEND_CQ), success([wr_id; 4]));
            pair.nodes[0].completions.clear();
        }
        assert!(pair.opcodes(1).is_empty(), "nothing is acknowledged");
        assert!(pair.opcodes(0).iter().all(|opcode| opcode.transport() == Transport::Uc));
        assert!(pair.log.iter().all(|sent| !sent.packet().bth.ack_req));
        assert_eq!(pair.counters(1).out_of_sequence, 0);
        assert_eq!(pair.counters(1).dropped_messages, 0);
    }
}

#[test]
fn completes_with_its_last_packet() {
    let (mut pair, local, remote) = with_regions(SETUP(), 600);
    pair.post(0, &write_to(1, &[local], remote));
    for packet in 0..3 {
        assert!(pair.nodes[0].completions.is_empty(), "before packet {packet}");
        pair.transmit_one(0).unwrap();
    }
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
    assert_eq!(pair.nodes[0].endpoint.poll_timeout(), None, "nothing is waited for");
    pair.run_with(drop_all);
    assert_eq!(pair.log.len(), 3, "nothing is sent again");
}

/// When any packet of a SEND is lost, the message is dropped, and its receive serves the next one.
#[test]
fn a_message_that_lacks_a_packet_is_dropped() {
    for lost in 0..3 {
        let (mut pair, local, remote) = with_regions(SETUP(), 600);
        pair.receive(1, 5, &[remote]);
        pair.post(0, &send(1, &[local]));
        let second = pair.region(0, pattern(500, 9));
        pair.post(0, &request(2, Operation::Send { imm: Some(2) }, &[second]));
        pair.run_with(|number, _| if number == lost { Fate::Drop } else { Fate::Deliver });
        assert_eq!(pair.completed(0, SEND_CQ), success([1, 2]));
        let [(_, done)] = pair.nodes[1].completions[..] else {
            panic!("one message arrives: {:?}", pair.nodes[1].completions);
        };
        assert_eq!(
            (done.wr_id, receive_of(&done)),
            (5, (CompletionOpcode::Receive, 500, Some(2)))
        );
        assert_eq!(pair.bytes(1, remote)[..500], *pair.bytes(0, second));
        assert!(pair.counters(1).out_of_sequence > 0);
        assert_eq!(pair.state(1), State::Rts);
    }
}

#[test]
fn a_write_that_lacks_a_packet_does_not_complete() {
    for lost in 0..3 {
        let (mut pair, local, remote) = with_regions(SETUP(), 600);
        pair.receive(1, 5, &[]);
        pair.post(0, &request(1, write_operation(remote, Some(1)), &[local]));
        pair.run_with(|number, _| if number == lost { Fate::Drop } else { Fate::Deliver });
        assert!(pair.nodes[1].completions.is_empty());
        pair.post(0, &request(2, write_operation(remote, Some(2)), &[local]));
        pair.run();
        assert_eq!(pair.completed(1, RECV_CQ), success([5]));
        assert_eq!(pair.bytes(1, remote), pair.bytes(0, local));
    }
}

#[test]
fn no_receive_and_no_room_drop_the_message() {
    let (mut pair, local, remote) = with_regions(SETUP(), 600);
    pair.post(0, &send(1, &[local]));
    pair.run();
    assert_eq!(pair.counters(1).dropped_messages, 1);
    // Too long by its last packet.
    pair.receive(1, 5, &[Sge { len: 599, ..remote }]);
    pair.post(0, &send(2, &[local]));
    pair.run();
    assert_eq!(pair.counters(1).dropped_messages, 2);
    assert!(pair.nodes[1].completions.is_empty());
    pair.post(0, &send(3, &[Sge { len: 599, ..local }]));
    pair.run();
    assert_eq!(pair.completed(1, RECV_CQ), success([5]));
    assert_eq!(pair.completed(0, SEND_CQ), success([1, 2, 3]));
    assert!(pair.opcodes(1).is_empty());
}

#[test]
fn writes_without_a_right_change_nothing() {
    let setup = Setup {
        access: RemoteAccess {
            write: false,
            ..SETUP().access
        },
        ..SETUP()
    };
    let (mut pair, local, remote) = with_regions(setup, 600);
    let before = pair.bytes(1, remote).to_vec();
    pair.post(0, &write_to(1, &[local], remote));
    pair.run();
    assert_eq!(pair.bytes(1, remote), before);
    let (mut pair, local, _) = with_regions(SETUP(), 600);
    let closed = pair.nodes[1].memory.register(
        vec![9; 600],
        Rights {
            write: false,
            ..Rights::ALL
        },
    );
    pair.post(0, &write_to(1, &[local], closed));
    pair.run();
    assert_eq!(pair.bytes(1, closed), [9; 600]);
    assert_eq!((pair.state(1), pair.counters(1).dropped_messages), (State::Rts, 1));
    assert!(pair.opcodes(1).is_empty() && pair.nodes[1].events.is_empty());
}

#[test]
fn a_receive_that_cannot_be_written_ends_the_queue_pair() {
    let (mut pair, local, remote) = with_regions(SETUP(), 100);
    let closed = pair.nodes[1].memory.register(vec![9; 100], Rights::NONE);
    pair.receive(1, 5, &[closed]);
    pair.receive(1, 6, &[remote]);
    pair.post(0, &send(1, &[local]));
    pair.run();
    assert_eq!(
        pair.completed(1, RECV_CQ),
        [(5, Status::LocalProtection), (6, Status::Flushed)]
    );
    assert_eq!(pair.state(1), State::Err);
    assert!(pair.opcodes(1).is_empty(), "and says nothing");
}

#[test]
fn a_request_that_fails_stops_sending_only() {
    let (mut pair, local, remote) = with_regions(SETUP(), 100);
    fail_sending(&mut pair);
    pair.post(0, &send(2, &[local]));
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), [(2, Status::Flushed)]);
    pair.receive(0, 3, &[local]);
    pair.post(1, &send(4, &[remote]));
    pair.run();
    assert_eq!(pair.completed(0, RECV_CQ), success([3]));
    pair.modify(
        0,
        &doorbell_roce_proto::qp::Modify {
            state: Some(State::Rts),
            ..Default::default()
        },
    );
    pair.receive(1, 5, &[remote]);
    pair.post(0, &send(6, &[local]));
    pair.run();
    assert_eq!(pair.completed(1, RECV_CQ), success([5]));
}

#[test]
fn elements_are_checked_before_the_first_packet() {
    let (mut pair, local, _) = with_regions(SETUP(), 600);
    let nowhere = Sge { lkey: LKey(0), ..local };
    pair.post(0, &send(1, &[local, nowhere]));
    pair.run();
    assert!(pair.log.is_empty());
    assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::LocalProtection)]);
}

#[test]
fn only_what_uc_offers() {
    let (mut pair, local, remote) = with_regions(SETUP(), 8);
    let (now, to) = (pair.now, pair.destination(0));
    let node = &mut pair.nodes[0];
    let read = node.endpoint.post_send(now, node.qpn, &read_from(1, &[local], remote));
    assert_eq!(read, Err(PostError::Invalid));
    let datagram = node.endpoint.post_datagram(now, node.qpn, &send(1, &[local]), &to);
    assert_eq!(datagram, Err(PostError::Invalid));
    // Packets of another transport are refused.
    pair.receive(1, 5, &[remote]);
    pair.forge(1, Opcode::RcSendOnly, pair.setup.psns[0], &Extension::Bare, &[1; 8]);
    assert!(pair.nodes[1].completions.is_empty());
    assert_eq!(pair.counters(1).malformed, 1);
    pair.forge(1, Opcode::UcSendOnly, pair.setup.psns[0], &Extension::Bare, &[1; 8]);
    assert_eq!(pair.completed(1, RECV_CQ), success([5]));
}

#[test]
fn draining_lets_a_message_end() {
    let (mut pair, local, remote) = with_regions(SETUP(), 600);
    pair.post(0, &write_to(1, &[local], remote));
    pair.post(0, &write_to(2, &[local], remote));
    pair.transmit_one(0).unwrap();
    pair.enter(0, State::Sqd);
    assert!(pair.nodes[0].events.is_empty());
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
    assert_eq!(pair.nodes[0].events, [AsyncEvent::SendQueueDrained(pair.nodes[0].qpn)]);
    pair.enter(0, State::Rts);
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success([1, 2]));
}

/// A first message in RTR is reported, responses are not.
#[test]
fn established_in_rtr() {
    let mut pair = Pair::in_rtr(SETUP());
    pair.enter_rts(0);
    let (local, remote) = (pair.region(0, pattern(10, 1)), pair.region(1, vec![0; 10]));
    pair.receive(1, 5, &[remote]);
    pair.post(0, &send(1, &[local]));
    pair.run();
    assert_eq!(
        pair.nodes[1].events,
        [AsyncEvent::CommunicationEstablished(pair.nodes[1].qpn)]
    );
    assert_eq!(pair.bytes(1, remote), pair.bytes(0, local));
}
