//! Work completions: a request's result, and its buffers.

use doorbell_verbs_sys as sys;

use super::datagram::Datagram;
use super::status::{CompletionError, CompletionStatus};
use crate::cq::{ClassicCq, CqKind, Entry, ExtendedCq, Retired};
use crate::memory::{
    AtomicWord, BoundWindow, Buffer, Buffers, Invalidation, KeyAccess, MemoryKind, MemoryWindow, WindowType,
};
use crate::qp::{QueueKind, Ring};
use crate::types::{Qpn, RKey};

/// The operation that succeeded (`ibv_wc_opcode`; ibv_poll_cq(3); IBTA vol 1, 11.4.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias = "ibv_wc_opcode")]
pub enum Success {
    /// The peer has received the message.
    #[doc(alias = "IBV_WC_SEND")]
    Send,
    /// The peer's device has the data.
    #[doc(alias = "IBV_WC_RDMA_WRITE")]
    Write,
    /// The data is in the request's buffers.
    #[doc(alias = "IBV_WC_RDMA_READ")]
    Read,
    /// The old value is in the request's word.
    #[doc(alias = "IBV_WC_COMP_SWAP")]
    CompareSwap,
    /// The old value is in the request's word.
    #[doc(alias = "IBV_WC_FETCH_ADD")]
    FetchAdd,
    /// The window is bound: see [`Completion::take_bound_window`].
    #[doc(alias = "IBV_WC_BIND_MW")]
    Bind,
    /// The window's key is invalid now: see [`Completion::take_window`].
    #[doc(alias = "IBV_WC_LOCAL_INV")]
    Invalidate,
    /// A message has arrived in the request's buffers.
    #[doc(alias = "IBV_WC_RECV")]
    Receive {
        /// Its length in bytes; of a datagram with its GRH (see [`Completion::datagram`]).
        len: u32,
        /// Immediate data, if it carried any.
        imm: Option<u32>,
    },
    /// A peer's RDMA WRITE with immediate data has consumed the receive; its buffers are untouched.
    #[doc(alias = "IBV_WC_RECV_RDMA_WITH_IMM")]
    ReceiveWrite {
        /// The length of the data written, in bytes.
        len: u32,
        /// The immediate data.
        imm: u32,
    },
    /// An unsignaled request, retired by a later one's completion.
    Confirmed,
    /// Another operation, with the code of `ibv_wc_opcode`.
    Other(u32),
}

/// A retired request (`ibv_wc`; IBTA vol 1, 11.4.2.1); buffers not taken are dropped with it.
#[must_use = "a completion says whether the request succeeded"]
#[doc(alias = "ibv_wc")]
pub struct Completion<'a, Q: CqKind = ClassicCq> {
    /// Its completion, or that of the later request which retires it.
    entry: Q::Entry<'a>,
    ring: &'a Ring,
    position: u64,
    buffers: Buffers,
}

impl<'a, Q: CqKind> Completion<'a, Q> {
    #[inline(always)]
    pub(crate) fn new(entry: Q::Entry<'a>, retired: Retired<'a>, buffers: Buffers) -> Self {
        Self {
            entry,
            ring: retired.ring,
            position: retired.position,
            buffers,
        }
    }

    /// The request's result.
    ///
    /// # Errors
    /// When it failed: in ERR all later requests complete as [`CompletionStatus::Flushed`].
    #[inline]
    pub fn result(&self) -> Result<Success, CompletionError> {
        self.check()?;
        if self.is_confirmed() {
            return Ok(Success::Confirmed);
        }
        let imm = || u32::from_be(self.entry.imm_data());
        Ok(match self.entry.opcode() {
            sys::IBV_WC_SEND => Success::Send,
            sys::IBV_WC_RDMA_WRITE => Success::Write,
            sys::IBV_WC_RDMA_READ => Success::Read,
            sys::IBV_WC_COMP_SWAP => Success::CompareSwap,
            sys::IBV_WC_FETCH_ADD => Success::FetchAdd,
            sys::IBV_WC_BIND_MW => Success::Bind,
            sys::IBV_WC_LOCAL_INV => Success::Invalidate,
            sys::IBV_WC_RECV => Success::Receive {
                len: self.entry.byte_len(),
                imm: (self.entry.wc_flags() & sys::IBV_WC_WITH_IMM != 0).then(imm),
            },
            sys::IBV_WC_RECV_RDMA_WITH_IMM => Success::ReceiveWrite {
                len: self.entry.byte_len(),
                imm: imm(),
            },
            other => Success::Other(other),
        })
    }

    /// Whether it succeeded: [`result`](Self::result) without decoding, at next to no cost.
    ///
    /// # Errors
    /// As for [`result`](Self::result).
    #[inline]
    pub fn check(&self) -> Result<(), CompletionError> {
        if self.entry.status() != sys::IBV_WC_SUCCESS
            && let Some(failure) = error_of(self.entry, self.ring, self.position)
        {
            return Err(failure);
        }
        Ok(())
    }

    /// Whether the request succeeded.
    #[inline]
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.entry.status() == sys::IBV_WC_SUCCESS || self.is_confirmed()
    }

    #[inline]
    fn is_confirmed(&self) -> bool {
        is_of_later(self.entry, self.ring, self.position)
    }

    /// The queue pair that the request was posted to.
    #[inline]
    #[must_use]
    #[doc(alias = "qp_num")]
    pub fn qpn(&self) -> Qpn {
        self.ring.qpn()
    }

    /// The queue pair's [`QueuePairBuilder::tag`](crate::QueuePairBuilder::tag).
    #[inline]
    #[must_use]
    pub fn tag(&self) -> u64 {
        self.ring.tag()
    }

    /// The work queue that the request was posted to.
    #[inline]
    #[must_use]
    pub fn queue(&self) -> QueueKind {
        self.ring.queue()
    }

    /// The number of requests posted to that queue before this one.
    #[inline]
    #[must_use]
    #[doc(alias = "wr_id")]
    pub fn sequence(&self) -> u64 {
        self.position
    }

    /// The datagram received, if this is a successful receive of a UD queue pair.
    #[inline]
    #[must_use]
    #[doc(alias = "src_qp")]
    pub fn datagram(&self) -> Option<Datagram> {
        match self.result() {
            Ok(Success::Receive { imm, .. }) if self.ring.receives_datagrams() => Some(Datagram::new(self.entry, imm)),
            _ => None,
        }
    }

    /// The rkey that a SEND with invalidate has invalidated: that of a [`BoundWindow`].
    ///
    /// The kernel's rxe of Linux 6.1 invalidates the key, but does not report it here.
    #[must_use]
    #[doc(alias("IBV_WC_WITH_INV", "invalidated_rkey"))]
    pub fn invalidated(&self) -> Option<RKey> {
        let received = self.is_ok() && self.entry.opcode() == sys::IBV_WC_RECV;
        let invalidating = received && self.entry.wc_flags() & sys::IBV_WC_WITH_INV != 0;
        // Unlike immediate data, it is in host order.
        invalidating.then(|| RKey(self.entry.imm_data()))
    }

    /// What proves that a SEND with invalidate has unbound a window: for
    /// [`BoundWindow::invalidated`]. Buffers that were not taken are dropped.
    #[must_use]
    #[doc(alias = "IBV_WC_WITH_INV")]
    pub fn into_invalidation(self) -> Option<Invalidation<'a>> {
        self.invalidated().map(|rkey| Invalidation::new(rkey, self.ring.qp()))
    }

    /// Takes the memory window that the request has bound, if it succeeded.
    pub fn take_bound_window<K: KeyAccess, T: WindowType>(&mut self) -> Option<BoundWindow<K, T>> {
        self.is_ok()
            .then(|| BoundWindow::take(&mut self.buffers, true))
            .flatten()
    }

    /// Takes the memory window that the request has unbound, if it succeeded.
    pub fn take_window<T: WindowType>(&mut self) -> Option<MemoryWindow<T>> {
        self.is_ok()
            .then(|| MemoryWindow::take(&mut self.buffers, true))
            .flatten()
    }

    /// Takes the request's next buffer, if it is a `Buffer<K>` (see [`Buffers::take`]).
    #[inline]
    pub fn take<K: MemoryKind>(&mut self) -> Option<Buffer<K>> {
        self.buffers.take()
    }

    /// Takes the word with an atomic operation's result, the old value.
    #[inline]
    pub fn take_word(&mut self) -> Option<AtomicWord> {
        self.buffers.take_word()
    }

    /// The request's first buffer, if it is a `Buffer<K>`; any others are dropped.
    #[inline]
    #[must_use]
    pub fn into_buffer<K: MemoryKind>(mut self) -> Option<Buffer<K>> {
        self.buffers.take()
    }

    /// All buffers of the request that were not taken yet.
    #[inline]
    #[must_use]
    pub fn into_buffers(self) -> Buffers {
        self.buffers
    }
}

impl Completion<'_, ExtendedCq> {
    /// Completion time in ticks of the device's clock; of the later request for one that it
    /// retires. `None` unless made [with time
    /// stamps](crate::ExtendedCompletionQueueBuilder::timestamps).
    #[inline]
    #[must_use]
    #[doc(alias = "ibv_wc_read_completion_ts")]
    pub fn timestamp_ticks(&self) -> Option<u64> {
        self.entry.ticks()
    }

    /// Completion time in nanoseconds since 1970-01-01 UTC; of the later request for one that it
    /// retires. `None` unless made [with it](crate::ExtendedCompletionQueueBuilder::wallclock).
    #[inline]
    #[must_use]
    #[doc(alias = "ibv_wc_read_completion_wallclock_ns")]
    pub fn wallclock_ns(&self) -> Option<u64> {
        self.entry.wallclock_ns()
    }
}

/// Whether the completion is a later request's: the lower half of its `wr_id` is its own slot.
/// Receives have one each; those of a shared receive queue have no slot in the ring.
#[inline]
fn is_of_later(entry: impl Entry, ring: &Ring, position: u64) -> bool {
    u64::from(entry.slot()) != ring.slot_of(position) && ring.queue() == QueueKind::Send
}

/// The request's own error, if this is its own completion. By value, and off the fast path.
#[cold]
#[inline(never)]
fn error_of(entry: impl Entry, ring: &Ring, position: u64) -> Option<CompletionError> {
    if is_of_later(entry, ring, position) {
        return None;
    }
    Some(CompletionError {
        status: CompletionStatus::from_sys(entry.status()),
        vendor_error: entry.vendor_err(),
        qpn: ring.qpn(),
        queue: ring.queue(),
        sequence: position,
    })
}

impl<Q: CqKind> core::fmt::Debug for Completion<'_, Q> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Completion")
            .field("qpn", &self.qpn())
            .field("queue", &self.queue())
            .field("sequence", &self.position)
            .field("result", &self.result())
            .field("buffers", &self.buffers)
            .finish_non_exhaustive()
    }
}
