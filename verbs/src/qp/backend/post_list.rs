//! The classic data path: a chain of work requests handed to `ibv_post_send` or `ibv_post_recv` (ibv_post_send(3)).
//!
//! A request is written once, into its form, where the provider reads it. Each is linked to the form that follows; the last one's link is cut when the chain is posted.

use core::ffi::{c_int, c_uint};

use doorbell_verbs_sys::{self as sys, inline};

use super::{Backend, Form, Handle, Line, create, sealed};
use crate::error::QueuePairError;
use crate::pd::ProtectionDomain;
use crate::qp::transport::TransportKind;
use crate::wr::op::Operation;
use crate::wr::payload::Payload;

/// Requests are posted as a list by `ibv_post_send`: what every provider has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostList;

/// Receives, which all providers take as a list by `ibv_post_recv`.
#[derive(Debug)]
pub(crate) struct Receives;

impl Line for PostList {
    type Request = sys::ibv_send_wr;
    const VERB: &'static str = "ibv_post_send";

    fn request(wr_id: u64, list: *mut sys::ibv_sge) -> sys::ibv_send_wr {
        // SAFETY: all-zero is a valid value of this struct of integers, nullable pointers and unions of them.
        let zero: sys::ibv_send_wr = unsafe { core::mem::zeroed() };
        sys::ibv_send_wr {
            wr_id,
            sg_list: list,
            ..zero
        }
    }

    fn identity(request: &Self::Request) -> u64 {
        request.wr_id
    }

    #[inline(always)]
    unsafe fn end(last: *mut Form<Self::Request>) {
        // SAFETY: by contract.
        unsafe { (*last).request.next = core::ptr::null_mut() }
    }

    #[inline(always)]
    unsafe fn ring(qp: Handle<'_>, first: *mut Form<Self::Request>, bad: &mut *mut Self::Request) -> c_int {
        // SAFETY: by contract.
        unsafe { inline::post_send(qp.get(), first.cast(), bad) }
    }
}

impl sealed::Sends for PostList {
    fn create(
        pd: &ProtectionDomain,
        _transport: TransportKind,
        init: &mut sys::ibv_qp_init_attr,
    ) -> Result<*mut sys::ibv_qp, QueuePairError> {
        create::plain(pd, init)
    }

    #[inline(always)]
    unsafe fn write<O: Operation, P: Payload>(
        _qp: Handle<'_>,
        form: *mut Form<Self::Request>,
        next: *mut Form<Self::Request>,
        op: &O,
        payload: &P,
        flags: c_uint,
    ) {
        // SAFETY: the form may be written by contract. Its list has room for what the limits allow.
        unsafe {
            let request = &raw mut (*form).request;
            (*request).next = next.cast();
            (*request).num_sge = payload.num_sge();
            op.fill(request);
            (*request).send_flags = P::FLAGS | flags;
            payload.fill(&raw mut (*form).sge);
        }
    }
}

impl Backend for PostList {}

impl Line for Receives {
    type Request = sys::ibv_recv_wr;
    const VERB: &'static str = "ibv_post_recv";

    fn request(wr_id: u64, list: *mut sys::ibv_sge) -> sys::ibv_recv_wr {
        sys::ibv_recv_wr {
            wr_id,
            next: core::ptr::null_mut(),
            sg_list: list,
            num_sge: 0,
        }
    }

    fn identity(request: &Self::Request) -> u64 {
        request.wr_id
    }

    #[inline(always)]
    unsafe fn end(last: *mut Form<Self::Request>) {
        // SAFETY: by contract.
        unsafe { (*last).request.next = core::ptr::null_mut() }
    }

    #[inline(always)]
    unsafe fn ring(qp: Handle<'_>, first: *mut Form<Self::Request>, bad: &mut *mut Self::Request) -> c_int {
        // SAFETY: by contract.
        unsafe { inline::post_recv(qp.get(), first.cast(), bad) }
    }
}

impl Receives {
    /// Writes a receive into `payload`; `next` is to follow it.
    ///
    /// # Safety
    /// As for the requests of a send queue.
    #[inline(always)]
    pub(crate) unsafe fn write<P: Payload>(
        form: *mut Form<sys::ibv_recv_wr>,
        next: *mut Form<sys::ibv_recv_wr>,
        payload: &P,
    ) {
        // SAFETY: as for those.
        unsafe {
            let request = &raw mut (*form).request;
            (*request).next = next.cast();
            (*request).num_sge = payload.num_sge();
            payload.fill(&raw mut (*form).sge);
        }
    }
}
