//! Work requests and work completions (IBTA vol 1, 10.8 and 11.4).

use crate::memory::{AtomicOp, Bind, Flush, Sge};
use crate::qp::Path;
use crate::wire::XrcEth;
use crate::{Qpn, RKey};

/// A completion queue, as numbered by the endpoint's owner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CqId(pub u32);

/// A shared receive queue of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SrqId(pub(crate) u32);

impl SrqId {
    /// Its number, for the peers of an XRC domain.
    pub const fn number(self) -> XrcEth {
        XrcEth { srq: self.0 }
    }
}

/// An XRC domain, as numbered by the endpoint's owner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct XrcDomain(pub u32);

/// The operation of a send request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// SEND, with immediate data when given (in host order).
    Send {
        /// Immediate data.
        imm: Option<u32>,
    },
    /// SEND with invalidate: invalidates a key of the receiver (IBTA vol 1, 9.4.1.1).
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
    /// Atomic on 8 bytes; the original value is stored in the single 8-byte SGE.
    Atomic {
        /// Remote virtual address, a multiple of 8.
        addr: u64,
        /// Remote key.
        rkey: RKey,
        /// The operation.
        op: AtomicOp,
    },
    /// Atomic WRITE of 8 bytes, without a payload of its own (IBTA vol 1, annex A19).
    AtomicWrite {
        /// Remote virtual address, a multiple of 8.
        addr: u64,
        /// Remote key.
        rkey: RKey,
        /// The bytes, in the order of the memory.
        word: [u8; 8],
    },
    /// FLUSH, without a payload.
    Flush(Flush),
    /// Binds a memory window: executed locally, before any later request begins.
    Bind(Bind),
    /// Local invalidate of a window's key: executed locally, before any later request begins.
    Invalidate {
        /// The key.
        rkey: RKey,
    },
}

impl Operation {
    /// Whether it is executed locally, without a packet: bind and local invalidate.
    pub const fn is_local(&self) -> bool {
        matches!(self, Self::Bind(_) | Self::Invalidate { .. })
    }

    /// Whether it has no SGEs and no inline data.
    pub(crate) const fn is_without_payload(&self) -> bool {
        self.is_local() || matches!(self, Self::AtomicWrite { .. } | Self::Flush(_))
    }

    /// Whether a response completes it that is counted as outstanding (`max_rd_atomic`), not an
    /// ACK: READ responses, without payload for an atomic WRITE and a FLUSH, or an atomic ACK.
    pub(crate) const fn awaits_data(&self) -> bool {
        self.awaits_read_response() || matches!(self, Self::Atomic { .. })
    }

    pub(crate) const fn awaits_read_response(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::AtomicWrite { .. } | Self::Flush(_))
    }

    pub(crate) const fn completion_opcode(&self) -> CompletionOpcode {
        match self {
            Self::Send { .. } | Self::SendInvalidate { .. } => CompletionOpcode::Send,
            Self::Write { .. } => CompletionOpcode::Write,
            Self::Read { .. } => CompletionOpcode::Read,
            Self::Atomic { op, .. } => match op {
                AtomicOp::CompareSwap { .. } => CompletionOpcode::CompareSwap,
                AtomicOp::FetchAdd { .. } => CompletionOpcode::FetchAdd,
            },
            Self::AtomicWrite { .. } => CompletionOpcode::AtomicWrite,
            Self::Flush(_) => CompletionOpcode::Flush,
            Self::Bind(_) => CompletionOpcode::BindWindow,
            Self::Invalidate { .. } => CompletionOpcode::LocalInvalidate,
        }
    }
}

/// The payload of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Payload<'a> {
    /// In registered memory: read (READ and atomics: written) when packets are sent (received).
    Gather(&'a [Sge]),
    /// Inline: copied when posted.
    Inline(&'a [u8]),
}

/// A send-queue work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SendRequest<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// The operation.
    pub operation: Operation,
    /// The payload.
    pub payload: Payload<'a>,
    /// Signaled: generate a completion on success (always, on a queue created with `signal_all`).
    pub signaled: bool,
    /// Fence: wait for earlier READs and atomics (IBTA vol 1, 10.8.3.3).
    pub fence: bool,
    /// Set the solicited-event bit.
    pub solicited: bool,
}

/// The destination of a datagram (IBTA vol 1, 10.8.3.1 for UD).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Destination {
    /// The path that the address handle describes.
    pub path: Path,
    /// The receiving queue pair.
    pub qpn: Qpn,
    /// The Q_Key; with the highest bit set, the sender's own is used (IBTA vol 1, 10.2.5).
    pub qkey: u32,
}

/// Where a request goes that is not to the connected queue pair's own receive queue and domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Remote {
    /// UD: any queue pair.
    Datagram(Destination),
    /// XRC: a shared receive queue, with its protection domain.
    Srq(XrcEth),
}

/// A receive-queue work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReceiveRequest<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// The receive buffer.
    pub sges: &'a [Sge],
}

/// Why a request was refused at posting; nothing was queued.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PostError {
    /// No such queue pair, or no such shared receive queue.
    UnknownQp,
    /// The queue pair's state does not allow it (`EINVAL`).
    State,
    /// The queue is full (`ENOMEM`).
    Full,
    /// `EINVAL`: an operation that the transport lacks, too many SGEs, inline data too long or not
    /// allowed, a message or FLUSH over 2^31 bytes, an atomic not of one 8-byte SGE, a payload for
    /// an operation without one, or a receive for a queue pair with a shared receive queue.
    Invalid,
}

/// The status of a work completion, by the codes of `enum ibv_wc_status`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum Status {
    /// Success.
    Success = 0,
    /// Local length error, such as a message longer than the receive buffer.
    LocalLength = 1,
    /// Local QP operation error.
    LocalQpOperation = 2,
    /// Local protection error: an SGE that its region does not cover.
    LocalProtection = 4,
    /// Flushed: the queue pair was in, or entered, the error state.
    Flushed = 5,
    /// Memory management operation error: invalid bind or invalidate (IBTA vol 1, 11.6.2).
    WindowBind = 6,
    /// Bad response from the peer.
    BadResponse = 7,
    /// Local access error: the target of a WRITE with immediate.
    LocalAccess = 8,
    /// Remote invalid request: the peer sent that NAK.
    RemoteInvalidRequest = 9,
    /// Remote access error: the peer sent that NAK.
    RemoteAccess = 10,
    /// Remote operational error: the peer sent that NAK.
    RemoteOperational = 11,
    /// Transport retry counter exceeded.
    RetryExceeded = 12,
    /// RNR retry counter exceeded.
    RnrRetryExceeded = 13,
    /// The remote side aborted the operation.
    RemoteAborted = 16,
}

/// The completed operation, by the codes of `enum ibv_wc_opcode`.
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
    /// FLUSH.
    Flush = 8,
    /// Atomic WRITE.
    AtomicWrite = 9,
    /// A receive, by SEND.
    Receive = 128,
    /// A receive, by RDMA WRITE with immediate.
    ReceiveWriteImm = 129,
}

/// The version of a datagram's IP header, which its completion reports (IBTA annex A17.4.5.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IpVersion {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// A work completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The request's `wr_id`.
    pub wr_id: u64,
    /// On error only `wr_id`, `qpn` and whether `opcode` is a receive are valid.
    pub status: Status,
    /// The completed operation.
    pub opcode: CompletionOpcode,
    /// Bytes received, read or swapped.
    pub byte_len: u32,
    /// Immediate data, if the message carried some.
    pub imm: Option<u32>,
    /// The key that the peer's SEND with invalidate invalidated.
    pub invalidated: Option<RKey>,
    /// The local queue pair.
    pub qpn: Qpn,
    /// The peer's queue pair.
    pub src_qpn: Qpn,
    /// The solicited-event bit of the message.
    pub solicited: bool,
    /// UD: the first [`GRH_LEN`](crate::wire::GRH_LEN) bytes received are this IP header.
    pub grh: Option<IpVersion>,
}
