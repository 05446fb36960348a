//! Batches of receives (ibv_post_recv(3)).

use core::marker::PhantomData;
use core::ptr::null_mut as null;

use super::backend::{Receives, WorkQueue, WqeSlot};
use super::post_error::{PostError, RejectReason};
use super::poster::{Poster, Staging, push};
use super::transport::{ReliableConnection, Transport};
use crate::memory::Sink;
use crate::wr::payload::sealed::Stage;
use crate::wr::payload::{Limits, Payload, SgeList, SingleSge};

/// Receives being built for [`post_receives`](crate::QueuePair::post_receives) (ibv_post_recv(3)).
#[doc(alias("ibv_recv_wr", "ibv_post_recv"))]
pub struct ReceiveBatch<'q, T: Transport = ReliableConnection> {
    staging: Staging<'q, Receives>,
    transport: PhantomData<T>,
}

impl<T: Transport> ReceiveBatch<'_, T> {
    #[inline(always)]
    pub(super) fn post<F>(poster: &mut Poster<Receives>, build: F) -> Result<(), PostError>
    where
        F: for<'b> FnOnce(&mut ReceiveBatch<'b, T>),
    {
        let mut batch = ReceiveBatch {
            staging: Staging::new(poster),
            transport: PhantomData,
        };
        build(&mut batch);
        batch.staging.finish()
    }

    /// The fast path of posting one receive.
    #[inline(always)]
    pub(super) fn post_one(poster: &mut Poster<Receives>, buffer: impl Sink) -> Result<(), PostError> {
        let payload = SingleSge::new(buffer);
        if payload.bytes() < T::HEADROOM || !poster.try_take_slot() {
            return receive_one_slow_path(poster, payload, T::HEADROOM);
        }
        // SAFETY: a slot was taken. A receive has nothing but its list, here of one element.
        unsafe { poster.post_one(payload, |_, wqe, payload| Receives::write(wqe, null(), payload)) }
    }

    /// Receives a message into `buffer`; a longer one is an error on both sides. A datagram starts
    /// after [`GRH_BYTES`](crate::GRH_BYTES) bytes of header.
    #[inline(always)]
    #[doc(alias = "ibv_recv_wr")]
    pub fn receive(&mut self, buffer: impl Sink) {
        self.stage(SingleSge::new(buffer));
    }

    /// Receives a message into several buffers, filled in order.
    #[inline(always)]
    #[doc(alias("ibv_recv_wr", "sg_list"))]
    pub fn receive_scatter<S: Sink, const N: usize>(&mut self, buffers: [S; N]) {
        self.stage(SgeList::new(buffers));
    }

    #[inline(always)]
    fn stage<P: Payload>(&mut self, payload: P) {
        let Staging { poster, next } = &mut self.staging;
        if !payload.fits(poster.limits) || payload.bytes() < T::HEADROOM {
            *next = reject_receive(poster, payload, T::HEADROOM);
            return;
        }
        if !poster.try_take_slot() {
            *next = receive_at_checkpoint(poster, *next, payload);
            return;
        }
        // SAFETY: it has its slot, and the limits were kept to. A receive has nothing but its list.
        unsafe {
            push(poster, next, payload, |_, wqe, payload| {
                Receives::write(wqe, (*wqe).next_slot, payload)
            });
        }
    }
}

#[cold]
#[inline(never)]
fn receive_one_slow_path(poster: &mut Poster<Receives>, payload: impl Payload, headroom: u64) -> Result<(), PostError> {
    let objection = receive_reject_reason(headroom, &payload, poster.limits);
    if objection.is_some() || poster.take_slot_at_checkpoint(0).is_none() {
        return Err(poster.reject_one(objection, payload.into_buffers()));
    }
    // SAFETY: as in `ReceiveBatch::post_one`.
    unsafe { poster.post_one(payload, |_, wqe, payload| Receives::write(wqe, null(), payload)) }
}

/// Stages a receive at a checkpoint, or rejects it; cannot unwind, as for sends.
#[cold]
#[inline(never)]
extern "C" fn receive_at_checkpoint<P: Payload>(
    poster: &mut Poster<Receives>,
    mut next: *mut WqeSlot<<Receives as WorkQueue>::Wr>,
    payload: P,
) -> *mut WqeSlot<<Receives as WorkQueue>::Wr> {
    if poster.take_slot_at_checkpoint(0).is_none() {
        return reject_receive(poster, payload, 0);
    }
    // SAFETY: as in `ReceiveBatch::stage`.
    unsafe {
        push(poster, &mut next, payload, |_, wqe, payload| {
            Receives::write(wqe, (*wqe).next_slot, payload)
        });
    }
    next
}

#[cold]
#[inline(never)]
extern "C" fn reject_receive<P: Payload>(
    poster: &mut Poster<Receives>,
    payload: P,
    headroom: u64,
) -> *mut WqeSlot<<Receives as WorkQueue>::Wr> {
    let reason = receive_reject_reason(headroom, &payload, poster.limits);
    poster.reject_next(reason, payload.into_buffers());
    poster.first()
}

/// Why a receive is invalid that needs `headroom` bytes before the message, if it is.
fn receive_reject_reason(headroom: u64, payload: &impl Payload, limits: Limits) -> Option<RejectReason> {
    let len = payload.bytes();
    let short = (len < headroom).then_some(RejectReason::NoRoomForHeader { len });
    payload.reject_reason(limits).or(short)
}

impl<T: Transport> core::fmt::Debug for ReceiveBatch<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ReceiveBatch")
            .field("staged", &self.staging.len())
            .finish_non_exhaustive()
    }
}
