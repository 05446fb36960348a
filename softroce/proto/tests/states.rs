//! The states of a queue pair: allowed transitions, posting, flushing.

#[path = "states/tables.rs"]
mod tables;
mod util;

use doorbell_roce_proto::qp::{Modify, ModifyError, Path, RemoteAccess, State};
use doorbell_roce_proto::wire::Transport;
use doorbell_roce_proto::work::{Operation, Payload, PostError, ReceiveRequest, SendRequest, Status};
use doorbell_roce_proto::{AsyncEvent, Endpoint, Mtu, Psn, Qpn};

use tables::{RC, Row, STATES, UC, UD};
use util::{Fate, Pair, QKEY, RECV_CQ, SEND_CQ, Setup, pattern, read_from, send, write_to};

/// The bits of `enum ibv_qp_attr_mask` and a modify that has each.
fn attributes(pair: &Pair) -> Vec<(u32, Modify)> {
    let full = Modify {
        pkey_index: Some(0),
        port: Some(1),
        access: Some(RemoteAccess::default()),
        sqd_async_notify: Some(true),
        ..pair.rtr_modify(0)
    };
    let none = Modify::default();
    let rts = pair.rts_modify(0);
    vec![
        (
            1 << 2,
            Modify {
                sqd_async_notify: Some(true),
                ..none
            },
        ),
        (
            1 << 3,
            Modify {
                access: full.access,
                ..none
            },
        ),
        (
            1 << 4,
            Modify {
                pkey_index: Some(0),
                ..none
            },
        ),
        (1 << 5, Modify { port: Some(1), ..none }),
        (
            1 << 6,
            Modify {
                qkey: Some(QKEY),
                ..none
            },
        ),
        (
            1 << 7,
            Modify {
                path: full.path,
                ..none
            },
        ),
        (
            1 << 8,
            Modify {
                path_mtu: full.path_mtu,
                ..none
            },
        ),
        (
            1 << 9,
            Modify {
                timeout: rts.timeout,
                ..none
            },
        ),
        (
            1 << 10,
            Modify {
                retry_cnt: rts.retry_cnt,
                ..none
            },
        ),
        (
            1 << 11,
            Modify {
                rnr_retry: rts.rnr_retry,
                ..none
            },
        ),
        (
            1 << 12,
            Modify {
                rq_psn: full.rq_psn,
                ..none
            },
        ),
        (
            1 << 13,
            Modify {
                max_rd_atomic: rts.max_rd_atomic,
                ..none
            },
        ),
        (
            1 << 15,
            Modify {
                min_rnr_timer: full.min_rnr_timer,
                ..none
            },
        ),
        (
            1 << 16,
            Modify {
                sq_psn: rts.sq_psn,
                ..none
            },
        ),
        (
            1 << 17,
            Modify {
                max_dest_rd_atomic: full.max_dest_rd_atomic,
                ..none
            },
        ),
        (
            1 << 20,
            Modify {
                dest_qpn: full.dest_qpn,
                ..none
            },
        ),
    ]
}

fn merge(into: &mut Modify, from: &Modify) {
    macro_rules! take {
        ($($field:ident)*) => { $(into.$field = into.$field.or(from.$field);)* };
    }
    take!(sqd_async_notify access pkey_index port path path_mtu timeout retry_cnt rnr_retry rq_psn max_rd_atomic
        min_rnr_timer sq_psn max_dest_rd_atomic dest_qpn qkey);
}

fn in_state(transport: Transport, state: State) -> Pair {
    let mut pair = Pair::connected(Setup {
        transport,
        ..Setup::default()
    });
    match state {
        State::Reset => pair.enter(0, State::Reset),
        State::Init | State::Rtr => {
            pair.enter(0, State::Reset);
            let (init, rtr) = (pair.init_modify(), pair.rtr_modify(0));
            pair.modify(0, &init);
            if state == State::Rtr {
                pair.modify(0, &rtr);
            }
        }
        State::Sqd | State::Err => pair.enter(0, state),
        State::Rts => {}
        State::Sqe => util::fail_sending(&mut pair),
    }
    pair
}

fn attempt(from: State, modify: &Modify) -> Result<(), ModifyError> {
    attempt_over(Transport::Rc, from, modify)
}

fn attempt_over(transport: Transport, from: State, modify: &Modify) -> Result<(), ModifyError> {
    let mut pair = in_state(transport, from);
    let (node, now) = (&mut pair.nodes[0], pair.now);
    let before = node.endpoint.query_qp(node.qpn).unwrap();
    let result = node.endpoint.modify_qp(now, node.qpn, modify);
    let after = node.endpoint.query_qp(node.qpn).unwrap();
    match result {
        Ok(()) => assert_eq!(after.state, modify.state.unwrap_or(from)),
        Err(_) => assert_eq!(before, after),
    }
    result
}

#[test]
fn every_transition_of_rc_with_every_attribute() {
    every_transition(Transport::Rc, &RC);
}

#[test]
fn every_transition_of_uc_with_every_attribute() {
    every_transition(Transport::Uc, &UC);
}

#[test]
fn every_transition_of_ud_with_every_attribute() {
    every_transition(Transport::Ud, &UD);
}

fn every_transition(transport: Transport, table: &[Row]) {
    let all = attributes(&Pair::connected(Setup::default()));
    let attempt = |from, modify: &Modify| attempt_over(transport, from, modify);
    // RC never enters SQE.
    let exists = |state: &State| transport != Transport::Rc || *state != State::Sqe;
    for from in STATES.into_iter().filter(exists) {
        for to in STATES {
            let base = Modify {
                state: Some(to),
                ..Modify::default()
            };
            let Some((.., required, optional)) = table.iter().find(|row| (row.0, row.1) == (from, to)) else {
                assert_eq!(attempt(from, &base), Err(ModifyError::Transition { from, to }));
                continue;
            };
            let mut least = base;
            all.iter()
                .filter(|(bit, _)| required & bit != 0)
                .for_each(|(_, modify)| merge(&mut least, modify));
            assert_eq!(attempt(from, &least), Ok(()), "{from:?} {to:?}");
            for (bit, modify) in &all {
                if required & bit != 0 {
                    let mut without = base;
                    let others = all.iter().filter(|(other, _)| required & other != 0 && other != bit);
                    others.for_each(|(_, modify)| merge(&mut without, modify));
                    assert_eq!(
                        attempt(from, &without),
                        Err(ModifyError::Missing(*bit)),
                        "{from:?} {to:?}"
                    );
                } else {
                    let mut with = least;
                    merge(&mut with, modify);
                    let expected = if optional & bit != 0 {
                        Ok(())
                    } else {
                        Err(ModifyError::NotAllowed(*bit))
                    };
                    assert_eq!(attempt(from, &with), expected, "{from:?} {to:?}");
                }
            }
        }
    }
}

#[test]
fn values_out_of_range() {
    let pair = Pair::connected(Setup::default());
    let rts = pair.rts_modify(0);
    for (bit, modify) in [
        (
            1 << 9,
            Modify {
                timeout: Some(32),
                ..rts
            },
        ),
        (
            1 << 10,
            Modify {
                retry_cnt: Some(8),
                ..rts
            },
        ),
        (
            1 << 11,
            Modify {
                rnr_retry: Some(8),
                ..rts
            },
        ),
        (
            1 << 15,
            Modify {
                min_rnr_timer: Some(32),
                ..rts
            },
        ),
    ] {
        assert_eq!(attempt(State::Rtr, &modify), Err(ModifyError::Value(bit)));
    }
    let rtr = pair.rtr_modify(0);
    let path = rtr.path.map(|path| Path {
        remote: "::1".parse().unwrap(),
        ..path
    });
    assert_eq!(
        attempt(State::Init, &Modify { path, ..rtr }),
        Err(ModifyError::Value(1 << 7))
    );
    let init = pair.init_modify();
    assert_eq!(
        attempt(State::Reset, &Modify { port: Some(2), ..init }),
        Err(ModifyError::Value(1 << 5))
    );
    assert_eq!(
        attempt(
            State::Reset,
            &Modify {
                pkey_index: Some(1),
                ..init
            }
        ),
        Err(ModifyError::Value(1 << 4))
    );
}

#[test]
fn query_gives_what_was_set() {
    let mut pair = Pair::connected(Setup {
        mtu: Mtu::Mtu1024,
        ..Setup::default()
    });
    let (local, remote) = (pair.region(0, pattern(3000, 1)), pair.region(1, vec![0; 3000]));
    pair.post(0, &write_to(1, &[local], remote));
    pair.run();
    let ours = pair.nodes[0].endpoint.query_qp(pair.nodes[0].qpn).unwrap();
    assert_eq!(ours.state, State::Rts);
    assert_eq!(ours.init, util::qp_init(false));
    assert_eq!(ours.set.path, pair.rtr_modify(0).path);
    assert_eq!(ours.set.dest_qpn, Some(pair.nodes[1].qpn));
    assert_eq!((ours.set.timeout, ours.set.path_mtu), (Some(10), Some(Mtu::Mtu1024)));
    assert_eq!(
        (ours.set.sq_psn, ours.set.rq_psn),
        (Some(Psn::new(103)), Some(Psn::new(9000)))
    );
    assert_eq!(pair.expected_psn(1), 103);
}

#[test]
fn unknown_queue_pairs() {
    let mut pair = Pair::connected(Setup::default());
    let (qpn, now) = (pair.nodes[0].qpn, pair.now);
    let endpoint = &mut pair.nodes[0].endpoint;
    assert!(endpoint.destroy_qp(qpn));
    assert!(!endpoint.destroy_qp(qpn));
    for qpn in [qpn, Qpn::new(0), Qpn::new(0xff_ffff)] {
        assert_eq!(endpoint.query_qp(qpn), None);
        assert_eq!(
            endpoint.modify_qp(now, qpn, &Modify::default()),
            Err(ModifyError::UnknownQp)
        );
        assert_eq!(endpoint.post_send(now, qpn, &send(1, &[])), Err(PostError::UnknownQp));
        assert_eq!(
            endpoint.post_receive(qpn, &ReceiveRequest { wr_id: 1, sges: &[] }),
            Err(PostError::UnknownQp)
        );
    }
    assert_eq!(endpoint.qp_count(), 0);
}

#[test]
fn requests_that_are_refused() {
    let mut pair = Pair::connected(Setup::default());
    let local = pair.region(0, pattern(8, 1));
    let huge = doorbell_roce_proto::memory::Sge { len: 1 << 30, ..local };
    let (node, now) = (&mut pair.nodes[0], pair.now);
    let mut post = |request: &SendRequest<'_>| node.endpoint.post_send(now, node.qpn, request);
    let inline = |payload| SendRequest {
        payload: Payload::Inline(payload),
        ..send(1, &[])
    };
    assert_eq!(post(&send(1, &[local; 5])), Err(PostError::Invalid));
    assert_eq!(post(&inline(&[0; 601])), Err(PostError::Invalid));
    assert_eq!(post(&send(1, &[huge, huge, local])), Err(PostError::Invalid));
    let list = [local];
    let read = read_from(1, &list, local);
    assert_eq!(
        post(&SendRequest {
            payload: Payload::Inline(&[0; 8]),
            ..read
        }),
        Err(PostError::Invalid)
    );
    let op = doorbell_roce_proto::memory::AtomicOp::FetchAdd { add: 1 };
    let Operation::Read { addr, rkey } = read.operation else {
        unreachable!("it is a READ")
    };
    let operation = Operation::Atomic { addr, rkey, op };
    let half = doorbell_roce_proto::memory::Sge { len: 4, ..local };
    assert_eq!(
        post(&util::request(1, operation, &[half, half])),
        Err(PostError::Invalid)
    );
    assert_eq!(post(&util::request(1, operation, &[half])), Err(PostError::Invalid));
    assert_eq!(post(&util::request(1, operation, &[])), Err(PostError::Invalid));
    // Refused requests take no slot: 64 fit, and not one more.
    (0..64).for_each(|_| assert_eq!(post(&inline(&[0; 600])), Ok(())));
    assert_eq!(post(&inline(&[])), Err(PostError::Full));
    let receive = |sges: &'static [_]| ReceiveRequest { wr_id: 1, sges };
    let nowhere = doorbell_roce_proto::memory::Sge {
        addr: 0,
        len: 0,
        lkey: doorbell_roce_proto::LKey(0),
    };
    let five: &'static [_] = Box::leak(Box::new([nowhere; 5]));
    assert_eq!(
        node.endpoint.post_receive(node.qpn, &receive(five)),
        Err(PostError::Invalid)
    );
    (0..64).for_each(|_| assert_eq!(node.endpoint.post_receive(node.qpn, &receive(&[])), Ok(())));
    assert_eq!(
        node.endpoint.post_receive(node.qpn, &receive(&[])),
        Err(PostError::Full)
    );
}

/// Two unsignaled WRITEs, a READ, and three receives of which one is half filled.
fn busy() -> Pair {
    let mut pair = Pair::connected(Setup::default());
    let (local, remote) = (pair.region(0, pattern(600, 1)), pair.region(1, pattern(600, 2)));
    (10..13).for_each(|wr_id| pair.receive(1, wr_id, &[remote]));
    pair.post(0, &send(1, &[local]));
    pair.post(
        0,
        &SendRequest {
            signaled: false,
            ..write_to(2, &[local], remote)
        },
    );
    pair.post(0, &read_from(3, &[local], remote));
    pair.transmit(0, &mut |_, _| Fate::Drop);
    pair.deliver(&pair.log[0].clone());
    pair
}

#[test]
fn the_error_state_flushes_in_order() {
    let mut pair = busy();
    pair.enter(0, State::Err);
    pair.enter(1, State::Err);
    pair.run();
    let flushed = |wr_ids: [u64; 3]| wr_ids.map(|wr_id| (wr_id, Status::Flushed));
    assert_eq!(pair.completed(0, SEND_CQ), flushed([1, 2, 3]));
    assert_eq!(pair.completed(1, RECV_CQ), flushed([10, 11, 12]));
    // Nothing is sent, no timer runs.
    assert_eq!(pair.log.len(), 7);
    assert_eq!(pair.nodes[0].endpoint.poll_timeout(), None);
    assert_eq!((pair.nodes[0].events.len(), pair.nodes[1].events.len()), (0, 0));
}

#[test]
fn reset_drops_requests_and_allows_reconnect() {
    let mut pair = busy();
    for at in 0..2 {
        pair.enter(at, State::Reset);
    }
    pair.run();
    assert!(pair.nodes.iter().all(|node| node.completions.is_empty()));
    assert_eq!(
        pair.nodes[0].endpoint.query_qp(pair.nodes[0].qpn).unwrap().set.path,
        None
    );
    pair.setup.psns = [5, 6];
    for at in 0..2 {
        for modify in [pair.init_modify(), pair.rtr_modify(at), pair.rts_modify(at)] {
            pair.modify(at, &modify);
        }
    }
    let (local, remote) = (pair.region(0, pattern(600, 3)), pair.region(1, pattern(600, 4)));
    pair.receive(1, 20, &[remote]);
    pair.post(0, &send(9, &[local]));
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), [(9, Status::Success)]);
    assert_eq!(pair.completed(1, RECV_CQ), [(20, Status::Success)]);
    assert_eq!(pair.bytes(1, remote), pattern(600, 3));
}

#[test]
fn qp_in_err_ignores_packets() {
    let mut pair = Pair::connected(Setup {
        retry_cnt: 1,
        ..Setup::default()
    });
    let (local, remote) = (pair.region(0, pattern(600, 1)), pair.region(1, pattern(600, 2)));
    pair.enter(1, State::Err);
    pair.post(0, &write_to(1, &[local], remote));
    pair.run();
    assert_eq!(pair.completed(0, SEND_CQ), [(1, Status::RetryExceeded)]);
    assert_eq!(pair.bytes(1, remote), pattern(600, 2));
    assert_eq!(pair.nodes[1].endpoint.counters().no_qp, 6);
}

#[test]
fn destroyed_with_work_in_flight() {
    let mut pair = busy();
    let qpn = pair.nodes[0].qpn;
    assert!(pair.nodes[0].endpoint.destroy_qp(qpn));
    assert_eq!(pair.nodes[0].endpoint.poll_timeout(), None);
    let late = util::Sent {
        from: 1,
        ..pair.log[0].clone()
    };
    pair.deliver(&late);
    pair.run();
    assert!(pair.nodes[0].completions.is_empty());
}

#[test]
fn to_itself() {
    // One endpoint, two queue pairs connected to each other at one address.
    let mut pair = Pair::connected(Setup::default());
    let address = pair.nodes[0].address;
    let mut endpoint = Endpoint::new(3);
    let qpns = [0, 1].map(|_| endpoint.create_qp(util::qp_init(false)));
    for (at, qpn) in qpns.into_iter().enumerate() {
        let mut rtr = pair.rtr_modify(at);
        rtr.dest_qpn = Some(qpns[1 - at]);
        rtr.path = rtr.path.map(|path| Path {
            local: address,
            remote: address,
            link: None,
            ..path
        });
        for modify in [pair.init_modify(), rtr, pair.rts_modify(at)] {
            endpoint.modify_qp(pair.now, qpn, &modify).unwrap();
        }
    }
    let (local, remote) = (pair.region(0, pattern(600, 1)), pair.region(0, pattern(600, 2)));
    endpoint
        .post_send(pair.now, qpns[0], &write_to(1, &[local], remote))
        .unwrap();
    let mut buf = [0; 4096 + 128];
    while let Some(transmit) = endpoint.poll_transmit(pair.now, &mut pair.nodes[0].memory, &mut buf) {
        let flow = doorbell_roce_proto::icrc::Flow::new(transmit.src, transmit.dst, 4791, 4791);
        flow.seal(0, &mut buf[..transmit.len]);
        let datagram = doorbell_roce_proto::Datagram {
            src: transmit.src,
            dst: transmit.dst,
            src_port: 4791,
            dst_port: 4791,
            ident: doorbell_roce_proto::Ident::Unknown { segment: 0 },
            traffic_class: 0,
            payload: &buf[..transmit.len],
        };
        endpoint.handle_datagram(pair.now, &datagram, &mut pair.nodes[0].memory);
    }
    let (cq, completion) = endpoint.poll_completion().unwrap();
    assert_eq!((cq, completion.wr_id, completion.status), (SEND_CQ, 1, Status::Success));
    assert_eq!(pair.bytes(0, remote), pattern(600, 1));
    assert_eq!(endpoint.poll_event(), None::<AsyncEvent>);
}
