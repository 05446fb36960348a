//! The extended data path (ibv_wr_post(3)): between `ibv_wr_start` and `ibv_wr_complete` (the
//! doorbell) or `ibv_wr_abort`, each request is one call for its operation and one for its data.
//!
//! The provider writes its own WQE format at once, without a list; a slot holds the `wr_id`.

use core::ffi::{c_int, c_uint};

use doorbell_verbs_sys::{self as sys, work_requests};

use super::{Backend, QpHandle, WorkQueue, WqeSlot, create, sealed};
use crate::error::QueuePairError;
use crate::pd::ProtectionDomain;
use crate::qp::transport::TransportKind;
use crate::wr::op::Operation;
use crate::wr::payload::Payload;

/// The `ibv_wr_*` calls of ibv_wr_post(3), faster with some providers, missing in others.
///
/// A rejected batch is rejected whole; its [`index`](crate::RejectedBatch::index) is 0, as the
/// provider does not report the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias("ibv_wr_start", "ibv_wr_complete", "ibv_wr_abort", "ibv_qp_ex", "ibv_create_qp_ex"))]
pub struct WrPost;

impl WorkQueue for WrPost {
    /// Its `wr_id`.
    type Wr = u64;
    const VERB: &'static str = "ibv_wr_complete";
    const REPORTS_BAD_WR: bool = false;

    fn new_wr(wr_id: u64, _list: *mut sys::ibv_sge) -> u64 {
        wr_id
    }

    fn wr_id(request: &u64) -> u64 {
        *request
    }

    #[inline(always)]
    unsafe fn begin_one(qp: QpHandle<'_>) {
        // SAFETY: by contract.
        unsafe { work_requests::wr_start(qp.get().cast()) }
    }

    #[inline(always)]
    unsafe fn begin(qp: QpHandle<'_>) {
        let extended: *mut sys::ibv_qp_ex = qp.get().cast();
        // SAFETY: by contract.
        unsafe {
            // The usual flags: set again only around requests with other ones.
            (*extended).wr_flags = 0;
            work_requests::wr_start(extended);
        }
    }

    #[inline(always)]
    unsafe fn end_chain(_last: *mut WqeSlot<u64>) {}

    #[inline(always)]
    unsafe fn ring_doorbell(qp: QpHandle<'_>, _first: *mut WqeSlot<u64>, _bad: &mut *mut u64) -> c_int {
        // SAFETY: by contract.
        unsafe { work_requests::wr_complete(qp.get().cast()) }
    }

    unsafe fn abort(qp: QpHandle<'_>) {
        // SAFETY: by contract.
        unsafe { work_requests::wr_abort(qp.get().cast()) }
    }
}

impl sealed::SendQueue for WrPost {
    fn create(
        pd: &ProtectionDomain,
        transport: TransportKind,
        init: &mut sys::ibv_qp_init_attr,
    ) -> Result<*mut sys::ibv_qp, QueuePairError> {
        create::create_qp_ex(pd, transport, init)
    }

    #[inline(always)]
    fn supports<O: Operation>(qp: QpHandle<'_>, op: &O) -> bool {
        // SAFETY: a poster's queue pair is live, and made by ibv_create_qp_ex for this backend.
        O::ALWAYS_SUPPORTED || unsafe { op.is_callable(qp.get().cast()) }
    }

    #[inline(always)]
    unsafe fn write<O: Operation, P: Payload>(
        qp: QpHandle<'_>,
        wqe: *mut WqeSlot<u64>,
        _next: *mut WqeSlot<u64>,
        op: &O,
        payload: &P,
        flags: c_uint,
    ) {
        // The call already means inline; rxe's provider reads the flag too.
        let flags = P::FLAGS | flags;
        // SAFETY: the queue pair is live, a batch was begun; it has the operation by contract.
        unsafe {
            let extended: *mut sys::ibv_qp_ex = qp.get().cast();
            (*extended).wr_id = (*wqe).wr;
            if flags != 0 {
                (*extended).wr_flags = flags;
            }
            op.call_wr(extended);
            payload.set_data(qp.get().cast());
            if flags != 0 {
                (*qp.get().cast::<sys::ibv_qp_ex>()).wr_flags = 0;
            }
        }
    }

    #[inline(always)]
    unsafe fn write_one<O: Operation, P: Payload>(
        qp: QpHandle<'_>,
        wqe: *mut WqeSlot<u64>,
        op: &O,
        payload: &P,
        flags: c_uint,
    ) {
        // SAFETY: as in `write`.
        unsafe {
            let extended: *mut sys::ibv_qp_ex = qp.get().cast();
            (*extended).wr_id = (*wqe).wr;
            (*extended).wr_flags = P::FLAGS | flags;
            op.call_wr(extended);
            payload.set_data(qp.get().cast());
        }
    }
}

impl Backend for WrPost {}
