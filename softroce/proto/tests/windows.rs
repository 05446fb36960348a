//! Memory windows and invalidation: local requests run once, in queue order, despite losses; a peer
//! accesses what is bound, while it is bound (IBTA vol 1, 10.6.7.2).

mod util;

use doorbell_roce_proto::memory::{Bind, Placement, Sge};
use doorbell_roce_proto::qp::{RemoteAccess, State};
use doorbell_roce_proto::wire::{Nak, Opcode, Syndrome, Transport};
use doorbell_roce_proto::work::{CompletionOpcode, Operation, PostError, SendRequest, Status};
use doorbell_roce_proto::{AsyncEvent, LKey, RKey};

use util::memory::Rights;
use util::{Fate, Pair, RECV_CQ, SEND_CQ, Setup, pattern, read_from, request, send, success, write_to};

const ALL: RemoteAccess = RemoteAccess {
    read: true,
    write: true,
    atomic: true,
    flush: Placement::NONE,
};

fn bind(rkey: RKey, region: Sge, access: RemoteAccess) -> Operation {
    Operation::Bind(Bind {
        rkey,
        region: region.lkey,
        addr: region.addr,
        len: region.len.into(),
        access,
        zero_based: false,
    })
}

fn through(rkey: RKey, region: Sge) -> Sge {
    Sge {
        lkey: LKey(rkey.0),
        ..region
    }
}

/// A window bound to a region without remote rights; both as the peer uses them.
fn with_window(setup: Setup, len: usize) -> (Pair, Sge, Sge, RKey) {
    let mut pair = Pair::connected(setup);
    let local = pair.region(0, pattern(len, 1));
    let region = pair.nodes[1].memory.register(pattern(len, 2), Rights::NONE);
    let rkey = pair.nodes[1].memory.window();
    pair.post(1, &request(50, bind(rkey, region, ALL), &[]));
    pair.run();
    assert_eq!(pair.completed(1, SEND_CQ), success([50]));
    (pair, local, through(rkey, region), rkey)
}

#[test]
fn a_local_request_needs_no_packet() {
    let (mut pair, _, _, rkey) = with_window(Setup::default(), 8);
    pair.post(1, &request(51, Operation::Invalidate { rkey }, &[]));
    pair.run();
    assert!(pair.log.is_empty());
    let opcodes: Vec<_> = pair.nodes[1].completions.iter().map(|(_, done)| done.opcode).collect();
    assert_eq!(
        opcodes,
        [CompletionOpcode::BindWindow, CompletionOpcode::LocalInvalidate]
    );
    assert_eq!(pair.nodes[1].memory.log, [rkey, rkey]);
}

#[test]
fn local_requests_run_once_in_order_despite_losses() {
    let packets = 12;
    for lost in 0..packets {
        let mut pair = Pair::connected(Setup::default());
        let local = pair.region(0, pattern(700, 1));
        let remote = pair.region(1, pattern(700, 2));
        let windows = [(); 3].map(|()| pair.nodes[0].memory.window());
        let inbox = pair.region(1, vec![0; 8]);
        (0..3).for_each(|wr_id| pair.receive(1, wr_id, &[inbox]));
        let word = Sge { len: 8, ..local };
        pair.post(0, &write_to(1, &[local], remote));
        pair.post(0, &request(2, bind(windows[0], local, ALL), &[]));
        pair.post(0, &send(3, &[word]));
        pair.post(0, &request(4, bind(windows[1], local, ALL), &[]));
        pair.post(0, &request(5, Operation::Invalidate { rkey: windows[0] }, &[]));
        pair.post(0, &read_from(6, &[local], remote));
        pair.post(0, &request(7, bind(windows[2], local, ALL), &[]));
        pair.post(0, &send(8, &[word]));
        pair.run_with(|number, _| if number == lost { Fate::Drop } else { Fate::Deliver });
        assert_eq!(pair.completed(0, SEND_CQ), success(1..=8), "packet {lost} lost");
        let [first, second, third] = windows;
        assert_eq!(
            pair.nodes[0].memory.log,
            [first, second, first, third],
            "packet {lost} lost"
        );
    }
}

#[test]
fn a_request_behind_it_finds_the_window_bound() {
    let mut pair = Pair::connected(Setup::default());
    let (region, rkey) = (pair.region(0, vec![0; 8]), pair.nodes[0].memory.window());
    let inbox = pair.region(1, vec![0; 8]);
    pair.receive(1, 1, &[inbox]);
    pair.post(0, &request(1, bind(rkey, region, ALL), &[]));
    pair.post(0, &send(2, &[region]));
    assert_eq!(pair.transmit_one(0).unwrap().opcode(), Opcode::RcSendOnly);
    assert_eq!(pair.nodes[0].memory.log, [rkey]);
    // It was the oldest request, so it completes without a response.
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
}

#[test]
fn a_fence_waits_for_reads() {
    for fence in [false, true] {
        let mut pair = Pair::connected(Setup::default());
        let local = pair.region(0, vec![0; 8]);
        let remote = pair.region(1, pattern(8, 2));
        let rkey = pair.nodes[0].memory.window();
        pair.post(0, &read_from(1, &[local], remote));
        let operation = bind(rkey, local, ALL);
        let fenced = SendRequest {
            fence,
            ..request(2, operation, &[])
        };
        pair.post(0, &fenced);
        let read = pair.transmit_one(0).unwrap();
        assert!(pair.transmit_one(0).is_none());
        assert_eq!(pair.nodes[0].memory.log.is_empty(), fence);
        assert_eq!(
            pair.completed(0, SEND_CQ),
            [],
            "it completes after the READ in any case"
        );
        pair.deliver(&read);
        pair.run();
        assert_eq!(pair.completed(0, SEND_CQ), success([1, 2]));
    }
}

#[test]
fn none_begins_while_the_queue_drains() {
    let mut pair = Pair::connected(Setup::default());
    let (region, rkey) = (pair.region(0, vec![0; 8]), pair.nodes[0].memory.window());
    pair.enter(0, State::Sqd);
    pair.post(0, &request(1, bind(rkey, region, ALL), &[]));
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), []);
    pair.enter(0, State::Rts);
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success([1]));
}

#[test]
fn invalid_bind_fails_in_queue_order() {
    let nothing = Operation::Invalidate { rkey: RKey(7) };
    for operation in [
        nothing,
        bind(
            RKey(7),
            Sge {
                addr: 0,
                len: 8,
                lkey: LKey(9),
            },
            ALL,
        ),
    ] {
        let mut pair = Pair::connected(Setup::default());
        let local = pair.region(0, pattern(8, 1));
        let remote = pair.region(1, pattern(8, 2));
        pair.post(0, &write_to(1, &[local], remote));
        pair.post(0, &request(2, operation, &[]));
        pair.post(0, &write_to(3, &[local], remote));
        pair.run();
        let expected = [(1, Status::Success), (2, Status::WindowBind), (3, Status::Flushed)];
        assert_eq!(pair.completed(0, SEND_CQ), expected);
        assert_eq!(pair.state(0), State::Err);
    }
}

#[test]
fn peers_reach_what_is_bound_and_no_more() {
    let (mut pair, local, remote, _) = with_window(Setup::default(), 600);
    pair.post(0, &write_to(1, &[local], remote));
    pair.post(0, &read_from(2, &[local], remote));
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), success([1, 2]));
    let past = Sge {
        addr: remote.addr + 1,
        ..remote
    };
    pair.post(0, &write_to(3, &[local], past));
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ).last(), Some(&(3, Status::RemoteAccess)));
    let qpn = pair.nodes[1].qpn;
    assert_eq!(pair.nodes[1].events.last(), Some(&AsyncEvent::QpAccessError(qpn)));
}

#[test]
fn invalidated_window_ends_the_write_through_it() {
    let (mut pair, local, remote, rkey) = with_window(Setup::default(), 256 * 4);
    let before = pattern(256 * 4, 2);
    pair.post(0, &write_to(1, &[local], remote));
    for _ in 0..2 {
        let sent = pair.transmit_one(0).unwrap();
        pair.deliver(&sent);
    }
    pair.post(1, &request(51, Operation::Invalidate { rkey }, &[]));
    while pair.transmit_one(1).is_some() {}
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::RemoteAccess)]);
    let region = pair.nodes[1].memory.region_of(0);
    assert_eq!(pair.bytes(1, region)[..512], pattern(256 * 4, 1)[..512]);
    assert_eq!(pair.bytes(1, region)[512..], before[512..]);
}

#[test]
fn send_with_invalidate_invalidates_the_key() {
    for len in [0, 1, 256, 257, 1000] {
        for fate in [Fate::Deliver, Fate::Duplicate] {
            let (mut pair, local, remote, rkey) = with_window(Setup::default(), 1000);
            let inbox = pair.region(1, vec![0; 1000]);
            pair.receive(1, 9, &[inbox]);
            let message = Sge { len, ..local };
            pair.post(0, &write_to(1, &[local], remote));
            pair.post(0, &request(2, Operation::SendInvalidate { rkey }, &[message]));
            pair.run_with(|_, _| fate);
            assert_eq!(pair.completed(0, SEND_CQ), success([1, 2]));
            let (_, received) = pair.nodes[1].completions.last().copied().unwrap();
            assert_eq!((received.wr_id, received.status), (9, Status::Success));
            assert_eq!((received.byte_len, received.invalidated), (len, Some(rkey)));
            assert_eq!(pair.bytes(1, inbox)[..len as usize], pattern(1000, 1)[..len as usize]);
            assert_eq!(pair.nodes[1].memory.log, [rkey, rkey]);
            pair.post(0, &write_to(3, &[local], remote));
            pair.run();
            assert_eq!(pair.completed(0, SEND_CQ).last(), Some(&(3, Status::RemoteAccess)));
        }
    }
}

#[test]
fn key_that_a_peer_may_not_invalidate() {
    // The key of a region, a window's former key, and an unknown one.
    for wrong in 0..3 {
        let (mut pair, local, remote, rkey) = with_window(Setup::default(), 8);
        let inbox = pair.region(1, vec![0; 8]);
        pair.receive(1, 9, &[inbox]);
        pair.receive(1, 10, &[inbox]);
        let key = [RKey(inbox.lkey.0), RKey(rkey.0 ^ 1), RKey(3)][wrong];
        pair.post(0, &request(1, Operation::SendInvalidate { rkey: key }, &[local]));
        pair.post(0, &write_to(2, &[local], remote));
        pair.run();
        let sent = [(1, Status::RemoteAccess), (2, Status::Flushed)];
        assert_eq!(pair.completed(0, SEND_CQ), sent);
        let received = [(9, Status::RemoteInvalidRequest), (10, Status::Flushed)];
        assert_eq!(pair.completed(1, RECV_CQ), received);
        assert_eq!(pair.syndromes(1), [Syndrome::Nak(Nak::RemoteAccess)]);
        assert_eq!(pair.nodes[1].events, [], "the receive has reported it");
        assert_eq!((pair.state(0), pair.state(1)), (State::Err, State::Err));
        assert_eq!(pair.nodes[1].memory.log, [rkey], "nothing was taken away");
    }
}

#[test]
fn operations_offered_by_other_transports() {
    let uc = Setup {
        transport: Transport::Uc,
        ..Setup::default()
    };
    let (mut pair, local, remote, rkey) = with_window(uc, 8);
    pair.post(0, &write_to(1, &[local], remote));
    pair.run();
    assert_eq!(pair.bytes(1, pair.nodes[1].memory.region_of(0)), pattern(8, 1));
    pair.post(1, &request(51, Operation::Invalidate { rkey }, &[]));
    pair.post(1, &send(52, &[]));
    pair.run();
    assert_eq!(pair.completed(1, SEND_CQ), success([50, 51, 52]));

    let refuse = |pair: &mut Pair, operation| {
        let (now, node) = (pair.now, &mut pair.nodes[0]);
        let posted = node.endpoint.post_send(now, node.qpn, &request(2, operation, &[]));
        assert_eq!(posted, Err(PostError::Invalid));
    };
    refuse(&mut pair, Operation::SendInvalidate { rkey });
    let mut datagrams = Pair::connected(Setup {
        transport: Transport::Ud,
        ..Setup::default()
    });
    let local = datagrams.region(0, vec![0; 8]);
    for operation in [
        bind(rkey, local, ALL),
        Operation::Invalidate { rkey },
        Operation::SendInvalidate { rkey },
    ] {
        refuse(&mut datagrams, operation);
        let to = datagrams.destination(0);
        let node = &mut datagrams.nodes[0];
        let posted = node
            .endpoint
            .post_datagram(datagrams.now, node.qpn, &request(2, operation, &[]), &to);
        assert_eq!(posted, Err(PostError::Invalid));
    }
}

#[test]
fn a_local_request_has_no_bytes() {
    let mut pair = Pair::connected(Setup::default());
    let local = pair.region(0, vec![0; 8]);
    let node = &mut pair.nodes[0];
    let operation = Operation::Invalidate { rkey: RKey(1) };
    let posted = node
        .endpoint
        .post_send(pair.now, node.qpn, &request(1, operation, &[local]));
    assert_eq!(posted, Err(PostError::Invalid));
}
