//! XRC: domains, shared receive queues and the two ends.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr;

use doorbell_softroce_ibverbs::api;
use doorbell_verbs_sys::*;

use crate::common::*;

fn calls(context: *mut ibv_context) -> &'static verbs_context {
    // SAFETY: live while a test uses it, and not changed after it was opened.
    unsafe { &*inline::verbs_get_ctx(context) }
}

fn open_xrcd(context: *mut ibv_context, fd: c_int, oflags: c_int) -> Result<*mut ibv_xrcd, c_int> {
    let mut init = ibv_xrcd_init_attr {
        comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
        fd,
        oflags,
    };
    // SAFETY: live.
    let xrcd = unsafe { calls(context).open_xrcd.unwrap()(context, &mut init) };
    if xrcd.is_null() { Err(errno()) } else { Ok(xrcd) }
}

fn close(context: *mut ibv_context, xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: live; not used again once it is closed.
    unsafe { calls(context).close_xrcd.unwrap()(xrcd) }
}

fn create_srq(side: &Side, xrcd: *mut ibv_xrcd) -> *mut ibv_srq {
    // SAFETY: integers and null pointers.
    let mut init: ibv_srq_init_attr_ex = unsafe { MaybeUninit::zeroed().assume_init() };
    (init.attr.max_wr, init.attr.max_sge) = (8, 2);
    init.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    init.srq_type = IBV_SRQT_XRC;
    (init.pd, init.xrcd, init.cq) = (side.pd, xrcd, side.cq);
    // SAFETY: live.
    let srq = unsafe { calls(side.context).create_srq_ex.unwrap()(side.context, &mut init) };
    assert!(!srq.is_null(), "errno {}", errno());
    srq
}

fn create_target(context: *mut ibv_context, xrcd: *mut ibv_xrcd) -> *mut ibv_qp {
    // SAFETY: integers and null pointers.
    let mut attr: ibv_qp_init_attr_ex = unsafe { MaybeUninit::zeroed().assume_init() };
    (attr.qp_type, attr.comp_mask, attr.xrcd) = (IBV_QPT_XRC_RECV, IBV_QP_INIT_ATTR_XRCD, xrcd);
    // SAFETY: live.
    let qp = unsafe { create_qp_ex(context, &mut attr) };
    assert!(!qp.is_null(), "errno {}", errno());
    qp
}

/// Modifies a target to RTS, with the attributes of its kind.
fn connect_target(target: *mut ibv_qp, setup: &Setup, gid: ibv_gid, peer: u32) {
    let modify = |attr: &mut ibv_qp_attr, mask: u32| {
        // SAFETY: live.
        assert_eq!(unsafe { (api().modify_qp)(target, attr, mask as c_int) }, 0);
    };
    let mut attr = rtr_attr(setup, gid, peer, 5);
    (attr.qp_state, attr.port_num, attr.qp_access_flags) = (IBV_QPS_INIT, 1, ALL_RIGHTS);
    modify(
        &mut attr,
        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
    );
    attr.qp_state = IBV_QPS_RTR;
    modify(&mut attr, RTR_MASK);
    (attr.qp_state, attr.timeout) = (IBV_QPS_RTS, 14);
    modify(&mut attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_SQ_PSN);
}

#[test]
fn requests_reach_the_named_queue_by_both_ways_to_post() {
    crate::setup();
    for send_ops in [None, Some(IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM)] {
        let setup = Setup {
            qp_type: IBV_QPT_XRC_SEND,
            send_ops,
            ..Setup::default()
        };
        let (a, b) = (Side::new("soft0", &setup), Side::new("soft1", &Setup::default()));
        let xrcd = open_xrcd(b.context, -1, 0).unwrap();
        let (srq, target) = (create_srq(&b, xrcd), create_target(b.context, xrcd));
        // SAFETY: live objects, each destroyed once.
        unsafe {
            connect_target(target, &setup, a.gid(), a.qpn());
            a.init(&setup);
            a.connect_to(&setup, b.gid(), (*target).qp_num, (5, 0));
            let mut number = 0;
            assert_eq!(calls(b.context).get_srq_num.unwrap()(srq, &mut number), 0);
            for wr_id in [1, 2] {
                let mut sge = b.sge(0, 64);
                let mut receive = ibv_recv_wr {
                    wr_id,
                    next: ptr::null_mut(),
                    sg_list: &mut sge,
                    num_sge: 1,
                };
                assert_eq!(inline::post_srq_recv(srq, &mut receive, &mut ptr::null_mut()), 0);
            }
            a.fill(0, b"by XRC..");
            if send_ops.is_some() {
                let qp = api().qp_to_qp_ex.unwrap()(a.qp);
                (*qp).wr_start.unwrap()(qp);
                ((*qp).wr_id, (*qp).wr_flags) = (3, IBV_SEND_SIGNALED);
                (*qp).wr_send.unwrap()(qp);
                (*qp).wr_set_xrc_srqn.unwrap()(qp, number);
                (*qp).wr_set_sge.unwrap()(qp, a.lkey(), a.addr(), 8);
                (*qp).wr_id = 4;
                (*qp).wr_rdma_write_imm.unwrap()(qp, b.rkey(), b.addr() + 64, 7_u32.to_be());
                (*qp).wr_set_xrc_srqn.unwrap()(qp, number);
                (*qp).wr_set_sge.unwrap()(qp, a.lkey(), a.addr(), 8);
                assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
            } else {
                let mut wr = request(3, IBV_WR_SEND);
                wr.qp_type.xrc.remote_srqn = number;
                assert_eq!(a.post(wr, &mut [a.sge(0, 8)]), 0);
                let mut wr = rdma(4, IBV_WR_RDMA_WRITE_WITH_IMM, b.addr() + 64, b.rkey());
                (wr.qp_type.xrc.remote_srqn, wr.anon_1.imm_data) = (number, 7_u32.to_be());
                assert_eq!(a.post(wr, &mut [a.sge(0, 8)]), 0);
            }
            a.done(3);
            a.done(4);
            let received = b.done(1);
            assert_eq!((received.qp_num, received.byte_len), ((*target).qp_num, 8));
            assert_eq!(b.done(2).opcode, IBV_WC_RECV_RDMA_WITH_IMM);
            assert_eq!(
                (b.bytes(0..8), b.bytes(64..72)),
                (b"by XRC..".into(), b"by XRC..".into())
            );
            assert_eq!(close(b.context, xrcd), libc::EBUSY);
            assert_eq!((api().destroy_qp)(target), 0);
            assert_eq!((api().destroy_cq)(b.cq), libc::EBUSY);
            assert_eq!(api().destroy_srq.unwrap()(srq), 0);
        }
        assert_eq!(close(b.context, xrcd), 0);
    }
}

#[test]
fn a_domain_of_a_file_is_shared_by_those_who_open_it() {
    crate::setup();
    let side = Side::new("soft0", &Setup::default());
    let other = open("soft0").unwrap();
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let (fd, context) = (file.as_raw_fd(), side.context);
    assert_eq!(open_xrcd(context, fd, 0), Err(libc::EAGAIN));
    let one = open_xrcd(context, fd, libc::O_CREAT).unwrap();
    let two = open_xrcd(other, fd, 0).unwrap();
    assert_eq!(open_xrcd(other, fd, libc::O_CREAT | libc::O_EXCL), Err(libc::EINVAL));
    assert_eq!(open_xrcd(context, 1 << 20, libc::O_CREAT), Err(libc::EBADF));
    let target = create_target(context, one);
    assert_eq!(close(context, one), 0, "the other keeps it");
    assert_eq!(close(other, two), libc::EBUSY);
    // SAFETY: live objects, each destroyed once.
    unsafe {
        assert_eq!((api().destroy_qp)(target), 0);
        assert_eq!(close(other, two), 0);
        let mut init = ibv_xrcd_init_attr {
            comp_mask: IBV_XRCD_INIT_ATTR_FD,
            fd: -1,
            oflags: 0,
        };
        assert!(calls(context).open_xrcd.unwrap()(context, &mut init).is_null());
        assert_eq!(errno(), libc::EINVAL);
        assert_eq!((api().close_device)(other), 0);
    }
}
