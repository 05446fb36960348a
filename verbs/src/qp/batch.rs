//! Batches: any number of requests, one doorbell.

use core::ffi::c_uint;
use core::marker::PhantomData;

use doorbell_verbs_sys as sys;

use super::connected::{Accounting, SendSide};
use super::refused::{Reason, Refused};
use super::staging::{Poster, Staging};
use super::transport::{Connected, Connectionless, Rc, Reliable, Transport};
use crate::ah::AddressHandle;
use crate::memory::{GrantsRead, GrantsWrite, Remote, RemoteWord, Sink, Source, Word};
use crate::types::{QKey, Qpn};
use crate::wr::op::{self, Immediate, Operation};
use crate::wr::payload::sealed::Stage;
use crate::wr::payload::{Inline, Limits, One, Payload, Several};

/// The requests of one doorbell, being built: see [`QueuePair::post`](crate::QueuePair::post). Inline data must live for `'d`, until they are posted.
///
/// Each method adds a request, and returns it to be refined: `batch.write(buffer, remote).imm(7).signalled();`.
pub struct Batch<'q, 'd, T: Transport = Rc> {
    staging: Staging<'q, sys::ibv_send_wr>,
    accounting: Unwinding<'q>,
    data: PhantomData<&'d [u8]>,
    transport: PhantomData<T>,
}

/// The accounting of a batch being built. Dropped only when the closure that builds it panics: then none of its requests is posted.
struct Unwinding<'q> {
    accounting: &'q mut Accounting,
    /// The position of the batch's first request.
    head: u64,
}

impl Drop for Unwinding<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.accounting.forget_from(self.head);
    }
}

impl<'q, 'd, T: Transport> Batch<'q, 'd, T> {
    #[inline(always)]
    pub(super) fn post<F>(side: &mut SendSide, build: F) -> Result<(), Refused>
    where
        F: for<'b> FnOnce(&mut Batch<'b, 'd, T>),
    {
        let head = side.poster.head();
        let result = {
            let mut batch = Batch {
                staging: Staging::new(&mut side.poster),
                accounting: Unwinding {
                    accounting: &mut side.accounting,
                    head,
                },
                data: PhantomData,
                transport: PhantomData,
            };
            build(&mut batch);
            let Batch {
                staging, accounting, ..
            } = batch;
            core::mem::forget(accounting);
            staging.finish()
        };
        if result.is_err() {
            side.accounting.forget_from(side.poster.head());
        }
        result
    }

    /// Posts one request, by a shorter way than a batch of one: nothing to chain, nothing to take back.
    #[inline(always)]
    pub(super) fn post_one<O: Operation, P: Payload>(side: &mut SendSide, op: O, payload: P) -> Result<(), Refused> {
        let SendSide { poster, accounting } = &mut *side;
        let fits = op.admits(payload.bytes()) && payload.is_single(accounting.limits);
        if !(fits && poster.has_room()) {
            return post_one_as_batch::<T, O, P>(side, op, payload);
        }
        let signalled = accounting.settle(poster.head(), false);
        let fill = |wr: *mut sys::ibv_send_wr| {
            // SAFETY: `post_one` passes a request of the queue's array.
            unsafe {
                op.fill(wr);
                (*wr).send_flags = P::FLAGS;
                if signalled {
                    (*wr).send_flags = P::FLAGS | sys::IBV_SEND_SIGNALED;
                }
            }
        };
        // SAFETY: there is room, and the payload is one element within the limits. The request is complete: opcode, flags, operands, list. Inline data is
        // borrowed by the payload for longer than this call.
        match unsafe { poster.post_one(fill, payload) } {
            0 => Ok(()),
            result => Err(side.take_back_one(result)),
        }
    }

    #[inline(always)]
    fn stage<O: Operation, P: Payload>(&mut self, op: O, payload: P) -> Request<'_, O> {
        let position = self.staging.next();
        let fits = op.admits(payload.bytes()) && payload.admits(self.accounting.accounting.limits);
        let payload = if fits && self.staging.has_room() {
            payload
        } else {
            match reconsider_send(
                self.staging.poster(),
                position,
                op,
                payload,
                self.accounting.accounting.limits,
            ) {
                Some(payload) => payload,
                None => {
                    let wr = self.staging.scratch();
                    return Request {
                        wr,
                        position,
                        signalled: false,
                        accounting: self.accounting.accounting,
                        op: PhantomData,
                    };
                }
            }
        };
        let fill = |wr: *mut sys::ibv_send_wr| {
            // SAFETY: `push` passes a request of the queue's array.
            unsafe {
                op.fill(wr);
                (*wr).send_flags = P::FLAGS;
            }
        };
        // SAFETY: there is room, and the limits were kept to. The request is complete: opcode, flags, operands, list. Inline data is borrowed for 'd, which outlives
        // `finish` because `post`'s caller chose it.
        let wr = unsafe { self.staging.push(fill, payload) };
        Request {
            wr,
            position,
            signalled: false,
            accounting: self.accounting.accounting,
            op: PhantomData,
        }
    }
}

impl<'d, T: Connectionless> Batch<'_, 'd, T> {
    /// SENDs the buffer's bytes to the queue pair `qpn` at `ah`, which receives it if `qkey` is its key.
    #[inline(always)]
    pub fn send_to(
        &mut self,
        buffer: impl Source,
        ah: &'d AddressHandle,
        qpn: Qpn,
        qkey: QKey,
    ) -> Request<'_, op::SendTo> {
        let op = self.destination(ah, qpn, qkey);
        self.stage(op, One::new(buffer))
    }

    /// SENDs the bytes of several buffers as one message, as [`send_to`](Self::send_to) does.
    #[inline(always)]
    pub fn send_to_gather<S: Source, const N: usize>(
        &mut self,
        buffers: [S; N],
        ah: &'d AddressHandle,
        qpn: Qpn,
        qkey: QKey,
    ) -> Request<'_, op::SendTo> {
        let op = self.destination(ah, qpn, qkey);
        self.stage(op, Several::new(buffers))
    }

    /// SENDs `bytes`, at most [`max_inline`](crate::QueuePair::max_inline), as [`send_to`](Self::send_to) does.
    #[inline(always)]
    pub fn send_to_inline(
        &mut self,
        bytes: &'d [u8],
        ah: &'d AddressHandle,
        qpn: Qpn,
        qkey: QKey,
    ) -> Request<'_, op::SendTo> {
        let op = self.destination(ah, qpn, qkey);
        self.stage(op, Inline::new(bytes))
    }

    #[inline(always)]
    fn destination(&self, ah: &AddressHandle, qpn: Qpn, qkey: QKey) -> op::SendTo {
        self.accounting.accounting.datagrams.to(ah, qpn, qkey)
    }
}

impl<'d, T: Connected> Batch<'_, 'd, T> {
    /// SENDs the buffer's bytes into the next receive that the peer has posted.
    #[inline(always)]
    pub fn send(&mut self, buffer: impl Source) -> Request<'_, op::Send> {
        self.stage(op::Send, One::new(buffer))
    }

    /// SENDs the bytes of several buffers as one message.
    #[inline(always)]
    pub fn send_gather<S: Source, const N: usize>(&mut self, buffers: [S; N]) -> Request<'_, op::Send> {
        self.stage(op::Send, Several::new(buffers))
    }

    /// SENDs `bytes`, at most [`max_inline`](crate::QueuePair::max_inline).
    #[inline(always)]
    pub fn send_inline(&mut self, bytes: &'d [u8]) -> Request<'_, op::Send> {
        self.stage(op::Send, Inline::new(bytes))
    }

    /// WRITEs the buffer's bytes to the beginning of `remote`.
    #[inline(always)]
    pub fn write(&mut self, buffer: impl Source, remote: Remote<impl GrantsWrite>) -> Request<'_, op::Write> {
        self.stage(op::Write::new(remote), One::new(buffer))
    }

    /// WRITEs the bytes of several buffers, one after the other, to the beginning of `remote`.
    #[inline(always)]
    pub fn write_gather<S: Source, const N: usize>(
        &mut self,
        buffers: [S; N],
        remote: Remote<impl GrantsWrite>,
    ) -> Request<'_, op::Write> {
        self.stage(op::Write::new(remote), Several::new(buffers))
    }

    /// WRITEs `bytes`, at most [`max_inline`](crate::QueuePair::max_inline), to the beginning of `remote`.
    #[inline(always)]
    pub fn write_inline(&mut self, bytes: &'d [u8], remote: Remote<impl GrantsWrite>) -> Request<'_, op::Write> {
        self.stage(op::Write::new(remote), Inline::new(bytes))
    }
}

impl<T: Reliable> Batch<'_, '_, T> {
    /// READs as many bytes as the buffer has from the beginning of `remote`.
    #[inline(always)]
    pub fn read(&mut self, buffer: impl Sink, remote: Remote<impl GrantsRead>) -> Request<'_, op::Read> {
        self.stage(op::Read::new(remote), One::new(buffer))
    }

    /// READs as many bytes as the buffers have together from the beginning of `remote`, filling one after the other.
    #[inline(always)]
    pub fn read_scatter<S: Sink, const N: usize>(
        &mut self,
        buffers: [S; N],
        remote: Remote<impl GrantsRead>,
    ) -> Request<'_, op::Read> {
        self.stage(op::Read::new(remote), Several::new(buffers))
    }

    /// Sets the peer's word to `swap` if it is `compare`, atomically; the old value comes back in `word`.
    #[inline(always)]
    pub fn compare_swap(
        &mut self,
        word: Word,
        at: RemoteWord,
        compare: u64,
        swap: u64,
    ) -> Request<'_, op::CompareSwap> {
        self.stage(
            op::CompareSwap {
                word: at,
                compare,
                swap,
            },
            One::new(word),
        )
    }

    /// Adds `add` to the peer's word, modulo 2^64, atomically; the old value comes back in `word`.
    #[inline(always)]
    pub fn fetch_add(&mut self, word: Word, at: RemoteWord, add: u64) -> Request<'_, op::FetchAdd> {
        self.stage(op::FetchAdd { word: at, add }, One::new(word))
    }
}

/// Posts a request that cannot simply be staged, or says why it is refused.
#[cold]
#[inline(never)]
fn post_one_as_batch<T: Transport, O: Operation, P: Payload>(
    side: &mut SendSide,
    op: O,
    payload: P,
) -> Result<(), Refused> {
    Batch::<T>::post(side, |batch| {
        batch.stage(op, payload);
    })
}

/// Finds out why a request cannot simply be staged; gives it back if it can be after all.
#[cold]
#[inline(never)]
fn reconsider_send<O: Operation, P: Payload>(
    poster: &mut Poster<sys::ibv_send_wr>,
    position: u64,
    op: O,
    payload: P,
    limits: Limits,
) -> Option<P> {
    let reason = op.check(payload.bytes()).or_else(|| payload.check(limits));
    poster.reconsider(position, reason, payload)
}

/// A request just added to a batch, to be refined. When it is dropped, at the end of the statement, it is settled whether it is signalled.
pub struct Request<'b, O: Operation> {
    /// The request in the queue's array, or, for one that was refused, one that is never posted.
    wr: *mut sys::ibv_send_wr,
    position: u64,
    signalled: bool,
    accounting: &'b mut Accounting,
    op: PhantomData<O>,
}

impl<O: Operation> Request<'_, O> {
    /// Has a completion of its own, which confirms the unsignalled requests before it too.
    #[inline(always)]
    pub fn signalled(mut self) -> Self {
        self.signalled = true;
        self
    }

    /// Waits until READs and atomics before it are done (IBTA vol 1, 10.8.3.3).
    #[inline(always)]
    pub fn fence(self) -> Self {
        self.add(sys::IBV_SEND_FENCE)
    }

    #[inline(always)]
    fn add(self, flag: c_uint) -> Self {
        // SAFETY: `wr` points into the queue's array, which lives as long as the batch; it is not posted while the batch is borrowed.
        unsafe { (*self.wr).send_flags |= flag };
        self
    }
}

impl<O: Operation> Drop for Request<'_, O> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.accounting.settle(self.position, self.signalled) {
            // SAFETY: as in `add`.
            unsafe { (*self.wr).send_flags |= sys::IBV_SEND_SIGNALED }
        }
    }
}

impl<O: Immediate> Request<'_, O> {
    /// Carries 32 bits to the peer's completion. A WRITE then consumes a receive of the peer's.
    #[inline(always)]
    pub fn imm(self, imm: u32) -> Self {
        // SAFETY: as in `add`.
        unsafe {
            (*self.wr).opcode = O::WITH_IMMEDIATE;
            (*self.wr).anon_1.imm_data = imm.to_be();
        }
        self
    }

    /// Wakes a peer that waits for solicited completions (IBTA vol 1, 9.2.3); on a WRITE only with [`imm`](Self::imm).
    #[inline(always)]
    pub fn solicited(self) -> Self {
        self.add(sys::IBV_SEND_SOLICITED)
    }
}

/// The receives of one call, being built: see [`QueuePair::post_receives`](crate::QueuePair::post_receives).
pub struct ReceiveBatch<'q, T: Transport = Rc> {
    staging: Staging<'q, sys::ibv_recv_wr>,
    transport: PhantomData<T>,
}

impl<T: Transport> ReceiveBatch<'_, T> {
    #[inline(always)]
    pub(super) fn post<F>(poster: &mut Poster<sys::ibv_recv_wr>, build: F) -> Result<(), Refused>
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

    /// Posts one receive, by a shorter way than a batch of one.
    #[inline(always)]
    pub(super) fn post_one(poster: &mut Poster<sys::ibv_recv_wr>, buffer: impl Sink) -> Result<(), Refused> {
        let payload = One::new(buffer);
        if !(poster.has_room() && payload.bytes() >= T::HEADROOM) {
            return receive_one_as_batch::<T>(poster, payload);
        }
        // SAFETY: there is room. A receive has nothing but its list, here of one element.
        match unsafe { poster.post_one(|_| {}, payload) } {
            0 => Ok(()),
            result => Err(poster.take_back_one(result)),
        }
    }

    /// Receives a message into `buffer`; a longer one is an error on both sides. A datagram comes behind [`GRH_BYTES`](crate::GRH_BYTES) bytes of header.
    #[inline(always)]
    pub fn receive(&mut self, buffer: impl Sink) {
        self.stage(One::new(buffer));
    }

    /// Receives a message into several buffers, one filled after the other.
    #[inline(always)]
    pub fn receive_scatter<S: Sink, const N: usize>(&mut self, buffers: [S; N]) {
        self.stage(Several::new(buffers));
    }

    #[inline(always)]
    fn stage<P: Payload>(&mut self, payload: P) {
        let limits = Limits {
            max_inline: 0,
            max_sge: self.staging.max_sge(),
        };
        let fits = payload.admits(limits) && payload.bytes() >= T::HEADROOM;
        let payload = if fits && self.staging.has_room() {
            payload
        } else {
            let position = self.staging.next();
            match reconsider_receive(self.staging.poster(), position, payload, limits, T::HEADROOM) {
                Some(payload) => payload,
                None => return,
            }
        };
        // SAFETY: there is room, and the limits were kept to. A receive has nothing but its list.
        unsafe { self.staging.push(|_| {}, payload) };
    }
}

/// As [`post_one_as_batch`].
#[cold]
#[inline(never)]
fn receive_one_as_batch<T: Transport>(
    poster: &mut Poster<sys::ibv_recv_wr>,
    payload: One<impl Sink>,
) -> Result<(), Refused> {
    ReceiveBatch::<T>::post(poster, |batch| batch.stage(payload))
}

/// As [`reconsider_send`].
#[cold]
#[inline(never)]
fn reconsider_receive<P: Payload>(
    poster: &mut Poster<sys::ibv_recv_wr>,
    position: u64,
    payload: P,
    limits: Limits,
    headroom: u64,
) -> Option<P> {
    let len = payload.bytes();
    let short = (len < headroom).then_some(Reason::NoRoomForHeader { len });
    let reason = payload.check(limits).or(short);
    poster.reconsider(position, reason, payload)
}

impl<T: Transport> core::fmt::Debug for Batch<'_, '_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Batch")
            .field("next", &self.staging.next())
            .finish_non_exhaustive()
    }
}

impl<T: Transport> core::fmt::Debug for ReceiveBatch<'_, T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ReceiveBatch")
            .field("next", &self.staging.next())
            .finish_non_exhaustive()
    }
}

impl<O: Operation> core::fmt::Debug for Request<'_, O> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Request")
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}
