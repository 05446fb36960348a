//! The shm link of a device: shared-memory rings to the other processes on its address, and to
//! itself (decisions 020, 021).
//!
//! The transport rules are the engine's; only payloads differ (see
//! [`shm_ring`](crate::links::shm_ring)).
//! [`OutgoingRings`], under the core lock, turn packets into records, and memory references into
//! those that the receiver can use; [`IncomingRings`], under the rx lock, hand records to the
//! engine with a [`ShmMemory`] that resolves their payloads.
//!
//! A connection uses the shm link when both ends have the device's own address, the peer's queue
//! pair number belongs to a live member of the [`host`](crate::host) group, and neither is
//! UDP-only. The UDP port holder forwards datagrams of other hosts through the same rings
//! ([`Forwarded`]).

mod forward;
mod incoming;
mod memory;
mod outgoing;
mod piggyback;

use doorbell_roce_proto::qp::LinkId;
use doorbell_roce_proto::wire::Opcode;

use crate::host::MemberId;

pub(crate) use forward::Forwarded;
pub(crate) use incoming::{IncomingRings, Polled, RecordOutcome};
pub(crate) use memory::{ShmMemory, ShmPayload};
pub(crate) use outgoing::{OutgoingRings, PathError, Wakeups};
pub(crate) use piggyback::RecordHeaders;

/// How a payload that is too long for its record gets to another process of the host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CopyMode {
    /// The receiver copies from shared memory that both have mapped.
    Shared,
    /// The sender copies into the ring, and the receiver out of it.
    Ring,
}

impl CopyMode {
    /// Its name in `DOORBELL_COPY` and `doorbell devices`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::Ring => "ring",
        }
    }

    /// All modes, the fastest first.
    pub const ALL: [Self; 2] = [Self::Shared, Self::Ring];
}

/// Bits for the member's slot; the rest are its generation: packets never reach a later member.
const SLOT_BITS: u32 = 10;

pub(crate) fn link_to(member: MemberId) -> LinkId {
    LinkId(member.generation() << SLOT_BITS | u32::from(member.slot()))
}

/// The top bits of an opcode are its service (IBTA vol 1, table 38).
const SERVICE: u8 = 0xe0;

fn is_reliable(opcode: u8) -> bool {
    let unreliable = [Opcode::UcSendFirst, Opcode::UdSendOnly];
    unreliable.iter().all(|one| one.code() & SERVICE != opcode & SERVICE)
}

/// A READ or atomic response, or an acknowledgement (IBTA vol 1, 9.2, table 35).
pub(crate) fn is_response(opcode: u8) -> bool {
    let responses = Opcode::RcReadResponseFirst.code()..=Opcode::RcAtomicAcknowledge.code();
    responses.contains(&(opcode & !SERVICE))
}

/// Whether it accesses memory as it is when handled: a READ or an atomic request.
pub(crate) fn is_immediate(opcode: u8) -> bool {
    let immediate = [
        Opcode::RcReadRequest,
        Opcode::RcCompareSwap,
        Opcode::RcFetchAdd,
        Opcode::RcAtomicWrite,
        Opcode::RcFlush,
    ];
    immediate.iter().any(|one| one.code() == opcode & !SERVICE)
}

pub(crate) fn slot_of(link: LinkId) -> usize {
    (link.0 & ((1 << SLOT_BITS) - 1)) as usize
}
