//! Post lists: any number of work requests, one doorbell (doorbell batching).

use core::ffi::c_uint;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::RangeBounds;

use doorbell_verbs_sys as sys;

use super::backend::{Backend, PostList, WqeSlot};
use super::post_error::{PostError, RejectReason};
use super::poster::{Poster, Staging, push};
use super::transport::{Connected, Connectionless, Reliable, ReliableConnection, Transport};
use crate::ah::AddressHandle;
use crate::memory::{
    AtomicWord, Bindable, BoundWindow, Buffer, GrantsRead, GrantsWrite, KeyAccess, MemoryWindow, Remote, RemoteWord,
    Sink, Source,
};
use crate::types::{QKey, Qpn, RKey};
use crate::wr::op::{self, Immediate, Message, Operation, UNBOUNDED};
use crate::wr::payload::{InlineData, Payload, SgeList, SingleSge, Window};

/// The requests of one doorbell, being built: see [`QueuePair::post`](crate::QueuePair::post).
/// Inline data must live for `'d`.
///
/// Each method returns its request for options: `batch.write(buffer, remote).imm(7).signaled();`.
#[doc(alias("ibv_send_wr", "ibv_post_send"))]
pub struct Batch<'q, 'd, T: Transport = ReliableConnection, B: Backend = PostList> {
    staging: Staging<'q, B>,
    data: PhantomData<&'d [u8]>,
    transport: PhantomData<T>,
}

impl<'d, T: Transport, B: Backend> Batch<'_, 'd, T, B> {
    #[inline(always)]
    pub(super) fn post<F>(poster: &mut Poster<B>, build: F) -> Result<(), PostError>
    where
        F: for<'b> FnOnce(&mut Batch<'b, 'd, T, B>),
    {
        let mut batch = Batch {
            staging: Staging::new(poster),
            data: PhantomData,
            transport: PhantomData,
        };
        build(&mut batch);
        batch.staging.finish()
    }

    #[inline(always)]
    fn stage<O: Operation, P: Payload>(&mut self, op: O, max_len: u64, payload: P) -> WorkRequest<'_, O, P, B> {
        WorkRequest {
            poster: self.staging.poster,
            next: &mut self.staging.next,
            op,
            room: max_len,
            payload: ManuallyDrop::new(payload),
            flags: 0,
        }
    }
}

/// The fast path of posting one request of at most `max_len` bytes: no chain, nothing to undo.
#[inline(always)]
pub(super) fn post_one<B: Backend, O: Operation, P: Payload>(
    poster: &mut Poster<B>,
    op: O,
    room: u64,
    payload: P,
) -> Result<(), PostError> {
    if !payload.is_single(poster.limits)
        || op.rejects(payload.bytes(), room)
        || !B::supports(poster.qp(), &op)
        || !poster.try_take_slot()
    {
        return post_one_slow_path(poster, op, room, payload);
    }
    // SAFETY: a slot was taken, and the payload is one element within the limits. The request is
    // complete: operation, flags, list. The payload borrows inline data for long enough.
    unsafe { poster.post_one(payload, |qp, wqe, payload| B::write_one(qp, wqe, &op, payload, 0)) }
}

/// Posts one request at a checkpoint or with a payload of several elements, or rejects it.
#[cold]
#[inline(never)]
fn post_one_slow_path<B: Backend, O: Operation, P: Payload>(
    poster: &mut Poster<B>,
    op: O,
    room: u64,
    payload: P,
) -> Result<(), PostError> {
    if !op.rejects(payload.bytes(), room) && payload.fits(poster.limits) && B::supports(poster.qp(), &op) {
        // Only a single-element request has tried to take a slot, and failed.
        let flags = if !payload.is_single(poster.limits) && poster.try_take_slot() {
            Some(0)
        } else {
            poster.take_slot_at_checkpoint(0)
        };
        if let Some(flags) = flags {
            // SAFETY: as in `post_one`; the limits were kept to.
            return unsafe { poster.post_one(payload, |qp, wqe, payload| B::write_one(qp, wqe, &op, payload, flags)) };
        }
    }
    let reason = reject_reason(poster, op, room, &payload);
    Err(poster.reject_one(reason, payload.into_buffers()))
}

fn reject_reason<B: Backend, O: Operation, P: Payload>(
    poster: &Poster<B>,
    op: O,
    room: u64,
    payload: &P,
) -> Option<RejectReason> {
    if !B::supports(poster.qp(), &op) {
        return Some(RejectReason::Unsupported);
    }
    op.reject_reason(payload.bytes(), room)
        .or_else(|| payload.reject_reason(poster.limits))
}

#[inline(always)]
fn stage<B: Backend, O: Operation, P: Payload>(
    poster: &mut Poster<B>,
    next: &mut *mut WqeSlot<B::Wr>,
    op: O,
    room: u64,
    payload: P,
    flags: c_uint,
) {
    if op.rejects(payload.bytes(), room) || !payload.fits(poster.limits) || !B::supports(poster.qp(), &op) {
        *next = reject(poster, op, room, payload);
        return;
    }
    if !poster.try_take_slot() {
        *next = stage_at_checkpoint(poster, *next, op, room, payload, flags);
        return;
    }
    if flags & sys::IBV_SEND_SIGNALED != 0 {
        poster.note_signaled();
    }
    // SAFETY: it has its slot, and the limits were kept to.
    unsafe { stage_in_slot(poster, next, op, payload, flags) }
}

/// # Safety
/// A slot is taken, the payload within the limits, and the operation supported.
#[inline(always)]
unsafe fn stage_in_slot<B: Backend, O: Operation, P: Payload>(
    poster: &mut Poster<B>,
    next: &mut *mut WqeSlot<B::Wr>,
    op: O,
    payload: P,
    flags: c_uint,
) {
    // SAFETY: by contract. The request is complete: operation, flags, list. Inline data is borrowed
    // for 'd of the batch, which outlives `finish` because `post`'s caller chose it.
    unsafe {
        push(poster, next, payload, |qp, wqe, payload| {
            B::write(qp, wqe, (*wqe).next_slot, &op, payload, flags)
        });
    }
}

/// Stages a request at a checkpoint, or rejects it. Returns the slot of the next request.
/// `extern "C"`: it cannot unwind, so callers need not spill the batch to memory.
#[cold]
#[inline(never)]
extern "C" fn stage_at_checkpoint<B: Backend, O: Operation, P: Payload>(
    poster: &mut Poster<B>,
    mut next: *mut WqeSlot<B::Wr>,
    op: O,
    room: u64,
    payload: P,
    flags: c_uint,
) -> *mut WqeSlot<B::Wr> {
    let Some(flags) = poster.take_slot_at_checkpoint(flags) else {
        return reject(poster, op, room, payload);
    };
    // SAFETY: it has its slot, and the limits were kept to.
    unsafe { stage_in_slot(poster, &mut next, op, payload, flags) };
    next
}

/// Rejects the batch, keeps the request's buffers, and returns the first slot. Cannot unwind.
#[cold]
#[inline(never)]
extern "C" fn reject<B: Backend, O: Operation, P: Payload>(
    poster: &mut Poster<B>,
    op: O,
    room: u64,
    payload: P,
) -> *mut WqeSlot<B::Wr> {
    let reason = reject_reason(poster, op, room, &payload);
    poster.reject_next(reason, payload.into_buffers());
    poster.first()
}

impl<'d, T: Connectionless, B: Backend> Batch<'_, 'd, T, B> {
    /// SENDs the buffer's bytes to queue pair `qpn` at `ah`; `qkey` must be its Q_Key.
    #[inline(always)]
    #[doc(alias("IBV_WR_SEND", "ibv_wr_send", "ibv_wr_set_ud_addr"))]
    pub fn send_to<S: Source>(
        &mut self,
        buffer: S,
        ah: &'d AddressHandle,
        qpn: Qpn,
        qkey: QKey,
    ) -> WorkRequest<'_, op::SendTo, SingleSge<S>, B> {
        let (op, room) = self.destination(ah, qpn, qkey);
        self.stage(op, room, SingleSge::new(buffer))
    }

    /// SENDs the bytes of several buffers as one message, as [`send_to`](Self::send_to) does.
    #[inline(always)]
    #[doc(alias("IBV_WR_SEND", "ibv_wr_set_ud_addr", "sg_list"))]
    pub fn send_to_gather<S: Source, const N: usize>(
        &mut self,
        buffers: [S; N],
        ah: &'d AddressHandle,
        qpn: Qpn,
        qkey: QKey,
    ) -> WorkRequest<'_, op::SendTo, SgeList<N>, B> {
        let (op, room) = self.destination(ah, qpn, qkey);
        self.stage(op, room, SgeList::new(buffers))
    }

    /// SENDs `bytes`, at most [`max_inline_data`](crate::QueuePair::max_inline_data), as
    /// [`send_to`](Self::send_to) does.
    #[inline(always)]
    #[doc(alias("IBV_WR_SEND", "ibv_wr_set_ud_addr", "IBV_SEND_INLINE"))]
    pub fn send_to_inline(
        &mut self,
        bytes: &'d [u8],
        ah: &'d AddressHandle,
        qpn: Qpn,
        qkey: QKey,
    ) -> WorkRequest<'_, op::SendTo, InlineData<'d>, B> {
        let (op, room) = self.destination(ah, qpn, qkey);
        self.stage(op, room, InlineData::new(bytes))
    }

    #[inline(always)]
    fn destination(&self, ah: &AddressHandle, qpn: Qpn, qkey: QKey) -> (op::SendTo, u64) {
        self.staging.poster.ud.send_to(ah, qpn, qkey)
    }
}

impl<'d, T: Connected, B: Backend> Batch<'_, 'd, T, B> {
    /// SENDs the buffer's bytes into the next receive that the peer has posted.
    #[inline(always)]
    #[doc(alias("IBV_WR_SEND", "ibv_wr_send"))]
    pub fn send<S: Source>(&mut self, buffer: S) -> WorkRequest<'_, op::SendOp, SingleSge<S>, B> {
        self.stage(op::SendOp, UNBOUNDED, SingleSge::new(buffer))
    }

    /// SENDs the bytes of several buffers as one message.
    #[inline(always)]
    #[doc(alias("IBV_WR_SEND", "ibv_wr_set_sge_list", "sg_list"))]
    pub fn send_gather<S: Source, const N: usize>(
        &mut self,
        buffers: [S; N],
    ) -> WorkRequest<'_, op::SendOp, SgeList<N>, B> {
        self.stage(op::SendOp, UNBOUNDED, SgeList::new(buffers))
    }

    /// SENDs `bytes`, at most [`max_inline_data`](crate::QueuePair::max_inline_data).
    #[inline(always)]
    #[doc(alias("IBV_WR_SEND", "IBV_SEND_INLINE", "ibv_wr_set_inline_data"))]
    pub fn send_inline(&mut self, bytes: &'d [u8]) -> WorkRequest<'_, op::SendOp, InlineData<'d>, B> {
        self.stage(op::SendOp, UNBOUNDED, InlineData::new(bytes))
    }

    /// WRITEs the buffer's bytes to the beginning of `remote`.
    #[inline(always)]
    #[doc(alias("IBV_WR_RDMA_WRITE", "ibv_wr_rdma_write"))]
    pub fn write<S: Source>(
        &mut self,
        buffer: S,
        remote: Remote<impl GrantsWrite>,
    ) -> WorkRequest<'_, op::RdmaWrite, SingleSge<S>, B> {
        self.stage(op::RdmaWrite::new(remote), remote.len(), SingleSge::new(buffer))
    }

    /// WRITEs the bytes of several buffers, one after the other, to the beginning of `remote`.
    #[inline(always)]
    #[doc(alias("IBV_WR_RDMA_WRITE", "ibv_wr_set_sge_list", "sg_list"))]
    pub fn write_gather<S: Source, const N: usize>(
        &mut self,
        buffers: [S; N],
        remote: Remote<impl GrantsWrite>,
    ) -> WorkRequest<'_, op::RdmaWrite, SgeList<N>, B> {
        self.stage(op::RdmaWrite::new(remote), remote.len(), SgeList::new(buffers))
    }

    /// As [`write`](Self::write), inline ([`max_inline_data`](crate::QueuePair::max_inline_data)).
    #[inline(always)]
    #[doc(alias("IBV_WR_RDMA_WRITE", "IBV_SEND_INLINE", "ibv_wr_set_inline_data"))]
    pub fn write_inline(
        &mut self,
        bytes: &'d [u8],
        remote: Remote<impl GrantsWrite>,
    ) -> WorkRequest<'_, op::RdmaWrite, InlineData<'d>, B> {
        self.stage(op::RdmaWrite::new(remote), remote.len(), InlineData::new(bytes))
    }
}

impl<T: Connected, B: Backend> Batch<'_, '_, T, B> {
    /// Binds a window to `range` of a buffer's bytes, granting the peer the rights `grants`.
    /// Requests after it find it bound.
    ///
    /// # Panics
    /// If the range is beyond the buffer.
    #[doc(alias("IBV_WR_BIND_MW", "ibv_wr_bind_mw"))]
    pub fn bind<K: KeyAccess>(
        &mut self,
        window: MemoryWindow,
        over: &Buffer<impl Bindable>,
        range: impl RangeBounds<usize>,
        _grants: K,
    ) -> WorkRequest<'_, op::Bind, Window, B> {
        let (binding, inner, in_flight) = window.binding::<K>(over, range);
        let poster = &mut *self.staging.poster;
        poster.tied_windows.tie(&inner, poster.ring.qp());
        self.stage(op::Bind(binding), UNBOUNDED, Window::new(in_flight))
    }

    /// Local invalidate: revokes a window's key. After its completion the peer has no access by it.
    #[doc(alias("IBV_WR_LOCAL_INV", "ibv_wr_local_inv"))]
    pub fn invalidate<K: KeyAccess>(&mut self, window: BoundWindow<K>) -> WorkRequest<'_, op::Invalidate, Window, B> {
        let (binding, in_flight) = window.unbinding();
        self.stage(op::Invalidate(binding), UNBOUNDED, Window::new(in_flight))
    }
}

impl<'d, T: Reliable, B: Backend> Batch<'_, 'd, T, B> {
    /// SENDs the buffer's bytes and invalidates `rkey`, the key of a window that the peer has bound
    /// on its end of this connection (SEND with invalidate).
    #[inline(always)]
    #[doc(alias("IBV_WR_SEND_WITH_INV", "ibv_wr_send_inv"))]
    pub fn send_with_invalidate<S: Source>(
        &mut self,
        buffer: S,
        rkey: RKey,
    ) -> WorkRequest<'_, op::SendInvalidate, SingleSge<S>, B> {
        self.stage(op::SendInvalidate { rkey: rkey.0 }, UNBOUNDED, SingleSge::new(buffer))
    }

    /// SENDs `bytes`, at most [`max_inline_data`](crate::QueuePair::max_inline_data), as
    /// [`send_with_invalidate`](Self::send_with_invalidate) does.
    #[inline(always)]
    #[doc(alias("IBV_WR_SEND_WITH_INV", "IBV_SEND_INLINE"))]
    pub fn send_inline_with_invalidate(
        &mut self,
        bytes: &'d [u8],
        rkey: RKey,
    ) -> WorkRequest<'_, op::SendInvalidate, InlineData<'d>, B> {
        self.stage(op::SendInvalidate { rkey: rkey.0 }, UNBOUNDED, InlineData::new(bytes))
    }
}

impl<T: Reliable, B: Backend> Batch<'_, '_, T, B> {
    /// READs from the beginning of `remote`, as many bytes as the buffer has.
    #[inline(always)]
    #[doc(alias("IBV_WR_RDMA_READ", "ibv_wr_rdma_read"))]
    pub fn read<S: Sink>(
        &mut self,
        buffer: S,
        remote: Remote<impl GrantsRead>,
    ) -> WorkRequest<'_, op::RdmaRead, SingleSge<S>, B> {
        self.stage(op::RdmaRead::new(remote), remote.len(), SingleSge::new(buffer))
    }

    /// READs from the beginning of `remote` into the buffers, filling them in order.
    #[inline(always)]
    #[doc(alias("IBV_WR_RDMA_READ", "ibv_wr_set_sge_list", "sg_list"))]
    pub fn read_scatter<S: Sink, const N: usize>(
        &mut self,
        buffers: [S; N],
        remote: Remote<impl GrantsRead>,
    ) -> WorkRequest<'_, op::RdmaRead, SgeList<N>, B> {
        self.stage(op::RdmaRead::new(remote), remote.len(), SgeList::new(buffers))
    }

    /// Sets the peer's word to `swap` if it is `compare`, atomically; `word` returns the old value.
    #[inline(always)]
    #[doc(alias("IBV_WR_ATOMIC_CMP_AND_SWP", "ibv_wr_atomic_cmp_swp"))]
    pub fn compare_swap(
        &mut self,
        word: AtomicWord,
        at: RemoteWord,
        compare: u64,
        swap: u64,
    ) -> WorkRequest<'_, op::CompareSwap, SingleSge<AtomicWord>, B> {
        self.stage(
            op::CompareSwap {
                word: at,
                compare,
                swap,
            },
            UNBOUNDED,
            SingleSge::new(word),
        )
    }

    /// Adds `add` to the peer's word, modulo 2^64, atomically; `word` returns with the old value.
    #[inline(always)]
    #[doc(alias("IBV_WR_ATOMIC_FETCH_AND_ADD", "ibv_wr_atomic_fetch_add"))]
    pub fn fetch_add(
        &mut self,
        word: AtomicWord,
        at: RemoteWord,
        add: u64,
    ) -> WorkRequest<'_, op::FetchAdd, SingleSge<AtomicWord>, B> {
        self.stage(op::FetchAdd { word: at, add }, UNBOUNDED, SingleSge::new(word))
    }
}

/// A work request of a batch, open for options (ibv_post_send(3); IBTA vol 1, 11.4.1.1). It is
/// staged when it is dropped, at the end of the statement; one that is leaked is not posted.
#[doc(alias("ibv_send_wr", "ibv_send_flags"))]
pub struct WorkRequest<'b, O: Operation, P: Payload, B: Backend = PostList> {
    poster: &'b mut Poster<B>,
    next: &'b mut *mut WqeSlot<B::Wr>,
    op: O,
    /// The longest message that the target takes, in bytes.
    room: u64,
    payload: ManuallyDrop<P>,
    flags: c_uint,
}

impl<'b, O: Operation, P: Payload, B: Backend> WorkRequest<'b, O, P, B> {
    /// Generates a completion (signaled), which also retires the unsignaled requests before it.
    #[inline(always)]
    #[doc(alias = "IBV_SEND_SIGNALED")]
    pub fn signaled(self) -> Self {
        self.add(sys::IBV_SEND_SIGNALED)
    }

    /// As [`signaled`](WorkRequest::signaled) if `signal`: one request in N.
    #[inline(always)]
    #[doc(alias("IBV_SEND_SIGNALED", "cq_mod"))]
    pub fn signaled_if(self, signal: bool) -> Self {
        if signal { self.signaled() } else { self }
    }

    /// Fence: waits until earlier READs and atomics have completed (IBTA vol 1, 10.8.3.3).
    #[inline(always)]
    #[doc(alias = "IBV_SEND_FENCE")]
    pub fn fence(self) -> Self {
        self.add(sys::IBV_SEND_FENCE)
    }

    #[inline(always)]
    fn add(mut self, flag: c_uint) -> Self {
        self.flags |= flag;
        self
    }

    #[inline(always)]
    fn map<Q: Operation>(self, to: impl FnOnce(O) -> Q) -> WorkRequest<'b, Q, P, B> {
        let this = ManuallyDrop::new(self);
        // SAFETY: each field is taken once, as `this` is neither used nor dropped after.
        unsafe {
            WorkRequest {
                poster: core::ptr::read(&raw const this.poster),
                next: core::ptr::read(&raw const this.next),
                op: to(this.op),
                room: this.room,
                payload: core::ptr::read(&raw const this.payload),
                flags: this.flags,
            }
        }
    }
}

impl<O: Operation, P: Payload, B: Backend> Drop for WorkRequest<'_, O, P, B> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: taken once, here.
        let payload = unsafe { ManuallyDrop::take(&mut self.payload) };
        stage(self.poster, self.next, self.op, self.room, payload, self.flags);
    }
}

impl<'b, O: Immediate, P: Payload, B: Backend> WorkRequest<'b, O, P, B> {
    /// Immediate data: 32 bits for the peer's completion. A WRITE with it consumes a receive of the
    /// peer.
    #[inline(always)]
    #[doc(alias(
        "imm_data",
        "IBV_WR_SEND_WITH_IMM",
        "IBV_WR_RDMA_WRITE_WITH_IMM",
        "ibv_wr_send_imm",
        "ibv_wr_rdma_write_imm"
    ))]
    pub fn imm(self, imm: u32) -> WorkRequest<'b, op::WithImmediate<O>, P, B> {
        self.map(|op| op::WithImmediate { op, imm })
    }
}

impl<O: Message, P: Payload, B: Backend> WorkRequest<'_, O, P, B> {
    /// Solicited event: wakes a peer that waits for solicited completions (IBTA vol 1, 9.2.3); on a
    /// WRITE only with [`imm`](Self::imm).
    #[inline(always)]
    #[doc(alias = "IBV_SEND_SOLICITED")]
    pub fn solicited(self) -> Self {
        self.add(sys::IBV_SEND_SOLICITED)
    }
}

impl<T: Transport, B: Backend> core::fmt::Debug for Batch<'_, '_, T, B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Batch")
            .field("staged", &self.staging.len())
            .finish_non_exhaustive()
    }
}

impl<O: Operation, P: Payload, B: Backend> core::fmt::Debug for WorkRequest<'_, O, P, B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Request").field("op", &self.op).finish_non_exhaustive()
    }
}
