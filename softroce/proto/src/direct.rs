//! Direct operations: a WRITE, READ or atomic that the initiator carries out in the peer's memory,
//! on a path that reaches it. As with an adapter, no thread of the target is involved.
//!
//! A fast path of [`Endpoint::post_send`](crate::Endpoint::post_send): the request takes no PSN, as
//! nothing of its queue pair is before it, and completes at once. What is not the common case is
//! declined with nothing changed, and takes the packet path, which reports every error.

use crate::memory::PdId;
use crate::qp::{LinkId, RemoteAccess};
use crate::work::{Operation, Payload};
use crate::{Psn, Qpn};

/// The queue pair whose memory a request accesses, and the one that accesses it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirectPath {
    /// The link to the target's process.
    pub link: LinkId,
    /// The target's queue pair.
    pub target: Qpn,
    /// The initiator's queue pair.
    pub initiator: Qpn,
    /// The protection domain of the initiator's queue pair.
    pub pd: PdId,
    /// The first PSN of the initiator's requests.
    pub first_psn: Psn,
}

/// What a queue pair permits its peer, while it executes requests: for the peer's initiator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirectTarget {
    /// Its protection domain.
    pub pd: PdId,
    /// The link to the initiator's process.
    pub link: LinkId,
    /// The initiator's queue pair.
    pub initiator: Qpn,
    /// READs and atomics also need `max_dest_rd_atomic`.
    pub access: RemoteAccess,
    /// The first PSN expected: with another, requests of the initiator would be lost.
    pub first_psn: Psn,
}

/// Access to the memory of peers.
pub trait DirectMemory {
    /// Carries out an RDMA WRITE, READ or atomic: checks local and remote keys, ranges and rights
    /// as [`Memory`](crate::memory::Memory) does at either end, and that the target's queue pair
    /// receives from the initiator's. The last 8 bytes of a WRITE become visible last.
    ///
    /// False if it is not possible here or a check fails: only bytes that the request may write
    /// have changed.
    fn execute(&mut self, path: &DirectPath, operation: &Operation, payload: Payload<'_>) -> bool;
}
