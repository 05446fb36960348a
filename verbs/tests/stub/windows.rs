//! Memory windows of the stub, logged to show the order of their destruction.

use core::ffi::c_int;

use doorbell_verbs_sys::*;

use super::provider::{set_errno, stub_of};
use super::{Bound, Posted, Verb};

const FIRST_RKEY: u32 = 0x77_00fe;

pub(super) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: the caller's.
    let context = unsafe { (*pd).context };
    // SAFETY: live.
    let stub = unsafe { stub_of(context) };
    if let Some(errno) = stub.failing(Verb::AllocMw) {
        set_errno(errno);
        return core::ptr::null_mut();
    }
    stub.count("mw", 1);
    Box::into_raw(Box::new(ibv_mw {
        context,
        pd,
        rkey: FIRST_RKEY,
        handle: 0,
        type_: kind,
    }))
}

pub(super) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: allocated by alloc_mw, and owned by the caller.
    let mw = unsafe { Box::from_raw(mw) };
    // SAFETY: live.
    let stub = unsafe { stub_of(mw.context) };
    stub.count("mw", -1);
    stub.state().log.push("dealloc_mw");
    0
}

pub(super) unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: the caller's.
    let (stub, qpn, bind) = unsafe { (stub_of((*qp).context), (*qp).qp_num, &*bind) };
    if let Some(errno) = stub.failing(Verb::BindMw) {
        return errno;
    }
    // SAFETY: live, and ours to write (ibv_bind_mw(3)).
    let rkey = unsafe {
        (*mw).rkey = inline::inc_rkey((*mw).rkey);
        (*mw).rkey
    };
    stub.state().qps.get_mut(&qpn).unwrap().send.pending.push_back(Posted {
        wr_id: bind.wr_id,
        opcode: IBV_WR_BIND_MW,
        flags: bind.send_flags,
        imm: 0,
        remote: (0, 0),
        atomic: (0, 0),
        to: None,
        sges: Vec::new(),
        inline: Vec::new(),
        bind: Some(bound(rkey, &bind.bind_info)),
        invalidate: None,
    });
    0
}

fn bound(rkey: u32, info: &ibv_mw_bind_info) -> Bound {
    Bound {
        rkey,
        addr: info.addr,
        len: info.length,
        access: info.mw_access_flags,
    }
}

/// The effect of a posted request on a window: its binding, and the key it invalidates.
///
/// # Safety
/// The request's fields match its opcode.
pub(super) unsafe fn of_request(wr: &ibv_send_wr) -> (Option<Bound>, Option<u32>) {
    match wr.opcode {
        IBV_WR_BIND_MW => {
            // SAFETY: by contract.
            let bind = unsafe { &wr.anon_2.bind_mw };
            assert_eq!(wr.num_sge, 0);
            // SAFETY: live until its request is complete.
            let before = unsafe { (*bind.mw).rkey };
            assert_eq!(bind.rkey, inline::inc_rkey(before), "the window's next key");
            (Some(bound(bind.rkey, &bind.bind_info)), None)
        }
        // SAFETY: by contract.
        IBV_WR_LOCAL_INV | IBV_WR_SEND_WITH_INV => (None, Some(unsafe { wr.anon_1.invalidate_rkey })),
        _ => (None, None),
    }
}
