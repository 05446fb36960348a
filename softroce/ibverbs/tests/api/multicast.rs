//! Attaching to multicast groups, and what refuses it.

use std::mem::MaybeUninit;

use doorbell_softroce_ibverbs::{api, attach_mcast, detach_mcast};
use doorbell_verbs_sys::*;

use super::unreliable::Ah;
use crate::common::*;

const MULTICAST_QPN: u32 = 0x00ff_ffff;

/// The MGID of an IPv4 group that no other process uses.
fn group(last: u8) -> ibv_gid {
    let [.., high, low] = std::process::id().to_be_bytes();
    ibv_gid {
        raw: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, high, low, last],
    }
}

fn of_type(qp_type: ibv_qp_type) -> (Side, Side) {
    crate::setup();
    let setup = Setup {
        qp_type,
        ..Setup::default()
    };
    pair(("soft0", "far"), &setup)
}

fn attach(side: &Side, gid: ibv_gid) -> i32 {
    // SAFETY: live.
    unsafe { attach_mcast(side.qp, &gid, 0) }
}

fn detach(side: &Side, gid: ibv_gid) -> i32 {
    // SAFETY: live.
    unsafe { detach_mcast(side.qp, &gid, 0) }
}

fn send(from: &Side, ah: &Ah, byte: u8) {
    from.fill(0, &[byte]);
    let mut wr = request(byte.into(), IBV_WR_SEND);
    wr.wr.ud = ibv_send_wr_ud {
        ah: ah.0,
        remote_qpn: MULTICAST_QPN,
        remote_qkey: QKEY,
    };
    assert_eq!(from.post(wr, &mut [from.sge(0, 1)]), 0);
    from.done(byte.into());
}

#[test]
fn groups_are_reported_attached_to_and_held() {
    let (a, b) = of_type(IBV_QPT_UD);
    let mut found = MaybeUninit::<ibv_device_attr>::uninit();
    // SAFETY: live; filled on success.
    let found = unsafe {
        assert_eq!((api().query_device)(a.context, found.as_mut_ptr()), 0);
        found.assume_init()
    };
    assert_eq!((found.max_mcast_grp, found.max_mcast_qp_attach), (256, 64));
    assert_eq!(found.max_total_mcast_qp_attach, 256 * 64);
    let mut other_family = ibv_gid { raw: [0; 16] };
    // SAFETY: bytes.
    unsafe { (other_family.raw[0], other_family.raw[15]) = (0xff, 1) };
    for wrong in [a.gid(), b.gid(), other_family] {
        assert_eq!(attach(&b, wrong), libc::EINVAL);
    }
    assert_eq!(detach(&b, group(1)), libc::EINVAL);
    assert_eq!(attach(&b, group(1)), 0);
    assert_eq!(attach(&b, group(1)), 0, "again is no error");
    // SAFETY: live, and refused.
    assert_eq!(unsafe { (api().destroy_qp)(b.qp) }, libc::EBUSY);

    assert_eq!(b.receive(7, &mut [b.sge(0, 64)]), 0);
    send(&a, &Ah::to(&a, group(1)), 9);
    assert_eq!(b.wait().wr_id, 7);
    assert_eq!(b.byte(40), 9);
    assert_eq!(detach(&b, group(1)), 0);
    assert_eq!(detach(&b, group(1)), libc::EINVAL);
}

/// Neither are queue pairs of other transports attached, nor connected to a group.
#[test]
fn only_datagrams_are_multicast() {
    let (a, b) = of_type(IBV_QPT_RC);
    assert_eq!(attach(&a, group(2)), libc::EINVAL);
    let setup = Setup::default();
    let mut reset = attr();
    reset.qp_state = IBV_QPS_RESET;
    assert_eq!(a.modify(&mut reset, IBV_QP_STATE), 0);
    a.init(&setup);
    let mask = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    let to = |gid| a.modify(&mut rtr_attr(&setup, gid, b.qpn(), 0), mask);
    assert_eq!(to(group(2)), libc::EINVAL);
    assert_eq!(to(b.gid()), 0);
}
