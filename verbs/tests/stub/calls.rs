//! `ibv_create_qp_ex` and `ibv_wr_*` (ibv_wr_post(3)): `wr_complete` posts all or none.

use core::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

use doorbell_verbs_sys::*;

use crate::allocation::ProviderScope;

use super::provider::{create, sges_of, stub_of};
use super::{Posted, StubQp, Verb, flush};

#[derive(Default)]
pub(super) struct Building {
    requests: Vec<Posted>,
    /// Whether the last of them has its data.
    has_data: bool,
}

/// As `create_qp`, with the functions of the requested operations.
pub(super) unsafe extern "C" fn create_qp_ex(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    // SAFETY: the caller's.
    let (stub, attr) = unsafe { (stub_of(context), &mut *attr) };
    if let Some(errno) = stub.failing(Verb::CreateQpEx) {
        super::provider::set_errno(errno);
        return core::ptr::null_mut();
    }
    assert_eq!(attr.comp_mask, IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS);
    let mut init = ibv_qp_init_attr {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
    };
    // SAFETY: a live domain.
    let raw = unsafe { create(attr.pd, &mut init) };
    attr.cap = init.cap;
    let without = stub.state().without;
    let has = |operation: u32| attr.send_ops_flags & u64::from(operation & !without) != 0;
    // SAFETY: just created.
    let qp = unsafe { &mut *raw.cast::<ibv_qp_ex>() };
    qp.wr_start = Some(start);
    qp.wr_complete = Some(complete);
    qp.wr_abort = Some(abort);
    qp.wr_set_sge = Some(set_sge);
    qp.wr_set_sge_list = Some(set_sge_list);
    qp.wr_set_inline_data = Some(set_inline_data);
    qp.wr_set_ud_addr = Some(set_ud_addr);
    qp.wr_send = has(IBV_QP_EX_WITH_SEND).then_some(send as _);
    qp.wr_send_imm = has(IBV_QP_EX_WITH_SEND_WITH_IMM).then_some(send_imm as _);
    qp.wr_rdma_write = has(IBV_QP_EX_WITH_RDMA_WRITE).then_some(rdma_write as _);
    qp.wr_rdma_write_imm = has(IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM).then_some(rdma_write_imm as _);
    qp.wr_rdma_read = has(IBV_QP_EX_WITH_RDMA_READ).then_some(rdma_read as _);
    qp.wr_atomic_cmp_swp = has(IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP).then_some(cmp_swp as _);
    qp.wr_atomic_fetch_add = has(IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD).then_some(fetch_add as _);
    raw
}

pub(super) unsafe extern "C" fn qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    qp.cast()
}

unsafe fn with<R>(qp: *mut ibv_qp_ex, what: impl FnOnce(&mut StubQp) -> R) -> R {
    let _uncounted = ProviderScope::begin();
    // SAFETY: the caller's.
    let (stub, qpn) = unsafe { (stub_of((*qp).qp_base.context), (*qp).qp_base.qp_num) };
    what(stub.state().qps.get_mut(&qpn).unwrap())
}

unsafe fn building(qp: *mut ibv_qp_ex, what: impl FnOnce(&mut Building)) {
    // SAFETY: the caller's.
    unsafe { with(qp, |qp| what(qp.building.as_mut().expect("a batch was begun"))) }
}

unsafe extern "C" fn start(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller's.
    let begun = unsafe { with(qp, |qp| qp.building.replace(Building::default())) };
    assert!(begun.is_none(), "the batch before was neither completed nor aborted");
}

unsafe extern "C" fn abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller's.
    let begun = unsafe {
        with(qp, |qp| {
            qp.aborts += 1;
            qp.building.take()
        })
    };
    assert!(begun.is_some(), "a batch was begun");
}

unsafe extern "C" fn complete(qp: *mut ibv_qp_ex) -> c_int {
    let _uncounted = ProviderScope::begin();
    // SAFETY: the caller's.
    let (stub, qpn) = unsafe { (stub_of((*qp).qp_base.context), (*qp).qp_base.qp_num) };
    let failing = stub.failing(Verb::PostSend);
    let mut state = stub.state();
    let queue = state.qps.get_mut(&qpn).unwrap();
    let batch = queue.building.take().expect("a batch was begun");
    assert!(
        batch.has_data || batch.requests.is_empty(),
        "the last request has no data"
    );
    queue.send.doorbells += 1;
    let refused = queue
        .send
        .refuse
        .take()
        .filter(|(index, _)| *index < batch.requests.len());
    if let Some(errno) = refused.map(|(_, errno)| errno).or(failing) {
        return errno;
    }
    queue.send.pending.extend(batch.requests);
    if queue.state == IBV_QPS_ERR {
        flush(queue, qpn);
    }
    drop(state);
    if stub.auto.load(Ordering::Relaxed) != 0 {
        stub.complete_sends(qpn, usize::MAX);
    }
    0
}

unsafe fn begin(qp: *mut ibv_qp_ex, opcode: u32, fill: impl FnOnce(&mut Posted)) {
    // SAFETY: the caller's.
    let (wr_id, flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
    let mut request = Posted {
        wr_id,
        opcode,
        flags,
        imm: 0,
        to: None,
        remote: (0, 0),
        atomic: (0, 0),
        sges: Vec::new(),
        inline: Vec::new(),
        bind: None,
        invalidate: None,
    };
    // SAFETY: the caller's.
    unsafe {
        building(qp, |batch| {
            assert!(
                batch.has_data || batch.requests.is_empty(),
                "the request before has no data"
            );
            batch.has_data = false;
            let _uncounted = ProviderScope::begin();
            fill(&mut request);
            batch.requests.push(request);
        });
    }
}

unsafe fn data(qp: *mut ibv_qp_ex, fill: impl FnOnce(&mut Posted)) {
    // SAFETY: the caller's.
    unsafe {
        building(qp, |batch| {
            assert!(!batch.has_data, "the request has data already");
            batch.has_data = true;
            fill(batch.requests.last_mut().expect("a request was begun"));
        });
    }
}

macro_rules! builders {
    ($( fn $name:ident($($arg:ident: $ty:ty),*) = $opcode:ident, |$request:ident| $fill:expr; )*) => { $(
        unsafe extern "C" fn $name(qp: *mut ibv_qp_ex $(, $arg: $ty)*) {
            // SAFETY: the caller's.
            unsafe { begin(qp, $opcode, |$request| $fill) }
        }
    )* };
}

builders! {
    fn send() = IBV_WR_SEND, |_request| ();
    fn send_imm(imm: __be32) = IBV_WR_SEND_WITH_IMM, |request| request.imm = u32::from_be(imm);
    fn rdma_write(rkey: u32, addr: u64) = IBV_WR_RDMA_WRITE, |request| request.remote = (addr, rkey);
    fn rdma_write_imm(rkey: u32, addr: u64, imm: __be32) = IBV_WR_RDMA_WRITE_WITH_IMM, |request| {
        (request.remote, request.imm) = ((addr, rkey), u32::from_be(imm));
    };
    fn rdma_read(rkey: u32, addr: u64) = IBV_WR_RDMA_READ, |request| request.remote = (addr, rkey);
    fn cmp_swp(rkey: u32, addr: u64, compare: u64, swap: u64) = IBV_WR_ATOMIC_CMP_AND_SWP, |request| {
        (request.remote, request.atomic) = ((addr, rkey), (compare, swap));
    };
    fn fetch_add(rkey: u32, addr: u64, add: u64) = IBV_WR_ATOMIC_FETCH_AND_ADD, |request| {
        (request.remote, request.atomic) = ((addr, rkey), (add, 0));
    };
}

unsafe extern "C" fn set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: the caller's.
    unsafe { data(qp, |request| request.sges.push((addr, length, lkey))) }
}

unsafe extern "C" fn set_sge_list(qp: *mut ibv_qp_ex, num: usize, list: *const ibv_sge) {
    // SAFETY: the caller's.
    unsafe { data(qp, |request| request.sges = sges_of(list, num as c_int)) }
}

unsafe extern "C" fn set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    // SAFETY: the caller's.
    unsafe {
        data(qp, |request| {
            // Recorded as in a post list, so that tests need not distinguish the two.
            request.flags |= IBV_SEND_INLINE;
            request.inline = core::slice::from_raw_parts(addr.cast::<u8>(), length).to_vec();
            if length != 0 {
                request.sges.push((addr as u64, length as u32, 0));
            }
        });
    }
}

unsafe extern "C" fn set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32) {
    // SAFETY: the caller's.
    unsafe {
        building(qp, |batch| {
            batch.requests.last_mut().expect("a request was begun").to = Some((ah as usize, qpn, qkey));
        });
    }
}
