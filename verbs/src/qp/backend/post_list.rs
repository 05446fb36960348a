//! The classic data path: a chain posted by `ibv_post_send` or `ibv_post_recv` (ibv_post_send(3)).
//! A request is written into its slot, linked to the next; the last link is cut when posted.

use core::ffi::{c_int, c_uint};

use doorbell_verbs_sys::{self as sys, inline};

use super::{Backend, QpHandle, WorkQueue, WqeSlot, create, sealed};
use crate::error::QueuePairError;
use crate::pd::ProtectionDomain;
use crate::qp::transport::TransportKind;
use crate::wr::op::Operation;
use crate::wr::payload::Payload;

/// Requests are posted as a list by `ibv_post_send`, which every provider has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias("ibv_post_send", "ibv_post_recv"))]
pub struct PostList;

#[derive(Debug)]
pub(crate) struct Receives;

impl WorkQueue for PostList {
    type Wr = sys::ibv_send_wr;
    const VERB: &'static str = "ibv_post_send";

    fn new_wr(wr_id: u64, list: *mut sys::ibv_sge) -> sys::ibv_send_wr {
        // SAFETY: all-zero is valid for integers, nullable pointers and unions of them.
        let zero: sys::ibv_send_wr = unsafe { core::mem::zeroed() };
        sys::ibv_send_wr {
            wr_id,
            sg_list: list,
            ..zero
        }
    }

    fn wr_id(request: &Self::Wr) -> u64 {
        request.wr_id
    }

    #[inline(always)]
    unsafe fn end_chain(last: *mut WqeSlot<Self::Wr>) {
        // SAFETY: by contract.
        unsafe { (*last).wr.next = core::ptr::null_mut() }
    }

    #[inline(always)]
    unsafe fn ring_doorbell(qp: QpHandle<'_>, first: *mut WqeSlot<Self::Wr>, bad: &mut *mut Self::Wr) -> c_int {
        // SAFETY: by contract.
        unsafe { inline::post_send(qp.get(), first.cast(), bad) }
    }
}

impl sealed::SendQueue for PostList {
    fn create(
        pd: &ProtectionDomain,
        _transport: TransportKind,
        init: &mut sys::ibv_qp_init_attr,
    ) -> Result<*mut sys::ibv_qp, QueuePairError> {
        create::create_qp(pd, init)
    }

    #[inline(always)]
    unsafe fn write<O: Operation, P: Payload>(
        _qp: QpHandle<'_>,
        wqe: *mut WqeSlot<Self::Wr>,
        next: *mut WqeSlot<Self::Wr>,
        op: &O,
        payload: &P,
        flags: c_uint,
    ) {
        // SAFETY: the slot may be written by contract; its list is as long as the limits.
        unsafe {
            let request = &raw mut (*wqe).wr;
            (*request).next = next.cast();
            (*request).num_sge = payload.num_sge();
            op.fill_wr(request);
            (*request).send_flags = P::FLAGS | flags;
            payload.write_sges(&raw mut (*wqe).sge);
        }
    }
}

impl Backend for PostList {}

impl WorkQueue for Receives {
    type Wr = sys::ibv_recv_wr;
    const VERB: &'static str = "ibv_post_recv";

    fn new_wr(wr_id: u64, list: *mut sys::ibv_sge) -> sys::ibv_recv_wr {
        sys::ibv_recv_wr {
            wr_id,
            next: core::ptr::null_mut(),
            sg_list: list,
            num_sge: 0,
        }
    }

    fn wr_id(request: &Self::Wr) -> u64 {
        request.wr_id
    }

    #[inline(always)]
    unsafe fn end_chain(last: *mut WqeSlot<Self::Wr>) {
        // SAFETY: by contract.
        unsafe { (*last).wr.next = core::ptr::null_mut() }
    }

    #[inline(always)]
    unsafe fn ring_doorbell(qp: QpHandle<'_>, first: *mut WqeSlot<Self::Wr>, bad: &mut *mut Self::Wr) -> c_int {
        // SAFETY: by contract.
        unsafe { inline::post_recv(qp.get(), first.cast(), bad) }
    }
}

impl Receives {
    /// Writes a receive into `payload`; `next` is its successor.
    ///
    /// # Safety
    /// As for the requests of a send queue.
    #[inline(always)]
    pub(crate) unsafe fn write<P: Payload>(
        wqe: *mut WqeSlot<sys::ibv_recv_wr>,
        next: *mut WqeSlot<sys::ibv_recv_wr>,
        payload: &P,
    ) {
        // SAFETY: as for those.
        unsafe {
            let request = &raw mut (*wqe).wr;
            (*request).next = next.cast();
            (*request).num_sge = payload.num_sge();
            payload.write_sges(&raw mut (*wqe).sge);
        }
    }
}
