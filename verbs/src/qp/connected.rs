//! A connected queue pair.

use core::ffi::c_int;

use doorbell_verbs_sys as sys;

use super::attributes::QpState;
use super::batch::{Batch, ReceiveBatch};
use super::endpoint::Endpoint;
use super::object::{QpObject, no_attributes};
use super::refused::Refused;
use super::staging::Poster;
use super::transport::{Connected, Rc, Reliable, Transport};
use crate::error::QueuePairError;
use crate::memory::{GrantsRead, GrantsWrite, Remote, RemoteWord, Sink, Source, Word};
use crate::types::{Mtu, Qpn};
use crate::wr::op;
use crate::wr::payload::{Inline, Limits, One};

/// The send queue's poster, and the accounting of its signalled requests.
pub(crate) struct SendSide {
    pub(super) poster: Poster<sys::ibv_send_wr>,
    pub(super) accounting: Accounting,
}

/// Which requests are signalled, and what a request may have.
pub(super) struct Accounting {
    pub(super) limits: Limits,
    /// The position whose request is signalled in any case: `interval` after the last one signalled.
    signal_at: u64,
    interval: u64,
}

impl SendSide {
    pub(super) fn new(poster: Poster<sys::ibv_send_wr>, max_inline: u32, signal_all: bool) -> Self {
        let limits = Limits {
            max_inline,
            max_sge: poster.max_sge,
        };
        // Half the queue: when it is full, at least one completion is on its way, and frees at least half of it. With signal_all the device signals.
        let interval = if signal_all {
            u64::MAX / 2
        } else {
            u64::from(poster.depth() / 2).max(1)
        };
        Self {
            poster,
            accounting: Accounting {
                limits,
                signal_at: interval - 1,
                interval,
            },
        }
    }
}

impl SendSide {
    /// Takes back the one request just posted, which the provider refused.
    #[cold]
    #[inline(never)]
    pub(super) fn take_back_one(&mut self, result: c_int) -> Refused {
        let refused = self.poster.take_back_one(result);
        self.accounting.forget_from(self.poster.head());
        refused
    }
}

impl Accounting {
    /// Whether the request at `position` is signalled: if it `asked` for it, or must be.
    #[inline(always)]
    pub(super) fn settle(&mut self, position: u64, asked: bool) -> bool {
        let signalled = asked || position >= self.signal_at;
        if signalled {
            self.signal_at = position + self.interval;
        }
        signalled
    }

    /// The requests from `head` on were not posted. If one of them was signalled, it is not known which was before it: the next one is, to be safe.
    pub(super) fn forget_from(&mut self, head: u64) {
        if self.signal_at >= head + self.interval {
            self.signal_at = head;
        }
    }
}

/// A connected queue pair: requests go out by [`post`](Self::post) and its short forms, receives by [`post_receives`](Self::post_receives), and what became of
/// them comes from the completion queues given when it was made.
///
/// Sends are unsignalled unless they say otherwise: their buffers come back with the next signalled one's completion. At the latest every half queue the
/// library signals one by itself, so that the queue never stands still.
///
/// Dropping it takes it to the error state and destroys it; the buffers it has in flight are dropped when its completion queues are next polled (or dropped).
pub struct QueuePair<T: Transport = Rc> {
    // Before the object: they point into the queue pair.
    send: SendSide,
    recv: Poster<sys::ibv_recv_wr>,
    object: QpObject,
    link: T::Link,
}

impl<T: Transport> QueuePair<T> {
    pub(super) fn new(send: SendSide, recv: Poster<sys::ibv_recv_wr>, object: QpObject, link: T::Link) -> Self {
        Self {
            send,
            recv,
            object,
            link,
        }
    }

    /// Posts all the requests that `build` makes, by one call of the device: one doorbell (ibv_post_send(3)).
    ///
    /// Nothing is posted unless all of them fit the queue and their targets.
    ///
    /// # Errors
    /// When a request is refused, here (then none is posted) or by the device (then those before it are). The buffers come back with the error.
    #[inline(always)]
    pub fn post<'d>(&mut self, build: impl for<'q> FnOnce(&mut Batch<'q, 'd, T>)) -> Result<(), Refused> {
        Batch::post(&mut self.send, build)
    }

    /// Posts all the receives that `build` makes, by one call of the device (ibv_post_recv(3)). Messages fill them in this order.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn post_receives(&mut self, build: impl for<'q> FnOnce(&mut ReceiveBatch<'q>)) -> Result<(), Refused> {
        ReceiveBatch::post(&mut self.recv, build)
    }

    /// Posts one receive.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn receive(&mut self, buffer: impl Sink) -> Result<(), Refused> {
        ReceiveBatch::post_one(&mut self.recv, buffer)
    }

    /// Its number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.object.qpn()
    }

    /// How many bytes a request may carry inline: as many as asked for, or more.
    #[must_use]
    pub fn max_inline(&self) -> u32 {
        self.send.accounting.limits.max_inline
    }

    /// How many requests have been posted to the send queue: the [`sequence`](crate::Completion::sequence) of the next one.
    #[must_use]
    pub fn next_send(&self) -> u64 {
        self.send.poster.head()
    }

    /// How many receives have been posted: the [`sequence`](crate::Completion::sequence) of the next one.
    #[must_use]
    pub fn next_receive(&self) -> u64 {
        self.recv.head()
    }

    /// How many more requests the send queue takes now.
    #[must_use]
    pub fn send_room(&self) -> u32 {
        self.send.poster.depth() - self.send.poster.in_flight()
    }

    /// How many more receives it takes now.
    #[must_use]
    pub fn receive_room(&self) -> u32 {
        self.recv.depth() - self.recv.in_flight()
    }

    /// The state it is in (ibv_query_qp(3)): the device may enter ERR by itself.
    ///
    /// # Errors
    /// When the device cannot be asked.
    pub fn state(&self) -> Result<QpState, QueuePairError> {
        self.object.state()
    }

    /// Takes it to the error state: all that is in flight completes, as [`Flushed`](crate::Status::Flushed) unless it was done.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn flush(&mut self) -> Result<(), QueuePairError> {
        self.object
            .modify((QpState::Rts, QpState::Err), no_attributes(), 0, |_| Vec::new())
    }
}

impl<T: Connected> QueuePair<T> {
    /// Posts one SEND.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn send(&mut self, buffer: impl Source) -> Result<(), Refused> {
        Batch::<T>::post_one(&mut self.send, op::Send, One::new(buffer))
    }

    /// Posts one SEND of `bytes`, which may be changed at once.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn send_inline(&mut self, bytes: &[u8]) -> Result<(), Refused> {
        Batch::<T>::post_one(&mut self.send, op::Send, Inline::new(bytes))
    }

    /// Posts one RDMA WRITE to the beginning of `remote`.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn write(&mut self, buffer: impl Source, remote: Remote<impl GrantsWrite>) -> Result<(), Refused> {
        Batch::<T>::post_one(&mut self.send, op::Write::new(remote), One::new(buffer))
    }

    /// Posts one RDMA WRITE of `bytes`, which may be changed at once, to the beginning of `remote`.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn write_inline(&mut self, bytes: &[u8], remote: Remote<impl GrantsWrite>) -> Result<(), Refused> {
        Batch::<T>::post_one(&mut self.send, op::Write::new(remote), Inline::new(bytes))
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

impl<T: Reliable> QueuePair<T> {
    /// Posts one RDMA READ from the beginning of `remote`, as many bytes as `buffer` has.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn read(&mut self, buffer: impl Sink, remote: Remote<impl GrantsRead>) -> Result<(), Refused> {
        Batch::<T>::post_one(&mut self.send, op::Read::new(remote), One::new(buffer))
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
        Batch::<T>::post_one(&mut self.send, op, One::new(word))
    }

    /// Posts one fetch-and-add; the old value comes back in `word`.
    ///
    /// # Errors
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub fn fetch_add(&mut self, word: Word, at: RemoteWord, add: u64) -> Result<(), Refused> {
        Batch::<T>::post_one(&mut self.send, op::FetchAdd { word: at, add }, One::new(word))
    }
}

impl<T: Transport> core::fmt::Debug for QueuePair<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("QueuePair")
            .field("qpn", &self.qpn())
            .field("link", &self.link)
            .finish_non_exhaustive()
    }
}
