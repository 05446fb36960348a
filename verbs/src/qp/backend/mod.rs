//! How work requests reach the provider.
//!
//! [`PostList`] chains `ibv_send_wr` and posts the chain by one call, [`Receives`] does the same
//! with `ibv_recv_wr`; [`WrPost`] makes calls for each request (`ibv_wr_*`). [`WorkQueue`] is
//! what they have in common and what the accounting in [`poster`](super::poster) needs.

mod create;
mod post_list;
mod wqe_slot;
mod wr_post;

use core::ffi::{c_int, c_uint};

use doorbell_verbs_sys as sys;

pub use post_list::PostList;
pub(crate) use post_list::Receives;
pub(crate) use wqe_slot::WqeSlot;
pub(crate) use wqe_slot::WqeSlots;
pub use wr_post::WrPost;

use super::transport::TransportKind;
use crate::error::QueuePairError;
use crate::pd::ProtectionDomain;
use crate::wr::op::Operation;
use crate::wr::payload::Payload;

/// How a send queue's requests reach the provider: [`PostList`] or [`WrPost`]
/// (ibv_post_send(3), ibv_wr_post(3)).
pub trait Backend: sealed::SendQueue {}

/// A value for either backend, to be matched on once: the result of
/// [`QueuePairBuilder::best_rc`](crate::QueuePairBuilder::best_rc) and the like.
#[derive(Debug)]
pub enum EitherBackend<L, W> {
    /// For [`PostList`].
    PostList(L),
    /// For [`WrPost`].
    WrPost(W),
}

/// The poster's `ibv_qp` pointer, re-read per call: a register would have to be saved for it.
#[derive(Clone, Copy)]
pub struct QpHandle<'p>(&'p *mut sys::ibv_qp);

impl<'p> QpHandle<'p> {
    #[inline(always)]
    pub(super) fn new(qp: &'p *mut sys::ibv_qp) -> Self {
        Self(qp)
    }

    #[inline(always)]
    pub(super) fn get(self) -> *mut sys::ibv_qp {
        // SAFETY: a reference may be read from.
        unsafe { core::ptr::from_ref(self.0).read_volatile() }
    }
}

/// A work queue's interface to the provider: requests are written into consecutive slots between
/// `begin` and either `ring_doorbell` or `abort`.
pub trait WorkQueue: 'static {
    type Wr;

    const VERB: &'static str;

    /// Whether the provider names the rejected request (`bad_wr`); else it accepts all or none.
    const REPORTS_BAD_WR: bool = true;

    /// A work request with this `wr_id`, whose scatter-gather list is at `list`.
    fn new_wr(wr_id: u64, list: *mut sys::ibv_sge) -> Self::Wr;

    fn wr_id(request: &Self::Wr) -> u64;

    /// # Safety
    /// `qp` is live, and no batch of it is begun.
    #[inline(always)]
    unsafe fn begin_one(_qp: QpHandle<'_>) {}

    /// # Safety
    /// As for a batch of one.
    #[inline(always)]
    unsafe fn begin(_qp: QpHandle<'_>) {}

    /// # Safety
    /// `qp` is live, and there is one.
    #[inline(always)]
    unsafe fn abort(_qp: QpHandle<'_>) {}

    /// Ends the chain of work requests at `last`.
    ///
    /// # Safety
    /// `last` is a slot of the queue, whose request the provider does not have.
    unsafe fn end_chain(last: *mut WqeSlot<Self::Wr>);

    /// Posts the requests from `first`, whose chain was ended: one doorbell. 0, or an errno value.
    ///
    /// # Safety
    /// `qp` is live; these slots follow one another, were all written since `begin`, and their
    /// buffers stay registered and untouched until completed.
    unsafe fn ring_doorbell(qp: QpHandle<'_>, first: *mut WqeSlot<Self::Wr>, bad: &mut *mut Self::Wr) -> c_int;
}

pub(crate) mod sealed {
    use super::{
        Operation, Payload, ProtectionDomain, QpHandle, QueuePairError, TransportKind, WorkQueue, WqeSlot, c_uint, sys,
    };

    /// A work queue of send requests.
    pub trait SendQueue: WorkQueue {
        /// Creates a queue pair for it in `pd`, and writes the granted capacities to `init`.
        fn create(
            pd: &ProtectionDomain,
            transport: TransportKind,
            init: &mut sys::ibv_qp_init_attr,
        ) -> Result<*mut sys::ibv_qp, QueuePairError>;

        #[inline(always)]
        fn supports<O: Operation>(_qp: QpHandle<'_>, _op: &O) -> bool {
            true
        }

        /// Writes the request of a batch of one, as `write` does.
        ///
        /// # Safety
        /// As for `write`, but after `begin_one`.
        #[inline(always)]
        unsafe fn write_one<O: Operation, P: Payload>(
            qp: QpHandle<'_>,
            wqe: *mut WqeSlot<Self::Wr>,
            op: &O,
            payload: &P,
            flags: c_uint,
        ) {
            // SAFETY: by contract.
            unsafe { Self::write(qp, wqe, core::ptr::null_mut(), op, payload, flags) }
        }

        /// Writes a request of `op` and `payload`, with `flags` (`ibv_send_flags`) besides the
        /// payload's; `next` is its successor.
        ///
        /// # Safety
        /// `wqe` is a slot of the queue of `qp` that the provider does not have; the payload keeps
        /// to the limits, and the queue pair `supports` the operation; `begin` was called.
        unsafe fn write<O: Operation, P: Payload>(
            qp: QpHandle<'_>,
            wqe: *mut WqeSlot<Self::Wr>,
            next: *mut WqeSlot<Self::Wr>,
            op: &O,
            payload: &P,
            flags: c_uint,
        );
    }
}
