//! How requests reach the provider: the *line* of a queue.
//!
//! [`PostList`] chains `ibv_send_wr` and hands the chain over by one call, and [`Receives`] does the same with `ibv_recv_wr`; [`WorkRequests`] makes a call for each
//! request. What they have in common, and what the accounting in [`staging`](super::staging) needs of them, is [`Line`].

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
pub use wr_post::WorkRequests;

use super::transport::TransportKind;
use crate::error::QueuePairError;
use crate::pd::ProtectionDomain;
use crate::wr::op::Operation;
use crate::wr::payload::Payload;

/// How the requests of a queue pair's send queue reach the provider: [`PostList`] or [`WorkRequests`] (ibv_post_send(3), ibv_wr_post(3)).
pub trait Backend: sealed::SendQueue {}

/// A value for either backend: what [`QueuePairBuilder::best_rc`](crate::QueuePairBuilder::best_rc) and its like return, to be matched on once.
#[derive(Debug)]
pub enum EitherBackend<L, W> {
    /// For [`PostList`].
    PostList(L),
    /// For [`WorkRequests`].
    WorkRequests(W),
}

/// A queue pair, as the poster keeps it: read anew for each call of the provider, since to keep it in a register across calls would cost that register's saving and
/// restoring.
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

/// The way of one queue's requests to the provider.
///
/// Requests are written one after the other into forms, between `begin` and either `ring` or `abort`.
pub trait WorkQueue: 'static {
    /// What a form holds.
    type Wr;

    /// The verb that posts them.
    const VERB: &'static str;

    /// Whether the provider says which request it has refused, and takes those before it; else it takes all or none.
    const REPORTS_BAD_WR: bool = true;

    /// A request with this identity, whose scatter-gather list lies at `list`.
    fn new_wr(wr_id: u64, list: *mut sys::ibv_sge) -> Self::Wr;

    /// The identity of a request.
    fn wr_id(request: &Self::Wr) -> u64;

    /// Begins a batch of one.
    ///
    /// # Safety
    /// `qp` is live, and no batch of it is begun.
    #[inline(always)]
    unsafe fn begin_one(_qp: QpHandle<'_>) {}

    /// Begins a batch.
    ///
    /// # Safety
    /// As for a batch of one.
    #[inline(always)]
    unsafe fn begin(_qp: QpHandle<'_>) {}

    /// Forgets the batch that was begun.
    ///
    /// # Safety
    /// `qp` is live, and there is one.
    #[inline(always)]
    unsafe fn abort(_qp: QpHandle<'_>) {}

    /// Ends the chain of requests with that of `last`.
    ///
    /// # Safety
    /// `last` is a form of the queue, whose requests the provider does not have.
    unsafe fn end_chain(last: *mut WqeSlot<Self::Wr>);

    /// Gives the requests that begin with `first`, and were ended, to the provider: one doorbell. 0, or an errno value.
    ///
    /// # Safety
    /// `qp` is live; these forms follow one another, were all written since `begin`, and their buffers stay registered and untouched until completed.
    unsafe fn ring_doorbell(qp: QpHandle<'_>, first: *mut WqeSlot<Self::Wr>, bad: &mut *mut Self::Wr) -> c_int;
}

pub(crate) mod sealed {
    use super::{
        Operation, Payload, ProtectionDomain, QpHandle, QueuePairError, TransportKind, WorkQueue, WqeSlot, c_uint, sys,
    };

    /// A line of send requests.
    pub trait SendQueue: WorkQueue {
        /// Makes a queue pair for it in `pd`, and says in `init` what the device granted.
        fn create(
            pd: &ProtectionDomain,
            transport: TransportKind,
            init: &mut sys::ibv_qp_init_attr,
        ) -> Result<*mut sys::ibv_qp, QueuePairError>;

        /// Whether a queue pair takes this operation at all.
        #[inline(always)]
        fn supports<O: Operation>(_qp: QpHandle<'_>, _op: &O) -> bool {
            true
        }

        /// Writes the request of a batch of one, as `write` does.
        ///
        /// # Safety
        /// As for `write`, but that it is `begin_one` that was called.
        #[inline(always)]
        unsafe fn write_one<O: Operation, P: Payload>(
            qp: QpHandle<'_>,
            form: *mut WqeSlot<Self::Wr>,
            op: &O,
            payload: &P,
            flags: c_uint,
        ) {
            // SAFETY: by contract.
            unsafe { Self::write(qp, form, core::ptr::null_mut(), op, payload, flags) }
        }

        /// Writes a request of `op` and `payload`, with `flags` (`ibv_send_flags`) besides those of the payload; `next` is to follow it.
        ///
        /// # Safety
        /// `form` is one of the queue of `qp`, whose requests the provider does not have; the payload keeps to the queue pair's limits, and the queue pair `can`;
        /// `begin` was called.
        unsafe fn write<O: Operation, P: Payload>(
            qp: QpHandle<'_>,
            form: *mut WqeSlot<Self::Wr>,
            next: *mut WqeSlot<Self::Wr>,
            op: &O,
            payload: &P,
            flags: c_uint,
        );
    }
}
