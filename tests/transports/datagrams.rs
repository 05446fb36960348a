//! UD: datagrams by address handles.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread;

use doorbell_verbs::cm::{CmError, ConnectionManager, Rejection};
use doorbell_verbs::{
    AddressHandleError, Buffer, CompletionStatus, Datagram, GRH_BYTES, Gid, Lid, Local, QKey, QpState, Qpn, QueueKind,
    QueuePairError, RejectReason, Success,
};

use crate::{Side, TIMEOUT, is_soft};

/// Buffer size for a datagram of the maximum length.
const ROOM: usize = 4096 + GRH_BYTES;

fn receive(side: &mut Side) -> (Datagram, Buffer) {
    side.next(QueueKind::Receive, |completion| {
        let datagram = completion.datagram().expect("a datagram");
        let len = datagram.len() + GRH_BYTES;
        let imm = datagram.imm();
        assert_eq!(
            completion.result(),
            Ok(Success::Receive { len: len as u32, imm }),
            "the completion's length has the header in it"
        );
        (datagram, completion.take::<Local>().unwrap())
    })
}

#[test]
fn a_datagram_is_answered_by_the_address_in_its_completion() {
    let (mut a, mut b) = (Side::new(0), Side::new(1));
    let (mut sender, mut responder) = (a.builder().ud().unwrap(), b.builder().ud().unwrap());
    let there = responder.endpoint();
    assert_eq!(there.qkey, QKey::DEFAULT);
    let ah = a.pd.address_handle().to(&there).unwrap();
    for round in 0..50_u32 {
        let len = (round as usize * 83) % (sender.max_datagram() as usize + 1);
        responder.receive(b.buffer(ROOM)).unwrap();
        sender.receive(a.buffer(ROOM)).unwrap();
        let mut question = a.buffer(ROOM);
        for (at, byte) in question.iter_mut().enumerate() {
            *byte = (at as u32 ^ round) as u8;
        }
        let expected = question[..len].to_vec();
        let part = question.part(..len);
        sender
            .post(|batch| {
                batch.send_to(part, &ah, there.qpn, there.qkey).imm(round).signaled();
            })
            .unwrap();

        let (datagram, received) = receive(&mut b);
        assert_eq!((datagram.source(), datagram.imm()), (sender.qpn(), Some(round)));
        assert!(datagram.has_grh());
        assert_eq!(received[datagram.payload()], expected);
        let back = b.pd.address_handle().reply_to(&datagram, &received).unwrap();
        let echo = received.part(datagram.payload());
        responder.send_to(echo, &back, datagram.source(), there.qkey).unwrap();
        // The send may still be in flight.
        drop(back);

        let (answer, received) = receive(&mut a);
        assert_eq!((answer.source(), answer.imm()), (there.qpn, None));
        assert_eq!(received[answer.payload()], expected);
    }
}

#[test]
fn one_queue_pair_talks_to_many() {
    let (a, mut b) = (Side::new(0), Side::new(1));
    let mut hub = a.builder().ud().unwrap();
    let mut others: Vec<_> = (0..2).map(|_| b.builder().qkey(QKey(0x77)).ud().unwrap()).collect();
    // One handle: all are on one port.
    let ah = a.pd.address_handle().to_gid(others[0].endpoint().gid).unwrap();
    for other in &mut others {
        other.receive(b.buffer(ROOM)).unwrap();
    }
    let greeting = *b"to the second";
    let (head, tail) = (a.buffer(4), a.buffer(8));
    hub.post(|batch| {
        batch.send_to_inline(&greeting, &ah, others[1].qpn(), QKey(0x77));
        batch
            .send_to_gather([head, tail], &ah, others[0].qpn(), QKey(0x77))
            .signaled();
    })
    .unwrap_err();
    // Two SGEs in one request were not configured. Now with one.
    hub.send_to_inline(&greeting, &ah, others[1].qpn(), QKey(0x77)).unwrap();
    let (datagram, received) = receive(&mut b);
    assert_eq!(datagram.source(), hub.qpn());
    assert_eq!(received[datagram.payload()], greeting);
    // Wrong Q_Key: dropped silently. The next with the right one arrives.
    hub.send_to_inline(b"wrong", &ah, others[0].qpn(), QKey(0x78)).unwrap();
    hub.send_to_inline(b"right", &ah, others[0].qpn(), QKey(0x77)).unwrap();
    let (datagram, received) = receive(&mut b);
    assert_eq!(&received[datagram.payload()], b"right");
}

#[test]
fn an_invalid_datagram_is_refused_before_it_is_posted() {
    let (a, b) = (Side::new(0), Side::new(1));
    let mut qp = a.builder().mtu(doorbell_verbs::Mtu::B256).ud().unwrap();
    let there = b.builder().ud().unwrap().endpoint();
    let ah = a.pd.address_handle().to(&there).unwrap();
    assert_eq!(qp.max_datagram(), 256);

    let refused = qp.send_to(a.buffer(257), &ah, there.qpn, there.qkey).unwrap_err();
    assert!(matches!(
        refused.reason,
        RejectReason::DatagramTooLong { len: 257, max: 256 }
    ));
    assert_eq!(
        refused.to_string(),
        format!(
            "send queue of queue pair {}: request 0 of the batch was rejected: 257 bytes in one datagram, the MTU here or at its destination is 256: send several",
            qp.qpn()
        )
    );

    let refused = qp.receive(a.buffer(GRH_BYTES - 1)).unwrap_err();
    assert!(matches!(refused.reason, RejectReason::NoRoomForHeader { len: 39 }));
    assert_eq!(refused.buffers.len(), 1, "the buffer comes back");
    qp.receive(a.buffer(GRH_BYTES)).unwrap();
    let (room, short) = (a.buffer(ROOM), a.buffer(8));
    let refused = qp
        .post_receives(|batch| {
            batch.receive(room);
            batch.receive(short);
        })
        .unwrap_err();
    assert_eq!((refused.index, refused.buffers.len()), (1, 2));

    let other = a.context.protection_domain().unwrap();
    let foreign = other.address_handle().to(&there).unwrap();
    let refused = qp.send_to(a.buffer(8), &foreign, there.qpn, there.qkey).unwrap_err();
    assert!(matches!(refused.reason, RejectReason::ForeignAddressHandle));
}

#[test]
fn an_address_handle_error_has_a_reason() {
    let side = Side::new(0);
    let endpoint = side.builder().ud().unwrap().endpoint();
    let builder = || side.pd.address_handle();
    let six = doorbell_verbs::Gid::from("2001:db8::1".parse::<std::net::IpAddr>().unwrap());
    let error = builder().to_gid(six).unwrap_err();
    assert!(
        matches!(
            error,
            AddressHandleError::Create {
                verb: "ibv_create_ah",
                ..
            }
        ),
        "{error}"
    );
    assert!(
        error.to_string().contains("port 1, 2001:db8::1 from ::ffff:"),
        "{error}"
    );
    assert!(matches!(
        builder().service_level(16).to(&endpoint),
        Err(AddressHandleError::ServiceLevel { level: 16 })
    ));
    assert!(matches!(
        builder().port(2).to(&endpoint),
        Err(AddressHandleError::Device(_))
    ));
    assert!(matches!(
        builder().gid_index(9).to(&endpoint),
        Err(AddressHandleError::Device(_))
    ));
}

#[test]
fn a_short_buffer_holds_no_header() {
    let (a, mut b) = (Side::new(0), Side::new(1));
    let mut from = a.builder().ud().unwrap();
    let mut to = b.builder().max_recv_sge(2).ud().unwrap();
    let there = to.endpoint();
    let buffers = [b.buffer(16), b.buffer(64)];
    to.post_receives(|batch| batch.receive_scatter(buffers)).unwrap();
    let ah = a.pd.address_handle().to(&there).unwrap();
    from.send_to_inline(b"scattered", &ah, there.qpn, there.qkey).unwrap();
    let (datagram, first, second) = b.next(QueueKind::Receive, |completion| {
        let mut take = || completion.take::<Local>().unwrap();
        let (first, second) = (take(), take());
        (completion.datagram().unwrap(), first, second)
    });
    assert!(matches!(
        b.pd.address_handle().reply_to(&datagram, &first),
        Err(AddressHandleError::NoHeader { len: 16 })
    ));
    let payload = datagram.payload();
    assert_eq!(&second[payload.start - 16..payload.end - 16], b"scattered");
}

#[test]
fn a_send_that_fails_stops_sending_until_it_is_resumed() {
    let (mut a, mut b) = (Side::new(0), Side::new(1));
    let (mut from, mut to) = (a.builder().ud().unwrap(), b.builder().ud().unwrap());
    let (here, there) = (from.endpoint(), to.endpoint());
    let (ah, back) = (
        a.pd.address_handle().to(&there).unwrap(),
        b.pd.address_handle().to(&here).unwrap(),
    );
    // Memory of another protection domain: the device detects it.
    let foreign = a.context.protection_domain().unwrap();
    let foreign = foreign.register(vec![0; 8], Local).unwrap();
    from.post(|batch| {
        batch.send_to(foreign, &ah, there.qpn, there.qkey).signaled();
        batch.send_to_inline(b"flushed", &ah, there.qpn, there.qkey).signaled();
    })
    .unwrap();
    let statuses = [CompletionStatus::LocalProtection, CompletionStatus::Flushed];
    for status in statuses {
        let found = a.failed();
        if is_soft() {
            assert_eq!(found, status);
        }
    }
    if !is_soft() {
        // The kernel's rxe has no SQE: it moves to ERR (IBTA vol 1, 10.3.1.6).
        assert_eq!(from.state().unwrap(), QpState::Err);
        return;
    }
    assert_eq!(from.state().unwrap(), QpState::Sqe);
    // It still receives.
    from.receive(a.buffer(ROOM)).unwrap();
    to.send_to_inline(b"still there?", &back, here.qpn, here.qkey).unwrap();
    let (datagram, received) = receive(&mut a);
    assert_eq!(&received[datagram.payload()], b"still there?");
    from.resume().unwrap();
    to.receive(b.buffer(ROOM)).unwrap();
    from.send_to_inline(b"again", &ah, there.qpn, there.qkey).unwrap();
    let (datagram, received) = receive(&mut b);
    assert_eq!(&received[datagram.payload()], b"again");
}

#[test]
fn a_group_reaches_its_members_until_they_leave() {
    if !is_soft() {
        return;
    }
    let (a, mut b) = (Side::new(0), Side::new(1));
    let (mut sender, mut member) = (a.builder().ud().unwrap(), b.builder().ud().unwrap());
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let group = Gid::from(IpAddr::from(Ipv4Addr::new(239, 96 + high % 64, low, 1)));
    let unicast = member.attach_multicast(sender.endpoint().gid, Lid(0));
    assert!(matches!(unicast, Err(QueuePairError::Multicast { .. })), "{unicast:?}");
    member.attach_multicast(group, Lid(0)).unwrap();
    member.receive(b.buffer(ROOM)).unwrap();
    let ah = a.pd.address_handle().to_gid(group).unwrap();
    sender
        .send_to_inline(b"to all", &ah, Qpn::MULTICAST, QKey::DEFAULT)
        .unwrap();
    let (datagram, received) = receive(&mut b);
    assert_eq!(datagram.source(), sender.qpn());
    assert_eq!(&received[datagram.payload()], b"to all");
    member.detach_multicast(group, Lid(0)).unwrap();
    member.detach_multicast(group, Lid(0)).unwrap_err();
    drop(member);
    // A group takes 64: each leaves it as it is dropped.
    for _ in 0..65 {
        let mut member = b.builder().ud().unwrap();
        member.attach_multicast(group, Lid(0)).unwrap();
        drop(member);
        assert_eq!(b.cq.poll().unwrap().count(), 0);
    }
}

#[test]
fn a_service_is_resolved_to_its_queue_pair() {
    if !is_soft() {
        return;
    }
    let manager = ConnectionManager::new(&doorbell_softroce_rdmacm::API, doorbell_softroce_ibverbs::api());
    let (a, mut b) = (Side::new(0), Side::new(1));
    let other = b.builder().ud().unwrap();
    let mut server = b.builder().qkey(QKey::RDMA_UDP).ud().unwrap();
    server.receive(b.buffer(ROOM)).unwrap();
    let mut client = a.builder().qkey(QKey::RDMA_UDP).ud().unwrap();
    let address = |gid: Gid| SocketAddr::new(gid.to_ip(), 0);
    let mut listener = manager.listen_for_datagrams(address(server.endpoint().gid), 4).unwrap();
    let there = listener.local_addr().unwrap();
    let here = address(client.endpoint().gid);
    thread::scope(|scope| {
        let resolve = || manager.resolve_service(Some(here), there, b"who", TIMEOUT);
        let resolving = scope.spawn(resolve);
        let request = listener.next_request(TIMEOUT).unwrap().unwrap();
        let refused = request.answer(&other, b"").unwrap_err();
        assert!(
            matches!(refused, CmError::OtherQKey { qkey: QKey::DEFAULT }),
            "{refused}"
        );
        let rejected = resolving.join().unwrap().unwrap_err();
        let by_peer =
            |error: &CmError, reason| matches!(error, CmError::Rejected { reason: found, .. } if *found == reason);
        assert!(by_peer(&rejected, Rejection::ByPeer), "{rejected}");

        let resolving = scope.spawn(resolve);
        let request = listener.next_request(TIMEOUT).unwrap().unwrap();
        assert!(request.private_data().starts_with(b"who\0"));
        assert_eq!(request.peer_addr().map(|peer| peer.ip()), Some(here.ip()));
        request.answer(&server, b"me").unwrap();
        let service = resolving.join().unwrap().unwrap();
        assert!(service.private_data().starts_with(b"me\0"));
        assert_eq!(service.endpoint().qpn, server.qpn());
        let refused = service.address_handle(&b.pd).unwrap_err();
        assert!(matches!(refused, CmError::OtherDevice { .. }), "{refused}");
        let ah = service.address_handle(&a.pd).unwrap();
        client
            .send_to_inline(b"found", &ah, service.endpoint().qpn, service.endpoint().qkey)
            .unwrap();
        let (datagram, received) = receive(&mut b);
        assert_eq!(&received[datagram.payload()], b"found");

        drop(listener);
        let rejected = resolve().unwrap_err();
        assert!(by_peer(&rejected, Rejection::NoListener), "{rejected}");
    });
}
