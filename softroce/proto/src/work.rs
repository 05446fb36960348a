//! Work requests and work completions, in the standard's words (IBTA vol 1, 10.8 and 11.4).

use crate::memory::{AtomicOp, Bind, Sge};
use crate::qp::Path;
use crate::{Qpn, RKey};

/// A completion queue, as the owner of the endpoint numbers them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CqId(pub u32);

/// A shared receive queue of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SrqId(pub(crate) u32);

/// What a send-queue request does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// SEND, with immediate data when given (host order of the 32 bits as they go on the wire big-endian).
    Send {
        /// Immediate data.
        imm: Option<u32>,
    },
    /// SEND that takes a key of the receiver's away (IBTA vol 1, 9.4.1.1).
    SendInvalidate {
        /// The key, of a window bound to the peer's queue pair.
        rkey: RKey,
    },
    /// RDMA WRITE, with immediate data when given.
    Write {
        /// Remote virtual address.
        addr: u64,
        /// Remote key.
        rkey: RKey,
        /// Immediate data.
        imm: Option<u32>,
    },
    /// RDMA READ.
    Read {
        /// Remote virtual address.
        addr: u64,
        /// Remote key.
        rkey: RKey,
    },
    /// Atomic on 8 bytes; the value before lands in the single 8-byte SGE.
    Atomic {
        /// Remote virtual address, a multiple of 8.
        addr: u64,
        /// Remote key.
        rkey: RKey,
        /// The operation.
        op: AtomicOp,
    },
    /// Binds a memory window. Nothing is sent; it is done before any request behind it begins.
    Bind(Bind),
    /// Takes the key of a window away (local invalidate). Nothing is sent; it is done before any request behind it begins.
    Invalidate {
        /// The key.
        rkey: RKey,
    },
}

impl Operation {
    /// Whether it is done here, without a packet: binding and local invalidate.
    pub const fn is_local(&self) -> bool {
        matches!(self, Self::Bind(_) | Self::Invalidate { .. })
    }
}

/// Where a request's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Payload<'a> {
    /// In registered memory, read (or for READ and atomics: written) when the packets go or come.
    Gather(&'a [Sge]),
    /// In the request: copied when posted.
    Inline(&'a [u8]),
}

/// A send-queue work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SendRequest<'a> {
    /// The consumer's name for it, given back in its completion.
    pub wr_id: u64,
    /// The operation.
    pub operation: Operation,
    /// Its bytes.
    pub payload: Payload<'a>,
    /// Generate a completion on success (always, on a queue created with `signal_all`).
    pub signalled: bool,
    /// Wait for READs and atomics before it (IBTA vol 1, 10.8.3.3).
    pub fence: bool,
    /// Set the solicited-event bit.
    pub solicited: bool,
}

/// Where a datagram goes (IBTA vol 1, 10.8.3.1 for UD): an address handle's path, and whom it is for there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Destination {
    /// What the address handle stands for.
    pub path: Path,
    /// The receiving queue pair.
    pub qpn: Qpn,
    /// The queue key that it must have; with the highest bit set, the sender's own goes instead (IBTA vol 1, 10.2.5).
    pub qkey: u32,
}

/// A receive-queue work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReceiveRequest<'a> {
    /// The consumer's name for it.
    pub wr_id: u64,
    /// Where the bytes go.
    pub sges: &'a [Sge],
}

/// Why a request was refused at posting; nothing was queued.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PostError {
    /// No such queue pair, or no such shared receive queue.
    UnknownQp,
    /// The queue pair's state does not take this request (`EINVAL`).
    State,
    /// The queue is full (`ENOMEM`).
    Full,
    /// An operation that the queue pair's transport does not offer, too many scatter/gather elements, too much inline data, inline where it is not allowed, a message over 2^31 bytes, an atomic whose SGEs are not one
    /// of 8 bytes, bytes for an operation that has none, or a receive for a queue pair that has a shared receive queue (`EINVAL`).
    Invalid,
}

/// The status of a work completion, by the codes of `enum ibv_wc_status`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum Status {
    /// Done.
    Success = 0,
    /// Local length error: a message longer than the receive buffer, or the like.
    LocalLength = 1,
    /// Local QP operation error.
    LocalQpOperation = 2,
    /// Local protection error: an SGE that its region does not cover.
    LocalProtection = 4,
    /// Flushed: the QP was in, or went into, the error state.
    Flushed = 5,
    /// Memory management operation error: a window that cannot be bound so, or a key that cannot be invalidated (IBTA vol 1, 11.6.2).
    WindowBind = 6,
    /// Bad response from the peer.
    BadResponse = 7,
    /// The receiver's buffer could not take a WRITE with immediate's target (local access error).
    LocalAccess = 8,
    /// The peer says: invalid request.
    RemoteInvalidRequest = 9,
    /// The peer says: access refused.
    RemoteAccess = 10,
    /// The peer says: it could not carry it out.
    RemoteOperational = 11,
    /// The transport retry counter ran out.
    RetryExceeded = 12,
    /// The RNR retry counter ran out.
    RnrRetryExceeded = 13,
    /// The remote side aborted the operation.
    RemoteAborted = 16,
}

/// What completed, by the codes of `enum ibv_wc_opcode`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum CompletionOpcode {
    /// SEND.
    Send = 0,
    /// RDMA WRITE.
    Write = 1,
    /// RDMA READ.
    Read = 2,
    /// Compare and swap.
    CompareSwap = 3,
    /// Fetch and add.
    FetchAdd = 4,
    /// Binding of a memory window.
    BindWindow = 5,
    /// Local invalidate.
    LocalInvalidate = 6,
    /// A receive, by SEND.
    Receive = 128,
    /// A receive, by RDMA WRITE with immediate.
    ReceiveWriteImm = 129,
}

/// A work completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The request's name.
    pub wr_id: u64,
    /// How it ended. When it is not [`Status::Success`] only `wr_id`, `qpn` and `is_receive` mean anything.
    pub status: Status,
    /// What it was.
    pub opcode: CompletionOpcode,
    /// Bytes received, read or swapped.
    pub byte_len: u32,
    /// Immediate data, when it came with some.
    pub imm: Option<u32>,
    /// The key that the peer took away with the message, if it did.
    pub invalidated: Option<RKey>,
    /// The local queue pair.
    pub qpn: Qpn,
    /// The peer's queue pair.
    pub src_qpn: Qpn,
    /// The sender asked for a solicited event.
    pub solicited: bool,
    /// The first [`GRH_LEN`](crate::wire::GRH_LEN) bytes received are the IP header: always for UD, never else. They count in `byte_len`.
    pub grh: bool,
}
