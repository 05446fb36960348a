//! The error of posting: which request was rejected, why, and the buffers back.

use core::fmt;
use std::io;

use super::ring::QueueKind;
use super::transport::GRH_BYTES;
use crate::memory::{BoundWindow, Buffers, KeyAccess, MemoryWindow, WindowType};
use crate::srq::SrqId;
use crate::types::Qpn;

/// Why a request was rejected (ibv_post_send(3)).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[doc(alias = "ibv_post_send")]
pub enum RejectReason {
    /// The queue is full: post again when polled completions have freed slots.
    #[error("the queue is full: {depth} requests are in flight or in this batch; poll its completion queue first")]
    QueueFull {
        /// The queue's depth.
        depth: u32,
    },
    /// The message is longer than the remote range.
    #[error(
        "{len} bytes do not fit the {remote} bytes of remote memory named: send less, or have the peer register more"
    )]
    RemoteTooShort {
        /// The message's length in bytes.
        len: u64,
        /// The remote range's length in bytes.
        remote: u64,
    },
    /// More inline data than `max_inline_data` of the queue pair.
    #[error(
        "{len} bytes inline, this queue pair takes {max}: raise max_inline_data in the builder, or send from a buffer"
    )]
    InlineTooLong {
        /// The data's length in bytes.
        len: usize,
        /// The queue pair's limit in bytes.
        max: u32,
    },
    /// More scatter-gather elements than the queue pair allows.
    #[error(
        "{requested} buffers in one request, this queue pair takes {max}: raise max_send_sge or max_recv_sge in the builder"
    )]
    TooManyBuffers {
        /// How many were given.
        requested: usize,
        /// The queue pair's limit.
        max: u32,
    },
    /// The buffers together are longer than a message may be.
    #[error("{len} bytes in one message, at most 2^31 are possible")]
    MessageTooLong {
        /// The message's length in bytes.
        len: u64,
    },
    /// A receive of a UD queue pair without space for the GRH before every datagram.
    #[error(
        "{len} bytes to receive a datagram in, of which {GRH_BYTES} are its header's: make each receive GRH_BYTES longer than the longest message"
    )]
    NoRoomForHeader {
        /// The buffers' length in bytes.
        len: u64,
    },
    /// The message does not fit one packet.
    #[error("{len} bytes in one datagram, the MTU here or at its destination is {max}: send several")]
    DatagramTooLong {
        /// The message's length in bytes.
        len: u64,
        /// The longest possible, in bytes.
        max: u32,
    },
    /// The address handle is of another protection domain or port than the queue pair.
    #[error(
        "the address handle is of another protection domain or port than the queue pair: make it of the same ProtectionDomain, for the port of the builder"
    )]
    ForeignAddressHandle,
    /// The device does not support the operation.
    #[error("the device has no such operation (for atomics, see DeviceAttr::atomics)")]
    Unsupported,
    /// The memory window was deallocated with the queue pair that had bound it.
    #[error("the memory window is gone with the queue pair that bound it: make another one")]
    WindowGone,
    /// The memory window is of another protection domain than the memory.
    #[error(
        "the memory window is of another protection domain than the memory: make both of the same ProtectionDomain"
    )]
    ForeignWindow,
    /// A memory window over no bytes.
    #[error("a memory window was to be bound to no bytes: bind it to one at least, or drop it")]
    EmptyWindow,
    /// The device rejected it.
    #[error("{verb}: {error}; {}", advice(.error))]
    Device {
        /// The verb: ibv_post_send, ibv_post_recv, ibv_post_srq_recv or ibv_wr_complete.
        verb: &'static str,
        /// The provider's error.
        error: io::Error,
    },
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::OutOfMemory => "the device's queue is fuller than our count of it; poll its completion queue",
        io::ErrorKind::InvalidInput => {
            "is the queue pair in a state that posts (state()), and the request within its limits?"
        }
        _ => "see state()",
    }
}

/// The queue that a rejected batch was posted to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PostTarget {
    /// A work queue of this queue pair.
    QueuePair(Qpn, QueueKind),
    /// This shared receive queue.
    Shared(SrqId),
}

impl fmt::Display for PostTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::QueuePair(qpn, QueueKind::Send) => write!(f, "send queue of queue pair {qpn}"),
            Self::QueuePair(qpn, QueueKind::Receive) => write!(f, "receive queue of queue pair {qpn}"),
            Self::Shared(id) => write!(f, "shared receive queue {id}"),
        }
    }
}

/// A rejected batch (`bad_wr`).
///
/// If this library rejected the request, nothing was posted, and [`buffers`](Self::buffers) has
/// all. If the device did, the requests before it are posted; with [`WrPost`](crate::WrPost) none
/// is.
#[derive(Debug, thiserror::Error)]
#[error("{queue}: request {index} of the batch was rejected: {reason}")]
#[non_exhaustive]
#[doc(alias = "bad_wr")]
pub struct RejectedBatch {
    /// The queue.
    pub queue: PostTarget,
    /// Index of the rejected request in the batch.
    pub index: usize,
    /// The reason.
    pub reason: RejectReason,
    /// How many requests of the batch are posted nevertheless.
    pub posted: usize,
    /// The buffers of each unposted request, in order, from number [`posted`](Self::posted) on.
    pub buffers: Vec<Buffers>,
}

impl RejectedBatch {
    /// Takes the next memory window of this type that an unposted request was to bind.
    pub fn take_window<T: WindowType>(&mut self) -> Option<MemoryWindow<T>> {
        self.buffers
            .iter_mut()
            .find_map(|buffers| MemoryWindow::take(buffers, false))
    }

    /// Takes the next bound window of this type and rights that an unposted request was to unbind.
    pub fn take_bound_window<K: KeyAccess, T: WindowType>(&mut self) -> Option<BoundWindow<K, T>> {
        self.buffers
            .iter_mut()
            .find_map(|buffers| BoundWindow::take(buffers, false))
    }
}

/// The error of posting: a [`RejectedBatch`], boxed to keep the usual return value small.
#[doc(alias = "bad_wr")]
pub type PostError = Box<RejectedBatch>;
