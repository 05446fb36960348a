//! Each exchange of the standard, and each with one message lost.

use doorbell_roce_proto::cm::{CmError, CmEvent, ConnectRequest, ConnectionId, RejectReason, private_data_len};
use doorbell_roce_proto::wire::Transport;
use doorbell_roce_proto::{Instant, Mtu, Psn, Qpn};

use crate::net::{Fate, Net, SERVICE, accept_all, address};

const REQ: u16 = 0x10;
const MRA: u16 = 0x11;
const REJ: u16 = 0x12;
const REP: u16 = 0x13;
const RTU: u16 = 0x14;
const DREQ: u16 = 0x15;
const DREP: u16 = 0x16;

fn connected() -> (Net, ConnectionId, ConnectionId) {
    let mut net = Net::new();
    net.cms[1].listen(SERVICE, 4).unwrap();
    let ours = net.connect(0x11);
    net.run_with(|_, _| Fate::Arrives, accept_all);
    let CmEvent::Request { id: theirs, .. } = net.events[1][0] else {
        panic!("{:?}", net.events);
    };
    net.events = [Vec::new(), Vec::new()];
    net.log.clear();
    (net, ours, theirs)
}

#[test]
fn three_messages_connect() {
    let mut net = Net::new();
    let listener = net.cms[1].listen(SERVICE, 4).unwrap();
    let ours = net.cms[0]
        .connect(
            net.now,
            &ConnectRequest {
                responder_resources: 5,
                initiator_depth: 6,
                retry_count: 3,
                rnr_retry_count: 2,
                transport: Transport::Uc,
                ..Net::request(0x11)
            },
        )
        .unwrap();
    assert_eq!(ours.get() >> 22, 5, "the slot");
    assert_eq!(net.cms[0].parameters(ours), None, "nothing is known of the peer");
    net.run_with(|_, _| Fate::Arrives, accept_all);
    assert_eq!(net.log, [(0, REQ), (1, REP), (0, RTU)]);
    let [
        CmEvent::Request {
            listener: at,
            id: theirs,
            request,
        },
        CmEvent::Established { private_data, .. },
    ] = &net.events[1][..]
    else {
        panic!("{:?}", net.events[1]);
    };
    assert_eq!(
        (*at, request.peer, request.service, request.qpn),
        (listener, address(0), SERVICE, Qpn::new(0x11))
    );
    assert_eq!(
        (request.responder_resources, request.initiator_depth),
        (6, 5),
        "from the passive side"
    );
    assert_eq!(
        (request.retry_count, request.rnr_retry_count, request.transport),
        (3, 2, Transport::Uc)
    );
    assert_eq!(request.private_data, [7; private_data_len::REQ]);
    assert!(private_data.starts_with(b"ready\0"));
    let [CmEvent::Reply { id, reply }] = &net.events[0][..] else {
        panic!("{:?}", net.events[0]);
    };
    assert_eq!((*id, reply.qpn, reply.srq), (ours, Qpn::new(0x12), true));
    assert_eq!(
        (reply.responder_resources, reply.initiator_depth, reply.rnr_retry_count),
        (4, 3, 6)
    );
    assert_eq!(reply.private_data, [8; private_data_len::REP]);

    // Each queue pair is connected to the other's, and starts with the PSN that the other expects.
    let [active, passive] = [
        net.cms[0].parameters(ours).unwrap(),
        net.cms[1].parameters(*theirs).unwrap(),
    ];
    assert_eq!((active.dest_qpn, passive.dest_qpn), (Qpn::new(0x12), Qpn::new(0x11)));
    assert_eq!((active.path.local, active.path.remote), (address(0), address(1)));
    assert_eq!((passive.path.local, passive.path.remote), (address(1), address(0)));
    assert_eq!((active.rq_psn, active.sq_psn), (passive.sq_psn, passive.rq_psn));
    assert_eq!(active.rq_psn, Psn::new(0x11 + 1000));
    assert_ne!(active.rq_psn, active.sq_psn);
    for end in [active, passive] {
        assert_eq!((end.mtu, end.transport), (Mtu::Mtu1024, Transport::Uc));
        assert_eq!(end.retry_count, 3);
    }
    assert_eq!(
        (active.rnr_retry_count, passive.rnr_retry_count),
        (6, 2),
        "each as the other wants it"
    );
    assert_eq!((active.responder_resources, active.initiator_depth), (4, 3));
    assert_eq!((passive.responder_resources, passive.initiator_depth), (3, 4));
}

#[test]
fn one_message_is_lost() {
    for lost in [REQ, REP, RTU, DREQ, DREP] {
        let mut net = Net::new();
        net.cms[1].listen(SERVICE, 4).unwrap();
        let ours = net.connect(0x11);
        let mut left = 1;
        net.run_with(
            |_, attribute| {
                if attribute == lost && left > 0 {
                    left -= 1;
                    return Fate::Lost;
                }
                Fate::Arrives
            },
            |cm, now, side, event| {
                accept_all(cm, now, side, event);
                if let CmEvent::Established { id, .. } = event {
                    cm.disconnect(now, *id, b"bye").unwrap();
                }
            },
        );
        assert_eq!(left, 0);
        let CmEvent::Request { id: theirs, .. } = net.events[1][0] else {
            panic!("{:?}", net.events);
        };
        for (side, id) in [(0, ours), (1, theirs)] {
            let [.., over, exit] = &net.events[side][..] else {
                panic!("{:?}", net.events);
            };
            assert_eq!(*over, CmEvent::Disconnected { id }, "{lost:#x}");
            assert_eq!(*exit, CmEvent::TimewaitExit { id }, "{lost:#x}");
            let now = net.now;
            net.cms[side].destroy(now, id).unwrap();
            assert_eq!(net.cms[side].connections(), 0);
        }
    }
}

#[test]
fn both_disconnect_at_once() {
    let (mut net, ours, theirs) = connected();
    for (side, id) in [(0, ours), (1, theirs)] {
        let now = net.now;
        net.cms[side].disconnect(now, id, b"").unwrap();
    }
    net.run();
    assert_eq!(net.sent(0), [DREQ, DREP]);
    for (side, id) in [(0, ours), (1, theirs)] {
        assert_eq!(
            net.events[side],
            [CmEvent::Disconnected { id }, CmEvent::TimewaitExit { id }]
        );
        let now = net.now;
        assert_eq!(
            net.cms[side].disconnect(now, id, b""),
            Err(CmError::State),
            "nothing is left of it"
        );
    }
}

/// The peer gets a DREQ, the owner no events; the connection is removed at the DREP.
#[test]
fn a_connection_is_destroyed() {
    let (mut net, ours, theirs) = connected();
    let now = net.now;
    net.cms[0].destroy(now, ours).unwrap();
    assert_eq!(net.cms[0].destroy(now, ours), Err(CmError::Unknown));
    assert_eq!(net.cms[0].parameters(ours), None);
    net.run();
    assert_eq!(net.log, [(0, DREQ), (1, DREP)]);
    assert_eq!(net.events[0], []);
    assert_eq!(
        net.events[1],
        [
            CmEvent::Disconnected { id: theirs },
            CmEvent::TimewaitExit { id: theirs }
        ]
    );
    assert_eq!((net.cms[0].connections(), net.cms[1].connections()), (0, 1));
}

#[test]
fn rejected_by_either() {
    // The listener's owner rejects: explicitly, or by destroying the connection.
    for says_so in [true, false] {
        let mut net = Net::new();
        net.cms[1].listen(SERVICE, 4).unwrap();
        let ours = net.connect(0x11);
        net.run_with(
            |_, _| Fate::Arrives,
            |cm, now, _, event| {
                if let CmEvent::Request { id, .. } = event {
                    if says_so {
                        cm.reject(now, *id, RejectReason::CONSUMER, b"not today").unwrap();
                        assert_eq!(cm.accept(now, *id, &Net::accept(1)), Err(CmError::State));
                    }
                    cm.destroy(now, *id).unwrap();
                }
            },
        );
        let [
            CmEvent::Rejected {
                id,
                reason,
                private_data,
            },
        ] = &net.events[0][..]
        else {
            panic!("{:?}", net.events[0]);
        };
        assert_eq!((*id, *reason), (ours, RejectReason::CONSUMER));
        assert_eq!(private_data.starts_with(b"not today\0"), says_so);
        assert_eq!(net.cms[1].connections(), 0);
    }
    let mut net = Net::new();
    net.cms[1].listen(SERVICE, 4).unwrap();
    net.connect(0x11);
    net.run_with(
        |_, _| Fate::Arrives,
        |cm, now, side, event| match event {
            CmEvent::Reply { id, .. } => cm.reject(now, *id, RejectReason::CONSUMER, b"").unwrap(),
            other => accept_all(cm, now, side, other),
        },
    );
    assert_eq!(net.log, [(0, REQ), (1, REP), (0, REJ)]);
    assert!(matches!(
        net.events[1][1],
        CmEvent::Rejected {
            reason: RejectReason::CONSUMER,
            ..
        }
    ));
}

#[test]
fn refused_without_an_owner() {
    let reason = |change: &dyn Fn(&mut ConnectRequest)| {
        let mut net = Net::new();
        net.cms[1].listen(SERVICE, 4).unwrap();
        let mut request = Net::request(0x11);
        change(&mut request);
        net.cms[0].connect(net.now, &request).unwrap();
        net.run_with(|_, _| Fate::Arrives, accept_all);
        match net.events[0].last() {
            Some(CmEvent::Rejected { reason, .. }) => Some(*reason),
            _ => None,
        }
    };
    assert_eq!(reason(&|_| {}), None);
    assert_eq!(
        reason(&|request| request.service.0 += 1),
        Some(RejectReason::INVALID_SERVICE_ID)
    );
    assert_eq!(
        reason(&|request| request.mtu = Mtu::Mtu2048),
        Some(RejectReason::INVALID_MTU)
    );
    let mut net = Net::new();
    let ud = ConnectRequest {
        transport: Transport::Ud,
        ..Net::request(0x11)
    };
    assert_eq!(net.cms[0].connect(net.now, &ud), Err(CmError::Transport));
    let long = ConnectRequest {
        private_data: vec![0; 93],
        ..Net::request(0x11)
    };
    assert_eq!(
        net.cms[0].connect(net.now, &long),
        Err(CmError::PrivateData { len: 93, max: 92 })
    );
}

/// A retransmitted REQ is answered with an MRA, which extends the peer's timeout.
#[test]
fn mra_extends_the_timeout() {
    let mut net = Net::new();
    net.cms[1].listen(SERVICE, 4).unwrap();
    net.connect(0x11);
    let mut fate = |_: usize, _: u16| Fate::Arrives;
    while !net.log.contains(&(1, MRA)) {
        net.collect(&mut fate);
        assert!(net.step());
        net.collect(&mut fate);
    }
    assert!(net.step());
    let sent = net.sent(0).len();
    // Far longer than all retries: the MRA has extended the timeout by more than a minute.
    net.now = Instant(net.now.0 + 60_000_000_000);
    net.cms[0].handle_timeout(net.now);
    net.collect(&mut fate);
    assert_eq!(net.sent(0).len(), sent, "it waits");
    let CmEvent::Request { id, .. } = net.events[1][0] else {
        panic!("{:?}", net.events[1]);
    };
    let now = net.now;
    net.cms[1].accept(now, id, &Net::accept(0x12)).unwrap();
    net.run_with(
        |_, _| Fate::Arrives,
        |cm, now, side, event| {
            if side == 0 {
                accept_all(cm, now, side, event);
            }
        },
    );
    assert!(matches!(net.events[1][..], [_, CmEvent::Established { .. }]));
}

#[test]
fn notify_establishes_without_rtu() {
    let mut net = Net::new();
    net.cms[1].listen(SERVICE, 4).unwrap();
    net.connect(0x11);
    net.run_with(
        |_, attribute| if attribute == RTU { Fate::Lost } else { Fate::Arrives },
        |cm, now, side, event| {
            accept_all(cm, now, side, event);
            if let CmEvent::Request { id, .. } = event {
                cm.notify(*id).unwrap();
            }
        },
    );
    assert!(matches!(
        net.events[1][..],
        [CmEvent::Request { .. }, CmEvent::Established { .. }]
    ));
    assert!(matches!(net.events[0][..], [CmEvent::Reply { .. }]));
}

#[test]
fn unanswered_request_is_retried_then_unreachable() {
    let mut net = Net::new();
    let id = net.connect(0x11);
    net.run_with(|_, _| Fate::Lost, |_, _, _, _| {});
    // All retries, then a REJ (timeout).
    assert_eq!(net.sent(0), [vec![REQ; 16], vec![REJ]].concat());
    assert_eq!(net.events[0], [CmEvent::Unreachable { id }]);
}

/// A restarted peer reuses its queue pair: it is rejected, and the old connection ends.
#[test]
fn a_stale_connection() {
    let (mut net, _, theirs) = connected();
    let again = net.connect(0x11);
    net.run_with(|_, _| Fate::Arrives, accept_all);
    let refused = net.events[0].iter().find_map(|event| match event {
        CmEvent::Rejected { id, reason, .. } => Some((*id, *reason)),
        _ => None,
    });
    assert_eq!(refused, Some((again, RejectReason::STALE_CONNECTION)));
    assert_eq!(
        net.events[1],
        [
            CmEvent::Disconnected { id: theirs },
            CmEvent::TimewaitExit { id: theirs }
        ]
    );
    net.connect(0x11);
    net.run_with(|_, _| Fate::Arrives, accept_all);
    assert!(
        matches!(
            net.events[1][..],
            [.., CmEvent::Request { .. }, CmEvent::Established { .. }]
        ),
        "once it is over"
    );
}

/// A process at the peer's address is gone: its connections end, and no others.
#[test]
fn peer_process_gone() {
    let (mut net, ours, theirs) = connected();
    let now = net.now;
    net.cms[0].handle_peer_gone(now, address(1), 7);
    net.cms[0].handle_peer_gone(now, address(0), 6);
    net.run();
    assert_eq!(net.events[0], []);
    net.cms[0].handle_peer_gone(now, address(1), 6);
    net.run();
    let over = [CmEvent::Disconnected { id: ours }, CmEvent::TimewaitExit { id: ours }];
    assert_eq!(
        (net.events[0].as_slice(), net.events[1].as_slice()),
        (over.as_slice(), [].as_slice())
    );
    // Its successor does not know the connection.
    let now = net.now;
    net.cms[1].destroy(now, theirs).unwrap();
    net.run();
    assert_eq!(net.log, [(1, DREQ), (0, DREP)]);
}

/// A full backlog drops requests, and accepts retransmissions when it has free slots.
#[test]
fn a_full_backlog() {
    let mut net = Net::new();
    net.cms[1].listen(SERVICE, 1).unwrap();
    net.connect(0x11);
    net.connect(0x21);
    let mut fate = |_: usize, _: u16| Fate::Arrives;
    for _ in 0..8 {
        net.collect(&mut fate);
        net.step();
    }
    net.collect(&mut fate);
    assert_eq!(net.events[1].len(), 1);
    assert_ne!(net.cms[1].dropped(), 0);
    net.run_with(fate, accept_all);
    let established = net.events[1]
        .iter()
        .filter(|event| matches!(event, CmEvent::Established { .. }));
    assert_eq!(established.count(), 2);
}
