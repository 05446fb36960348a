//! The two work queues of a queue pair as values of their own, for two threads.
//!
//! A poster owns all that posting needs: its ring, its WQE slots, the pointer to the queue pair. So
//! the halves share nothing that posting writes; the provider has a lock for each work queue
//! anyway. What they share is [`QpObject`], by reference count.

use core::marker::PhantomData;
use std::sync::Arc;

use super::backend::{Backend, PostList, Receives};
use super::connected::QueuePair;
use super::object::QpObject;
use super::post_error::PostError;
use super::poster::Poster;
use super::receive::ReceiveBatch;
use super::transport::{HasReceiveQueue, ReliableConnection, SendHalf};
use crate::memory::Sink;
use crate::types::Qpn;

/// The receive queue of a queue pair that was [`split`](QueuePair::split).
///
/// Dropping it destroys the queue pair if the send half is gone.
pub struct ReceiveHalf<T: HasReceiveQueue = ReliableConnection> {
    // Before the object: it points into the queue pair.
    recv: Poster<Receives>,
    object: Arc<QpObject>,
    transport: PhantomData<T>,
}

/// Two halves that are not of one queue pair.
#[derive(thiserror::Error)]
#[error("the halves of two queue pairs, {} and {}", .send.qpn(), .receive.qpn())]
pub struct RejoinError<T: HasReceiveQueue = ReliableConnection, B: Backend = PostList> {
    /// The send half, as it was given.
    pub send: Box<QueuePair<SendHalf<T>, B>>,
    /// The receive half, as it was given.
    pub receive: Box<ReceiveHalf<T>>,
}

impl<T: HasReceiveQueue, B: Backend> QueuePair<T, B> {
    /// Its send and its receive queue, for two threads, which post without waiting for each other.
    ///
    /// The send half has all that a queue pair has, except for receives. The queue pair lives until
    /// both are dropped: while one is left, the other's requests in flight complete, and a peer's
    /// messages are received into what was posted. To end it, [`flush`](Self::flush) by the send
    /// half, which completes all receives with errors.
    ///
    /// ```
    /// # use doorbell_verbs::*;
    /// # fn example(qp: QueuePair, buffers: Vec<Buffer>) -> Result<(), Box<dyn std::error::Error>> {
    /// let (mut send, mut receive) = qp.split();
    /// let receiver = std::thread::spawn(move || {
    ///     for buffer in buffers {
    ///         receive.receive(buffer)?;
    ///     }
    ///     Ok::<_, PostError>(receive)
    /// });
    /// send.send_inline(b"hello")?;
    /// let receive = receiver.join().unwrap()?;
    /// let qp = send.rejoin(receive)?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn split(self) -> (QueuePair<SendHalf<T>, B>, ReceiveHalf<T>) {
        let Self {
            send,
            recv,
            object,
            link,
        } = self;
        let receive = ReceiveHalf {
            recv,
            object: Arc::clone(&object),
            transport: PhantomData,
        };
        let half = QueuePair {
            send,
            recv: Poster::of_no_queue(object.raw()),
            object,
            link,
        };
        (half, receive)
    }
}

impl<T: HasReceiveQueue, B: Backend> QueuePair<SendHalf<T>, B> {
    /// Undoes [`split`](QueuePair::split).
    ///
    /// # Errors
    /// When the halves are not of one queue pair.
    pub fn rejoin(self, half: ReceiveHalf<T>) -> Result<QueuePair<T, B>, RejoinError<T, B>> {
        if !Arc::ptr_eq(&self.object, &half.object) {
            return Err(RejoinError {
                send: Box::new(self),
                receive: Box::new(half),
            });
        }
        Ok(QueuePair {
            send: self.send,
            recv: half.recv,
            object: self.object,
            link: self.link,
        })
    }
}

impl<T: HasReceiveQueue> ReceiveHalf<T> {
    /// Posts receives: see [`QueuePair::post_receives`].
    ///
    /// # Errors
    /// See [`QueuePair::post_receives`].
    #[inline(always)]
    #[doc(alias = "ibv_post_recv")]
    pub fn post_receives(&mut self, build: impl for<'q> FnOnce(&mut ReceiveBatch<'q, T>)) -> Result<(), PostError> {
        ReceiveBatch::post(&mut self.recv, build)
    }

    /// Posts one receive.
    ///
    /// # Errors
    /// See [`QueuePair::post_receives`].
    #[inline(always)]
    #[doc(alias = "ibv_post_recv")]
    pub fn receive(&mut self, buffer: impl Sink) -> Result<(), PostError> {
        ReceiveBatch::<T>::post_one(&mut self.recv, buffer)
    }

    /// The number of its queue pair.
    #[must_use]
    #[doc(alias = "qp_num")]
    pub fn qpn(&self) -> Qpn {
        self.object.qpn()
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

impl<T: HasReceiveQueue> core::fmt::Debug for ReceiveHalf<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ReceiveHalf")
            .field("qpn", &self.qpn())
            .finish_non_exhaustive()
    }
}

impl<T: HasReceiveQueue, B: Backend> core::fmt::Debug for RejoinError<T, B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("RejoinError")
            .field("send", &self.send)
            .field("receive", &self.receive)
            .finish()
    }
}
