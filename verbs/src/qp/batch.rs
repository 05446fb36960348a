//! Batches: any number of requests, one doorbell.

use core::ffi::c_uint;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;

use doorbell_verbs_sys as sys;

use super::connected::SendSide;
use super::refused::{Reason, Refused};
use super::staging::{Poster, Staging};
use crate::memory::{GrantsRead, GrantsWrite, Remote, RemoteWord, Sink, Source, Word};
use crate::wr::op::{self, Immediate, Operation};
use crate::wr::payload::{Inline, Limits, One, Payload, Several};

/// The requests of one doorbell, being built: see [`QueuePair::post`](crate::QueuePair::post). Inline data must live for `'d`, until they are posted.
///
/// Each method adds a request, and returns it to be refined (`.imm(7).signalled()`); it is complete when that statement ends.
pub struct Batch<'q, 'd> {
    staging: Staging<'q, sys::ibv_send_wr>,
    limits: Limits,
    signal_at: u64,
    interval: u64,
    data: PhantomData<&'d [u8]>,
}

impl<'q, 'd> Batch<'q, 'd> {
    #[inline(always)]
    pub(super) fn post<F>(side: &mut SendSide, build: F) -> Result<(), Refused>
    where
        F: for<'b> FnOnce(&mut Batch<'b, 'd>),
    {
        let before = side.signal_at;
        let (signal_at, result) = {
            let mut batch = Batch {
                staging: Staging::new(&mut side.poster),
                limits: side.limits,
                signal_at: before,
                interval: side.interval,
                data: PhantomData,
            };
            build(&mut batch);
            let Batch { staging, signal_at, .. } = batch;
            (signal_at, staging.finish())
        };
        side.signal_at = match result {
            Ok(()) => signal_at,
            // Nothing posted: as before. Some posted, and perhaps one of them signalled: the next one is, to be safe.
            Err(_) => before.max(side.poster.head()),
        };
        result
    }

    #[inline(always)]
    fn request<O: Operation, P: Payload>(&mut self, op: O, payload: P) -> Request<'_, 'q, 'd, O, P> {
        Request {
            batch: self,
            op,
            payload: ManuallyDrop::new(payload),
            flags: P::FLAGS,
            imm: None,
        }
    }

    /// SENDs the buffer's bytes into the next receive that the peer has posted.
    #[inline]
    pub fn send(&mut self, buffer: impl Source) -> Request<'_, 'q, 'd, op::Send, One> {
        self.request(op::Send, One::new(buffer))
    }

    /// SENDs the bytes of several buffers as one message.
    #[inline]
    pub fn send_gather<S: Source, const N: usize>(
        &mut self,
        buffers: [S; N],
    ) -> Request<'_, 'q, 'd, op::Send, Several<N>> {
        self.request(op::Send, Several::new(buffers))
    }

    /// SENDs `bytes`, at most [`max_inline`](crate::QueuePair::max_inline).
    #[inline]
    pub fn send_inline(&mut self, bytes: &'d [u8]) -> Request<'_, 'q, 'd, op::Send, Inline<'d>> {
        self.request(op::Send, Inline::new(bytes))
    }

    /// WRITEs the buffer's bytes to the beginning of `remote`.
    #[inline]
    pub fn write(
        &mut self,
        buffer: impl Source,
        remote: Remote<impl GrantsWrite>,
    ) -> Request<'_, 'q, 'd, op::Write, One> {
        self.request(op::Write::new(remote), One::new(buffer))
    }

    /// WRITEs the bytes of several buffers, one after the other, to the beginning of `remote`.
    #[inline]
    pub fn write_gather<S: Source, const N: usize>(
        &mut self,
        buffers: [S; N],
        remote: Remote<impl GrantsWrite>,
    ) -> Request<'_, 'q, 'd, op::Write, Several<N>> {
        self.request(op::Write::new(remote), Several::new(buffers))
    }

    /// WRITEs `bytes`, at most [`max_inline`](crate::QueuePair::max_inline), to the beginning of `remote`.
    #[inline]
    pub fn write_inline(
        &mut self,
        bytes: &'d [u8],
        remote: Remote<impl GrantsWrite>,
    ) -> Request<'_, 'q, 'd, op::Write, Inline<'d>> {
        self.request(op::Write::new(remote), Inline::new(bytes))
    }

    /// READs as many bytes as the buffer has from the beginning of `remote`.
    #[inline]
    pub fn read(&mut self, buffer: impl Sink, remote: Remote<impl GrantsRead>) -> Request<'_, 'q, 'd, op::Read, One> {
        self.request(op::Read::new(remote), One::new(buffer))
    }

    /// READs as many bytes as the buffers have together from the beginning of `remote`, filling one after the other.
    #[inline]
    pub fn read_scatter<S: Sink, const N: usize>(
        &mut self,
        buffers: [S; N],
        remote: Remote<impl GrantsRead>,
    ) -> Request<'_, 'q, 'd, op::Read, Several<N>> {
        self.request(op::Read::new(remote), Several::new(buffers))
    }

    /// Sets the peer's word to `swap` if it is `compare`, atomically; the old value comes back in `word`.
    #[inline]
    pub fn compare_swap(
        &mut self,
        word: Word,
        at: RemoteWord,
        compare: u64,
        swap: u64,
    ) -> Request<'_, 'q, 'd, op::CompareSwap, One> {
        self.request(
            op::CompareSwap {
                word: at,
                compare,
                swap,
            },
            One::new(word),
        )
    }

    /// Adds `add` to the peer's word, modulo 2^64, atomically; the old value comes back in `word`.
    #[inline]
    pub fn fetch_add(&mut self, word: Word, at: RemoteWord, add: u64) -> Request<'_, 'q, 'd, op::FetchAdd, One> {
        self.request(op::FetchAdd { word: at, add }, One::new(word))
    }

    #[inline(always)]
    fn stage<O: Operation, P: Payload>(&mut self, op: &O, payload: P, flags: c_uint, imm: Option<u32>) {
        let fits = op.check(payload.bytes()).is_none() && payload.check(self.limits).is_none();
        if !(fits && self.staging.has_room()) {
            let reason = op.check(payload.bytes()).or_else(|| payload.check(self.limits));
            if !self.staging.reconsider(reason) {
                self.staging.keep(payload.into_buffers());
                return;
            }
        }
        let mut flags = flags;
        if self.staging.next() == self.signal_at {
            flags |= sys::IBV_SEND_SIGNALED;
        }
        if flags & sys::IBV_SEND_SIGNALED != 0 {
            self.signal_at = self.staging.next() + self.interval;
        }
        let fill = |wr: *mut sys::ibv_send_wr| {
            // SAFETY: `push` passes a request of the queue's array.
            unsafe {
                op.fill(wr, imm.is_some());
                (*wr).send_flags = flags;
                if let Some(imm) = imm {
                    (*wr).anon_1.imm_data = imm.to_be();
                }
            }
        };
        // SAFETY: `push` passes the request's list; `check` found nothing.
        let fill_sges = |sges: *mut sys::ibv_sge| unsafe { payload.fill(sges) };
        // SAFETY: there is room. The request is complete: opcode, flags, operands, list. Its memory is in the payload's buffers, or is inline data borrowed for
        // 'd, which outlives `finish` because `post`'s caller chose it.
        unsafe { self.staging.push(fill, fill_sges) };
        // SAFETY: this is the request just pushed.
        unsafe { self.staging.keep_in_flight(payload.into_buffers()) };
    }
}

/// A request of a batch, complete when dropped, at the end of the statement.
pub struct Request<'b, 'q, 'd, O: Operation, P: Payload> {
    batch: &'b mut Batch<'q, 'd>,
    op: O,
    payload: ManuallyDrop<P>,
    flags: c_uint,
    imm: Option<u32>,
}

impl<O: Operation, P: Payload> Request<'_, '_, '_, O, P> {
    /// Has a completion of its own, which confirms the unsignalled requests before it too.
    #[inline(always)]
    pub fn signalled(mut self) -> Self {
        self.flags |= sys::IBV_SEND_SIGNALED;
        self
    }

    /// Waits until READs and atomics before it are done (IBTA vol 1, 10.8.3.3).
    #[inline(always)]
    pub fn fence(mut self) -> Self {
        self.flags |= sys::IBV_SEND_FENCE;
        self
    }
}

impl<O: Immediate, P: Payload> Request<'_, '_, '_, O, P> {
    /// Carries 32 bits to the peer's completion. A WRITE then consumes a receive of the peer's.
    #[inline(always)]
    pub fn imm(mut self, imm: u32) -> Self {
        self.imm = Some(imm);
        self
    }

    /// Wakes a peer that waits for solicited completions (IBTA vol 1, 9.2.3); on a WRITE only with [`imm`](Self::imm).
    #[inline(always)]
    pub fn solicited(mut self) -> Self {
        self.flags |= sys::IBV_SEND_SOLICITED;
        self
    }
}

impl<O: Operation, P: Payload> Drop for Request<'_, '_, '_, O, P> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: taken once, here; not used after.
        let payload = unsafe { ManuallyDrop::take(&mut self.payload) };
        self.batch.stage(&self.op, payload, self.flags, self.imm);
    }
}

/// The receives of one call, being built: see [`QueuePair::post_receives`](crate::QueuePair::post_receives).
pub struct ReceiveBatch<'q> {
    staging: Staging<'q, sys::ibv_recv_wr>,
}

impl ReceiveBatch<'_> {
    #[inline(always)]
    pub(super) fn post<F>(poster: &mut Poster<sys::ibv_recv_wr>, build: F) -> Result<(), Refused>
    where
        F: for<'b> FnOnce(&mut ReceiveBatch<'b>),
    {
        let mut batch = ReceiveBatch {
            staging: Staging::new(poster),
        };
        build(&mut batch);
        batch.staging.finish()
    }

    /// Receives a message into `buffer`; a longer one is an error on both sides.
    #[inline]
    pub fn receive(&mut self, buffer: impl Sink) {
        self.stage(One::new(buffer));
    }

    /// Receives a message into several buffers, one filled after the other.
    #[inline]
    pub fn receive_scatter<S: Sink, const N: usize>(&mut self, buffers: [S; N]) {
        self.stage(Several::new(buffers));
    }

    #[inline(always)]
    fn stage<P: Payload>(&mut self, payload: P) {
        let limits = Limits {
            max_inline: 0,
            max_sge: self.staging.max_sge(),
        };
        if !(payload.check(limits).is_none() && self.staging.has_room()) {
            let reason: Option<Reason> = payload.check(limits);
            if !self.staging.reconsider(reason) {
                self.staging.keep(payload.into_buffers());
                return;
            }
        }
        // SAFETY: `push` passes the request's list; `check` found nothing.
        let fill_sges = |sges: *mut sys::ibv_sge| unsafe { payload.fill(sges) };
        // SAFETY: there is room. A receive has nothing but its list, whose memory is in the payload's buffers.
        unsafe { self.staging.push(|_| {}, fill_sges) };
        // SAFETY: this is the request just pushed.
        unsafe { self.staging.keep_in_flight(payload.into_buffers()) };
    }
}

impl core::fmt::Debug for Batch<'_, '_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Batch")
            .field("next", &self.staging.next())
            .finish_non_exhaustive()
    }
}

impl core::fmt::Debug for ReceiveBatch<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ReceiveBatch")
            .field("next", &self.staging.next())
            .finish_non_exhaustive()
    }
}

impl<O: Operation, P: Payload> core::fmt::Debug for Request<'_, '_, '_, O, P> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Request")
            .field("flags", &self.flags)
            .field("imm", &self.imm)
            .finish_non_exhaustive()
    }
}
