//! A queue pair in use: connected, or ready for datagrams.

use doorbell_verbs_sys as sys;

use super::backend::{Backend, PostList, Receives};
use super::batch::{Batch, ReceiveBatch, post_one};
use super::endpoint::{Endpoint, UdEndpoint};
use super::object::QpObject;
use super::post_error::Refused;
use super::poster::Poster;
use super::transport::{Connected, Connectionless, OwnReceives, Rc, Reliable, Transport};
use crate::ah::AddressHandle;
use crate::memory::{GrantsRead, GrantsWrite, Remote, RemoteWord, Sink, Source, Word};
use crate::types::{Mtu, QKey, Qpn};
use crate::wr::op::{self, UNBOUNDED};
use crate::wr::payload::{Inline, One};

/// What a UD queue pair asks of a datagram and its address handle; all zero for others.
#[derive(Default)]
pub(super) struct UdLimits {
    /// The address of the protection domain, to compare.
    pub(super) pd: usize,
    pub(super) port: u8,
    /// The longest message in bytes.
    pub(super) max_len: u32,
}

impl UdLimits {
    /// The operation that sends to `ah`, and the room for its message; one that is refused, if the handle is not the queue pair's to use.
    #[inline(always)]
    pub(super) fn send_to(&self, ah: &AddressHandle, qpn: Qpn, qkey: QKey) -> (op::SendTo, u64) {
        let raw = if ah.serves(self.pd, self.port) {
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

/// A queue pair in use: requests go out by [`post`](Self::post) and its short forms, receives by [`post_receives`](Self::post_receives), and what became of
/// them comes from the completion queues given when it was made (IBTA vol 1, 10.2.4).
///
/// Sends are unsignalled unless they say otherwise: their buffers come back with the next signalled one's completion. At the latest every half queue the
/// library signals one by itself, so that the queue never stands still.
///
/// What it can be asked for depends on its [`Transport`]: [`Rc`] has all operations, [`Uc`](crate::Uc) SEND and WRITE, and [`Ud`](crate::Ud) SEND to any number of peers.
///
/// Dropping it takes it to the error state and destroys it; the buffers it has in flight are dropped when its completion queues are next polled (or dropped).
pub struct QueuePair<T: Transport = Rc, B: Backend = PostList> {
    // Before the object: they point into the queue pair.
    pub(super) send: Poster<B>,
    recv: Poster<Receives>,
    pub(super) object: QpObject,
    pub(super) link: T::Link,
}

impl<T: Transport, B: Backend> QueuePair<T, B> {
    pub(super) fn new(send: Poster<B>, recv: Poster<Receives>, object: QpObject, link: T::Link) -> Self {
        Self {
            send,
            recv,
            object,
            link,
        }
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_qp {
        self.object.raw()
    }

    /// Posts all the requests that `build` makes, by one call of the device: one doorbell (ibv_post_send(3)).
    ///
    /// Nothing is posted unless all of them fit the queue and their targets.
    ///
    /// # Errors
    /// When a request is refused, here (then none is posted) or by the device (then those before it are). The buffers come back with the error.
    #[inline(always)]
    pub fn post<'d>(&mut self, build: impl for<'q> FnOnce(&mut Batch<'q, 'd, T, B>)) -> Result<(), Refused> {
        Batch::post(&mut self.send, build)
    }

    /// Its number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.object.qpn()
    }

    /// How many bytes a request may carry inline: as many as asked for, or more.
    #[must_use]
    pub fn max_inline(&self) -> u32 {
        self.send.limits.max_inline
    }

    /// How many requests have been posted to the send queue: the [`sequence`](crate::Completion::sequence) of the next one.
    #[must_use]
    pub fn next_send(&self) -> u64 {
        self.send.head()
    }

    /// How many more requests the send queue takes now.
    #[must_use]
    pub fn send_room(&self) -> u32 {
        self.send.depth() - self.send.in_flight()
    }
}

impl<T: OwnReceives, B: Backend> QueuePair<T, B> {
    /// Posts all the receives that `build` makes, by one call of the device (ibv_post_recv(3)). Messages fill them in this order.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn post_receives(&mut self, build: impl for<'q> FnOnce(&mut ReceiveBatch<'q, T>)) -> Result<(), Refused> {
        ReceiveBatch::post(&mut self.recv, build)
    }

    /// Posts one receive.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn receive(&mut self, buffer: impl Sink) -> Result<(), Refused> {
        ReceiveBatch::<T>::post_one(&mut self.recv, buffer)
    }

    /// How many receives have been posted: the [`sequence`](crate::Completion::sequence) of the next one.
    #[must_use]
    pub fn next_receive(&self) -> u64 {
        self.recv.head()
    }

    /// How many more receives it takes now.
    #[must_use]
    pub fn receive_room(&self) -> u32 {
        self.recv.depth() - self.recv.in_flight()
    }
}

impl<T: Connectionless, B: Backend> QueuePair<T, B> {
    /// Posts one SEND of the buffer's bytes to the queue pair `qpn` at `ah`, which receives it if `qkey` is its key. At most [`max_datagram`](Self::max_datagram) bytes.
    ///
    /// # Errors
    /// As for [`post`](Self::post), and when the handle is of another protection domain or port.
    #[inline(always)]
    pub fn send_to(&mut self, buffer: impl Source, ah: &AddressHandle, qpn: Qpn, qkey: QKey) -> Result<(), Refused> {
        let (op, room) = self.send.ud.send_to(ah, qpn, qkey);
        post_one(&mut self.send, op, room, One::new(buffer))
    }

    /// Posts one SEND of `bytes`, which may be changed at once, as [`send_to`](Self::send_to) does.
    ///
    /// # Errors
    /// As for [`send_to`](Self::send_to).
    #[inline(always)]
    pub fn send_to_inline(&mut self, bytes: &[u8], ah: &AddressHandle, qpn: Qpn, qkey: QKey) -> Result<(), Refused> {
        let (op, room) = self.send.ud.send_to(ah, qpn, qkey);
        post_one(&mut self.send, op, room, Inline::new(bytes))
    }

    /// What others must know to send to it.
    #[must_use]
    pub fn endpoint(&self) -> UdEndpoint {
        self.link
    }

    /// The longest message that it sends, in bytes: one packet. What it sends to may take less.
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
    pub fn send(&mut self, buffer: impl Source) -> Result<(), Refused> {
        post_one(&mut self.send, op::Send, UNBOUNDED, One::new(buffer))
    }

    /// Posts one SEND of `bytes`, which may be changed at once.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn send_inline(&mut self, bytes: &[u8]) -> Result<(), Refused> {
        post_one(&mut self.send, op::Send, UNBOUNDED, Inline::new(bytes))
    }

    /// Posts one RDMA WRITE to the beginning of `remote`.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn write(&mut self, buffer: impl Source, remote: Remote<impl GrantsWrite>) -> Result<(), Refused> {
        post_one(&mut self.send, op::Write::new(remote), remote.len(), One::new(buffer))
    }

    /// Posts one RDMA WRITE of `bytes`, which may be changed at once, to the beginning of `remote`.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn write_inline(&mut self, bytes: &[u8], remote: Remote<impl GrantsWrite>) -> Result<(), Refused> {
        post_one(&mut self.send, op::Write::new(remote), remote.len(), Inline::new(bytes))
    }

    /// What it is connected to.
    #[must_use]
    pub fn peer(&self) -> &Endpoint {
        &self.link.peer
    }

    /// The path MTU in use: the smaller of the two ends'.
    #[must_use]
    pub fn mtu(&self) -> Mtu {
        self.link.mtu
    }
}

impl<T: Reliable, B: Backend> QueuePair<T, B> {
    /// Posts one RDMA READ from the beginning of `remote`, as many bytes as `buffer` has.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn read(&mut self, buffer: impl Sink, remote: Remote<impl GrantsRead>) -> Result<(), Refused> {
        post_one(&mut self.send, op::Read::new(remote), remote.len(), One::new(buffer))
    }

    /// Posts one compare-and-swap; the old value comes back in `word`.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn compare_swap(&mut self, word: Word, at: RemoteWord, compare: u64, swap: u64) -> Result<(), Refused> {
        let op = op::CompareSwap {
            word: at,
            compare,
            swap,
        };
        post_one(&mut self.send, op, UNBOUNDED, One::new(word))
    }

    /// Posts one fetch-and-add; the old value comes back in `word`.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn fetch_add(&mut self, word: Word, at: RemoteWord, add: u64) -> Result<(), Refused> {
        post_one(
            &mut self.send,
            op::FetchAdd { word: at, add },
            UNBOUNDED,
            One::new(word),
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
