//! A queue pair in use: connected, or ready for datagrams.

use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::backend::{Backend, PostList, Receives};
use super::batch::{Batch, post_one};
use super::endpoint::{Endpoint, UdEndpoint};
use super::object::QpObject;
use super::post_error::PostError;
use super::poster::Poster;
use super::receive::ReceiveBatch;
use super::transport::{Connected, Connectionless, HasReceiveQueue, Reliable, ReliableConnection, Transport};
use crate::ah::AddressHandle;
use crate::memory::{AtomicWord, GrantsRead, GrantsWrite, Remote, RemoteWord, Sink, Source};
use crate::types::{Mtu, QKey, Qpn};
use crate::wr::op::{self, UNBOUNDED};
use crate::wr::payload::{InlineData, SingleSge};

/// A UD queue pair's limits on datagrams and address handles; zero for other transports.
#[derive(Default)]
pub(super) struct UdLimits {
    /// The address of the protection domain, for comparison.
    pub(super) pd: usize,
    pub(super) port: u8,
    /// The longest message in bytes.
    pub(super) max_len: u32,
}

impl UdLimits {
    /// The handle becomes null, which posting rejects, if of another protection domain or port.
    #[inline(always)]
    pub(super) fn send_to(&self, ah: &AddressHandle, qpn: Qpn, qkey: QKey) -> (op::SendTo, u64) {
        let raw = if ah.is_usable_on(self.pd, self.port) {
            ah.raw()
        } else {
            core::ptr::null_mut()
        };
        let op = op::SendTo {
            ah: raw,
            qpn: qpn.get(),
            qkey: qkey.0,
        };
        (op, self.max_len.min(ah.max_len()).into())
    }
}

/// A queue pair in use, for [`post`](Self::post) and [`post_receives`](Self::post_receives);
/// results come from the completion queues it was made with (IBTA vol 1, 10.2.4).
///
/// Sends are unsignaled by default (selective signaling): buffers come back with the next signaled
/// completion. At least one request per half queue is signaled, so that it never stalls.
///
/// Its [`Transport`] decides which operations it has: [`ReliableConnection`] all,
/// [`UnreliableConnection`](crate::UnreliableConnection) SEND and WRITE,
/// [`UnreliableDatagram`](crate::UnreliableDatagram) SEND to any number of peers.
///
/// Dropping destroys it; buffers in flight are dropped when its completion queues are next polled.
#[doc(alias("ibv_qp", "ibv_destroy_qp"))]
pub struct QueuePair<T: Transport = ReliableConnection, B: Backend = PostList> {
    // Before the object: they point into the queue pair.
    pub(super) send: Poster<B>,
    pub(super) recv: Poster<Receives>,
    pub(super) object: Arc<QpObject>,
    pub(super) link: T::Link,
}

impl<T: Transport, B: Backend> QueuePair<T, B> {
    pub(super) fn new(send: Poster<B>, recv: Poster<Receives>, object: QpObject, link: T::Link) -> Self {
        Self {
            send,
            recv,
            object: Arc::new(object),
            link,
        }
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_qp {
        self.object.raw()
    }

    /// Posts all requests that `build` makes, by one doorbell (ibv_post_send(3)).
    ///
    /// Nothing is posted unless all of them fit the queue and their targets.
    ///
    /// # Errors
    /// When a request is rejected, here (then none is posted) or by the device (then those before
    /// it are). The buffers come back with the error.
    #[inline(always)]
    #[doc(alias("ibv_post_send", "ibv_wr_start", "ibv_wr_complete", "post_list"))]
    pub fn post<'d>(&mut self, build: impl for<'q> FnOnce(&mut Batch<'q, 'd, T, B>)) -> Result<(), PostError> {
        Batch::post(&mut self.send, build)
    }

    /// Its queue pair number.
    #[must_use]
    #[doc(alias = "qp_num")]
    pub fn qpn(&self) -> Qpn {
        self.object.qpn()
    }

    /// The most bytes that a request may carry inline: as many as requested, or more.
    #[must_use]
    pub fn max_inline_data(&self) -> u32 {
        self.send.limits.max_inline
    }

    /// The [`sequence`](crate::Completion::sequence) of the send request posted next.
    #[must_use]
    pub fn next_send(&self) -> u64 {
        self.send.head()
    }

    /// Free slots of the send queue.
    #[must_use]
    #[doc(alias = "max_send_wr")]
    pub fn free_send_slots(&self) -> u32 {
        self.send.depth() - self.send.in_flight()
    }
}

impl<T: HasReceiveQueue, B: Backend> QueuePair<T, B> {
    /// Posts all receives that `build` makes, consumed in order, by one call (ibv_post_recv(3)).
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    #[doc(alias = "ibv_post_recv")]
    pub fn post_receives(&mut self, build: impl for<'q> FnOnce(&mut ReceiveBatch<'q, T>)) -> Result<(), PostError> {
        ReceiveBatch::post(&mut self.recv, build)
    }

    /// Posts one receive.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    #[doc(alias("ibv_post_recv", "ibv_recv_wr"))]
    pub fn receive(&mut self, buffer: impl Sink) -> Result<(), PostError> {
        ReceiveBatch::<T>::post_one(&mut self.recv, buffer)
    }

    /// The [`sequence`](crate::Completion::sequence) of the receive posted next.
    #[must_use]
    pub fn next_receive(&self) -> u64 {
        self.recv.head()
    }

    /// Free slots of the receive queue.
    #[must_use]
    #[doc(alias = "max_recv_wr")]
    pub fn free_receive_slots(&self) -> u32 {
        self.recv.depth() - self.recv.in_flight()
    }
}

impl<T: Connectionless, B: Backend> QueuePair<T, B> {
    /// Posts one SEND of the buffer's bytes to the queue pair `qpn` at `ah`, which accepts it if
    /// `qkey` is its Q_Key. At most [`max_datagram`](Self::max_datagram) bytes.
    ///
    /// # Errors
    /// As for [`post`](Self::post), and when the handle is of another protection domain or port.
    #[inline(always)]
    #[doc(alias("IBV_WR_SEND", "ibv_post_send"))]
    pub fn send_to(&mut self, buffer: impl Source, ah: &AddressHandle, qpn: Qpn, qkey: QKey) -> Result<(), PostError> {
        let (op, room) = self.send.ud.send_to(ah, qpn, qkey);
        post_one(&mut self.send, op, room, SingleSge::new(buffer))
    }

    /// As [`send_to`](Self::send_to), of `bytes` inline: they may be reused at once.
    ///
    /// # Errors
    /// As for [`send_to`](Self::send_to).
    #[inline(always)]
    #[doc(alias("IBV_WR_SEND", "IBV_SEND_INLINE"))]
    pub fn send_to_inline(&mut self, bytes: &[u8], ah: &AddressHandle, qpn: Qpn, qkey: QKey) -> Result<(), PostError> {
        let (op, room) = self.send.ud.send_to(ah, qpn, qkey);
        post_one(&mut self.send, op, room, InlineData::new(bytes))
    }

    /// The address that peers need to send to it.
    #[must_use]
    pub fn endpoint(&self) -> UdEndpoint {
        self.link
    }

    /// The longest message that it sends, in bytes: one packet. The destination may take less.
    #[must_use]
    pub fn max_datagram(&self) -> u32 {
        self.send.ud.max_len
    }
}

impl<T: Connected, B: Backend> QueuePair<T, B> {
    /// Posts one SEND.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    #[doc(alias("IBV_WR_SEND", "ibv_post_send", "rdma_post_send"))]
    pub fn send(&mut self, buffer: impl Source) -> Result<(), PostError> {
        post_one(&mut self.send, op::SendOp, UNBOUNDED, SingleSge::new(buffer))
    }

    /// Posts one SEND of `bytes` inline: they may be reused at once.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    #[doc(alias("IBV_WR_SEND", "IBV_SEND_INLINE"))]
    pub fn send_inline(&mut self, bytes: &[u8]) -> Result<(), PostError> {
        post_one(&mut self.send, op::SendOp, UNBOUNDED, InlineData::new(bytes))
    }

    /// Posts one RDMA WRITE to the beginning of `remote`.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    #[doc(alias("IBV_WR_RDMA_WRITE", "ibv_post_send", "rdma_post_write"))]
    pub fn write(&mut self, buffer: impl Source, remote: Remote<impl GrantsWrite>) -> Result<(), PostError> {
        post_one(
            &mut self.send,
            op::RdmaWrite::new(remote),
            remote.len(),
            SingleSge::new(buffer),
        )
    }

    /// As [`write`](Self::write), of `bytes` inline: they may be reused at once.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    #[doc(alias("IBV_WR_RDMA_WRITE", "IBV_SEND_INLINE"))]
    pub fn write_inline(&mut self, bytes: &[u8], remote: Remote<impl GrantsWrite>) -> Result<(), PostError> {
        post_one(
            &mut self.send,
            op::RdmaWrite::new(remote),
            remote.len(),
            InlineData::new(bytes),
        )
    }

    /// The peer's endpoint.
    #[must_use]
    #[doc(alias = "dest_qp_num")]
    pub fn peer(&self) -> &Endpoint {
        &self.link.peer
    }

    /// The path MTU in use: the smaller of both ends'.
    #[must_use]
    #[doc(alias = "path_mtu")]
    pub fn mtu(&self) -> Mtu {
        self.link.mtu
    }
}

impl<T: Reliable, B: Backend> QueuePair<T, B> {
    /// Posts one RDMA READ from the beginning of `remote`, of the buffer's length.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    #[doc(alias("IBV_WR_RDMA_READ", "ibv_post_send", "rdma_post_read"))]
    pub fn read(&mut self, buffer: impl Sink, remote: Remote<impl GrantsRead>) -> Result<(), PostError> {
        post_one(
            &mut self.send,
            op::RdmaRead::new(remote),
            remote.len(),
            SingleSge::new(buffer),
        )
    }

    /// Posts one compare-and-swap; `word` returns with the old value.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    #[doc(alias = "IBV_WR_ATOMIC_CMP_AND_SWP")]
    pub fn compare_swap(&mut self, word: AtomicWord, at: RemoteWord, compare: u64, swap: u64) -> Result<(), PostError> {
        let op = op::CompareSwap {
            word: at,
            compare,
            swap,
        };
        post_one(&mut self.send, op, UNBOUNDED, SingleSge::new(word))
    }

    /// Posts one fetch-and-add; `word` returns with the old value.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    #[doc(alias = "IBV_WR_ATOMIC_FETCH_AND_ADD")]
    pub fn fetch_add(&mut self, word: AtomicWord, at: RemoteWord, add: u64) -> Result<(), PostError> {
        post_one(
            &mut self.send,
            op::FetchAdd { word: at, add },
            UNBOUNDED,
            SingleSge::new(word),
        )
    }
}

impl<T: Transport, B: Backend> core::fmt::Debug for QueuePair<T, B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("QueuePair")
            .field("qpn", &self.qpn())
            .field("link", &self.link)
            .finish_non_exhaustive()
    }
}
