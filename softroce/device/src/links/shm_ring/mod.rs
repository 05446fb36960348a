//! Shm rings: single-producer single-consumer rings of records between two processes of a host.
//!
//! A ring goes one way, from its creator ([`Sender`]) to the process that got the descriptor
//! ([`Receiver`]). It is one memfd: slots for records, and a *bulk area* for what does not fit. A
//! [`Record`] is a packet's headers and its payload, in the ring or named by [`Reference`]s. **The
//! receiver copies**, from a shared [`segment`] or from the bulk area (decision 023); it needs read
//! access only.
//!
//! | file | content |
//! |---|---|
//! | `ring` | the protocol: publishing, consuming, sleep, credits, revocation; with its models |
//! | `layout` | the memfd, and the checks of a ring from another process |
//! | `record` | the content of a slot |
//! | `sender`, `receiver` | the two ends |
//! | `body` | the copy modes |
//! | `segment`, `mapped` | memory that several processes can map, at its owner and at its peers |
//!
//! **The peer is not trusted.** Both ends can write all of the ring at any time. So each reads a
//! word once, keeps its own counts, checks every number before it is a bound, and returns
//! [`CorruptRing`] when one is impossible. No reference (`&[u8]`) is made to shared memory: a byte
//! that changes during a copy is a wrong byte and nothing worse.
//!
//! **Revocation** (decision 022). A sender that deregisters memory does not wait: the receiver
//! checks after each copy whether its record was revoked, before it stores the last bytes.

mod body;
mod layout;
mod mapped;
mod receiver;
mod record;
mod ring;
pub mod segment;
mod sender;

pub use body::RecordBody;
pub use layout::RingGeometry;
pub use mapped::UnfitSegment;
pub(crate) use mapped::{MappedSegment, MappedSegments, SegmentAccess};
pub use receiver::{Disposition, Received, Receiver};
pub use record::{Payload, Record, RecordKind, Reference};
pub(crate) use ring::SharedWord;
pub use sender::{Referrer, RingFull, Sender};

/// The most header bytes of a record.
pub const HEADER: usize = 96;
/// The most references of a record.
pub(crate) const REFERENCES: usize = 32;
/// The most payload bytes of a record.
pub const LARGEST: usize = 256 << 10;

/// The most bytes of payloads in flight, but for one record. The receiver handles records in order,
/// and reads them by reference at the speed of its processor: with thousands of long ones ahead, on
/// a busy machine, an acknowledgement came after all retransmissions.
const IN_FLIGHT: u64 = 4 << 20;
/// Shorter payloads are not counted: so many records have no more bytes than this leaves.
const COUNTED: usize = 4096;

/// The bytes of a payload that count against [`IN_FLIGHT`].
fn counted(payload: usize) -> u64 {
    if payload < COUNTED { 0 } else { payload as u64 }
}

/// The peer violated the ring's protocol: the ring can only be closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the other process corrupted the shm ring between us ({0}); the ring is closed")]
pub struct CorruptRing(&'static str);

#[cfg(all(test, doorbell_loom))]
pub(crate) mod model {
    //! For the models of others.
    pub(crate) use super::ring::model::ModelRing;
    pub(crate) use super::ring::{CREDIT, Consumer, Producer};
}

#[cfg(test)]
mod tests;
