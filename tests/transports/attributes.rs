//! Attributes of queue pairs in use, and the SQD state, in which most can be modified.

use doorbell_verbs::{
    AsyncEvent, Events, Local, PathMigration, PeerRead, QKey, QpState, Qpn, QueueKind, QueuePairError, QueuePairEvent,
    RemoteRights, Success, TransportKind,
};

use crate::{Side, TIMEOUT, connect, is_soft};

fn expect_drained(events: &mut Events, qpn: Qpn) {
    let event = QueuePairEvent::SendQueueDrained;
    assert_eq!(events.wait(TIMEOUT).unwrap(), Some(AsyncEvent::Qp { qpn, event }));
}

#[test]
fn a_drained_queue_pair_is_modified_and_resumes() {
    let (mut a, b) = (Side::new(0), Side::new(1));
    let (mut to_b, _to_a) = connect(&a, &b, |builder| builder.allow_remote_read().rc());
    let mut events = a.context.events().unwrap();
    let log = b.pd.register(vec![7; 64], PeerRead).unwrap();

    let error = to_b.modify().timeout(20).apply().unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("RTS to RTS does not allow IBV_QP_TIMEOUT; SQD to SQD does: drain() first"),
        "{error}"
    );
    to_b.drain().unwrap();
    expect_drained(&mut events, to_b.qpn());
    let attr = to_b.query().unwrap();
    assert_eq!((attr.state, attr.draining), (QpState::Sqd, false));

    // A request posted now waits.
    to_b.read(a.buffer(64), log.remote()).unwrap();
    to_b.modify()
        .timeout(20)
        .retry_count(3)
        .rnr_retry(2)
        .max_rd_atomic(2)
        .apply()
        .unwrap();
    let mut path = to_b.query().unwrap().connection.unwrap().path;
    if let Some(global) = &mut path.global {
        (global.hop_limit, global.traffic_class) = (9, 32);
    }
    to_b.modify().path(path).apply().unwrap();
    assert!(a.cq.poll().unwrap().next().is_none(), "nothing is sent in SQD");
    to_b.resume().unwrap();
    let attr = to_b.query().unwrap();
    let reliable = attr.connection.unwrap().reliable.unwrap();
    assert_eq!(attr.state, QpState::Rts);
    assert_eq!((reliable.timeout, reliable.retry_count, reliable.rnr_retry), (20, 3, 2));
    let now = attr.connection.unwrap().path;
    if is_soft() {
        assert_eq!(now, path);
    }
    // The kernel takes the hop limit of RoCE from the route.
    assert_eq!(now.global.unwrap().traffic_class, 32);

    to_b.modify()
        .min_rnr_timer(20)
        .rights(RemoteRights {
            read: true,
            ..RemoteRights::default()
        })
        .apply()
        .unwrap();
    let attr = to_b.query().unwrap();
    assert_eq!(attr.connection.unwrap().reliable.unwrap().min_rnr_timer, 20);
    assert_eq!(
        attr.rights,
        RemoteRights {
            read: true,
            ..RemoteRights::default()
        }
    );

    to_b.read(a.buffer(64), log.remote()).unwrap();
    to_b.flush().unwrap();
    let error = to_b.resume().unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("an RC queue pair cannot go from ERR to RTS, only to RESET"),
        "{error}"
    );
}

#[test]
fn a_read_posted_while_drained_is_done_after() {
    let (mut a, b) = (Side::new(0), Side::new(1));
    let (mut to_b, _to_a) = connect(&a, &b, |builder| builder.allow_remote_read().signal_all().rc());
    let log = b.pd.register(vec![7; 64], PeerRead).unwrap();
    let mut events = a.context.events().unwrap();
    to_b.drain().unwrap();
    expect_drained(&mut events, to_b.qpn());
    to_b.read(a.buffer(64), log.remote()).unwrap();
    to_b.resume().unwrap();
    if !is_soft() {
        // The kernel's rxe processes its send queue only on a post, not on the transition to RTS.
        to_b.write_inline(
            &[],
            doorbell_verbs::Remote::<doorbell_verbs::WriteAccess>::from_raw(0, 0, 0),
        )
        .unwrap();
    }
    a.next(QueueKind::Send, |completion| {
        assert_eq!(completion.result(), Ok(Success::Read));
        assert_eq!(*completion.take::<Local>().unwrap(), [7; 64]);
    });
}

#[test]
fn values_out_of_range_are_refused_locally() {
    let (a, b) = (Side::new(0), Side::new(1));
    let (mut qp, _other) = connect(&a, &b, |builder| builder.rc());
    let error = qp.modify().min_rnr_timer(32).apply().unwrap_err();
    assert!(matches!(
        error,
        QueuePairError::Range {
            what: "min_rnr_timer",
            requested: 32,
            max: 31,
            ..
        }
    ));
    assert!(
        error.to_string().ends_with(": min_rnr_timer 32 is beyond 31"),
        "{error}"
    );
    let path = qp.query().unwrap().connection.unwrap().path;
    let error = qp
        .modify()
        .alternate_path(path, 0, 14)
        .migration(PathMigration::Rearm)
        .apply();
    assert!(
        matches!(error, Err(QueuePairError::Modify { .. })),
        "a soft device has no alternate paths"
    );
}

#[test]
fn uc_and_ud_drain() {
    let (a, b) = (Side::new(0), Side::new(1));
    let mut events = a.context.events().unwrap();
    let (mut uc, _other) = connect(&a, &b, |builder| builder.allow_remote_write().uc());
    let mut ud = a.builder().ud().unwrap();
    uc.drain().unwrap();
    expect_drained(&mut events, uc.qpn());
    ud.drain().unwrap();
    expect_drained(&mut events, ud.qpn());
    uc.modify().rights(RemoteRights::default()).apply().unwrap();
    let all = RemoteRights {
        read: true,
        ..RemoteRights::default()
    };
    let error = uc.modify().rights(all).apply().unwrap_err().to_string();
    assert!(
        error.starts_with("a UC queue pair has no use for rights to READ"),
        "{error}"
    );
    ud.modify().qkey(QKey(0x55)).apply().unwrap();
    assert_eq!(ud.endpoint().qkey, QKey(0x55));
    assert_eq!(ud.query().unwrap().qkey, Some(QKey(0x55)));
    for state in [uc.state().unwrap(), ud.state().unwrap()] {
        assert_eq!(state, QpState::Sqd);
    }
    uc.resume().unwrap();
    ud.resume().unwrap();
    assert_eq!(ud.query().unwrap().state, QpState::Rts);
    let attr = uc.query().unwrap();
    assert_eq!((attr.transport, attr.state), (TransportKind::Uc, QpState::Rts));
    assert!(attr.connection.unwrap().reliable.is_none(), "UC has no retries");
}

#[test]
fn a_query_shows_everything() {
    let (a, b) = (Side::new(0), Side::new(1));
    let set = |builder: doorbell_verbs::QueuePairBuilder<'_>| {
        let psn = doorbell_verbs::Psn::truncated(0x123);
        builder.psn(psn).allow_remote_read().allow_remote_write().rc()
    };
    let (qp, _other) = connect(&a, &b, set);
    let gid = qp.peer().gid;
    let attr = qp.query().unwrap();
    let (capacity, path) = (attr.capacity, attr.connection.unwrap().path);
    assert!(
        capacity.max_send_wr >= 16 && capacity.max_recv_wr >= 16 && capacity.max_inline_data == qp.max_inline_data()
    );
    let expected = format!(
        "queue pair {}: RC, RTS\n  \
         port 1, P_Key index 0\n  \
         send queue {} of {} buffers, receive queue {} of {} buffers, {} bytes inline\n  \
         peers may READ, WRITE\n  \
         peer {} at {gid} from GID index {} of port 1, hop limit 64, traffic class 0, flow label 0, service level 0, path MTU {}\n  \
         timeout 14 (67.1ms), 7 retries, 7 when the receiver is not ready, RNR timer 12\n  \
         READs and atomics: 16 outstanding, 16 served\n  \
         path migration Migrated, receive PSN 0x000123\n  \
         send PSN 0x000123",
        qp.qpn(),
        capacity.max_send_wr,
        capacity.max_send_sge,
        capacity.max_recv_wr,
        capacity.max_recv_sge,
        capacity.max_inline_data,
        qp.peer().qpn,
        path.global.unwrap().source_index,
        qp.mtu(),
    );
    assert_eq!(attr.to_string(), expected);
    let ud = a.builder().ud().unwrap();
    let shown = ud.query().unwrap().to_string();
    assert!(shown.contains("\n  Q_Key 0x11111111\n"), "{shown}");
    assert!(
        shown.starts_with(&format!("queue pair {}: UD, RTS\n", ud.qpn())),
        "{shown}"
    );
}
