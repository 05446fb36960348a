//! What each transport passes to the device, and how refusals read.

use doorbell_verbs::{
    Buffer, Local, PathMigration, QKey, QueuePair, QueuePairError, RejectReason, ReliableConnection, RemoteRights,
    Transport, UnreliableConnection, UnreliableDatagram,
};
use doorbell_verbs_sys::*;

use crate::rig::{PEER, opened};
use crate::stub::{Stub, Verb};

fn made(
    stub: &'static Stub,
) -> (
    QueuePair<ReliableConnection>,
    QueuePair<UnreliableConnection>,
    QueuePair<UnreliableDatagram>,
) {
    let context = stub.open();
    let pd = context.protection_domain().unwrap();
    let cq = context.completion_queue(64).unwrap();
    let builder = || pd.queue_pair(&cq).max_send_wr(8).max_recv_wr(8);
    (
        builder().rc().unwrap().connect(&PEER).unwrap(),
        builder().uc().unwrap().connect(&PEER).unwrap(),
        builder().ud().unwrap(),
    )
}

#[test]
fn each_transport_gets_the_attributes_of_its_table() {
    let stub = Stub::new();
    let (_rc, uc, ud) = made(stub);
    let place = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    let path = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    assert_eq!(
        stub.masks(uc.qpn().get()),
        [place | IBV_QP_ACCESS_FLAGS, path, IBV_QP_STATE | IBV_QP_SQ_PSN]
    );
    assert_eq!(
        stub.masks(ud.qpn().get()),
        [place | IBV_QP_QKEY, IBV_QP_STATE, IBV_QP_STATE | IBV_QP_SQ_PSN]
    );
    assert_eq!((uc.peer(), uc.mtu()), (&PEER, doorbell_verbs::Mtu::B1024));
    let own = ud.endpoint();
    assert_eq!(
        (own.qpn, own.qkey, own.mtu.bytes()),
        (ud.qpn(), QKey::DEFAULT, ud.max_datagram())
    );
    assert_eq!(own.gid.to_string(), "::ffff:10.0.0.1");
}

#[test]
fn a_change_is_one_call_that_leaves_the_state_alone() {
    let stub = Stub::new();
    let (mut rc, mut uc, mut ud) = made(stub);
    let rights = RemoteRights {
        write: true,
        ..RemoteRights::default()
    };
    rc.modify()
        .min_rnr_timer(3)
        .rights(rights)
        .migration(PathMigration::Rearm)
        .apply()
        .unwrap();
    uc.modify().rights(rights).pkey_index(2).apply().unwrap();
    ud.modify().qkey(QKey(0x99)).apply().unwrap();
    let last = |qpn: doorbell_verbs::Qpn| (stub.masks(qpn.get()).pop().unwrap(), stub.attr(qpn.get()));
    let (mask, attr) = last(rc.qpn());
    assert_eq!(mask, IBV_QP_MIN_RNR_TIMER | IBV_QP_ACCESS_FLAGS | IBV_QP_PATH_MIG_STATE);
    assert_eq!(
        (attr.min_rnr_timer, attr.qp_access_flags, attr.path_mig_state),
        (3, IBV_ACCESS_REMOTE_WRITE, IBV_MIG_REARM)
    );
    let (mask, attr) = last(uc.qpn());
    assert_eq!((mask, attr.pkey_index), (IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX, 2));
    let (mask, attr) = last(ud.qpn());
    assert_eq!((mask, attr.qkey), (IBV_QP_QKEY, 0x99));
    assert_eq!(ud.endpoint().qkey, QKey(0x99));

    stub.fail(Verb::ModifyQp, libc::EINVAL);
    ud.modify().qkey(QKey(0x77)).apply().unwrap_err();
    assert_eq!(ud.endpoint().qkey, QKey(0x99), "nothing was changed");
}

#[test]
fn draining_requests_the_event_and_resuming_does_not() {
    let stub = Stub::new();
    let (mut rc, _uc, _ud) = made(stub);
    rc.drain().unwrap();
    rc.resume().unwrap();
    let masks = stub.masks(rc.qpn().get());
    assert_eq!(masks[3..], [IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY, IBV_QP_STATE]);
}

fn refused<T: Transport>(
    stub: &'static Stub,
    qp: &mut QueuePair<T>,
    change: impl FnOnce(&mut QueuePair<T>) -> Result<(), QueuePairError>,
) -> String {
    stub.fail(Verb::ModifyQp, libc::EINVAL);
    let error = change(qp).unwrap_err().to_string();
    let number = qp.qpn().to_string();
    error.replace(&stub.name, "stub").replace(&number, "N")
}

#[test]
fn a_refused_change_says_which_attribute_the_state_does_not_allow() {
    let stub = Stub::new();
    let (mut rc, mut uc, mut ud) = made(stub);
    let invalid = "Invalid argument (os error 22)";
    assert_eq!(
        refused(stub, &mut rc, |qp| qp.modify().retry_count(1).min_rnr_timer(1).apply()),
        format!(
            "ibv_modify_qp(stub queue pair N, in RTS): {invalid}: RTS to RTS does not allow IBV_QP_RETRY_CNT; SQD to SQD does: drain() first"
        )
    );
    assert_eq!(
        refused(stub, &mut uc, |qp| qp.modify().rights(RemoteRights::default()).apply()),
        format!(
            "ibv_modify_qp(stub queue pair N, in RTS): {invalid}: the attributes given are the right ones, so one of their values is not"
        )
    );
    assert_eq!(
        refused(stub, &mut ud, |qp| qp.resume()),
        format!(
            "ibv_modify_qp(stub queue pair N, RTS to RTS): {invalid}: the attributes given are the right ones, so one of their values is not"
        )
    );
}

#[test]
fn a_controlled_key_needs_privilege() {
    let (stub, context, pd) = opened();
    let cq = context.completion_queue(512).unwrap();
    stub.fail(Verb::ModifyQp, libc::EPERM);
    let error = pd.queue_pair(&cq).qkey(QKey(0x8001_0000)).ud().unwrap_err().to_string();
    assert!(
        error.ends_with("Q_Key 0x80010000 has its highest bit set: only privileged processes may use it"),
        "{error}"
    );
    assert_eq!(stub.live("qp"), 0);
}

#[test]
fn a_receive_of_a_connection_may_be_short() {
    let (stub, context, pd) = opened();
    let cq = context.completion_queue(64).unwrap();
    let builder = || pd.queue_pair(&cq).max_send_wr(8).max_recv_wr(8);
    let buffer = || -> Buffer { pd.register(vec![0; 8], Local).unwrap() };
    builder().rc().unwrap().receive(buffer()).unwrap();
    builder().uc().unwrap().receive(buffer()).unwrap();
    let mut ud = builder().ud().unwrap();
    let refused = ud.receive(buffer()).unwrap_err();
    assert!(matches!(refused.reason, RejectReason::NoRoomForHeader { len: 8 }));
    assert_eq!(stub.doorbells(ud.qpn().get()), (0, 0));
}
