//! Shm rings: single-producer single-consumer rings of records between two processes of a host.
//!
//! A ring goes one way, from the process that created it ([`Sender`]) to the one that got the
//! descriptor ([`Receiver`]). It is one memfd: slots for records, and a *bulk area* for what does
//! not fit in a slot. It does not depend on the protocol: a [`Record`] is a packet's headers and
//! its payload, which is in the ring or named by [`Reference`]s to the sender's memory. **The
//! receiver copies**, from a segment that it has mapped too ([`segment`]), by process_vm_readv(2),
//! or from the bulk area; no process writes to another's memory, so that references need read
//! access only.
//!
//! | file | content |
//! |---|---|
//! | `ring` | the protocol: publishing and consuming, sleep and wake-up, credits, revocation; with its models |
//! | `layout` | the memfd: its layout, and the checks of a ring from another process |
//! | `record` | the content of a slot |
//! | `sender`, `receiver` | the two ends |
//! | `body` | the copy modes |
//! | `segment`, `mapped` | memory that several processes can map, at its owner and at its peers |
//!
//! **The peer is not trusted.** Both ends can write all of the ring at any time. So each reads a
//! word once, keeps its counts in memory of its own, checks every number before it is a bound, and
//! returns [`CorruptRing`] when one is impossible; then the ring can only be closed. No reference
//! (`&[u8]`) is made to shared memory: a byte that changes during a copy is a wrong byte and
//! nothing worse.
//!
//! **Revocation.** A sender that deregisters memory revokes the records that refer to it, without
//! waiting: the receiver checks *after* each copy whether the record was revoked, before it stores
//! the last bytes; then the copy never was a message ([`PayloadUnavailable`]). A receiver that is
//! stopped or dead in the middle of a copy blocks nothing.

mod body;
mod layout;
mod mapped;
mod receiver;
mod record;
mod ring;
pub mod segment;
mod sender;

pub use body::{PayloadUnavailable, RecordBody};
pub use layout::RingGeometry;
pub use mapped::UnfitSegment;
pub use receiver::{Disposition, Received, Receiver};
pub use record::{Payload, Record, RecordKind, Reference};
pub use sender::{Referrer, RingFull, Sender};

/// The most header bytes of a record.
pub const HEADER: usize = 96;
/// The most references of a record.
pub(crate) const REFERENCES: usize = 32;
/// The most payload bytes of a record.
pub const LARGEST: usize = 256 << 10;

/// The peer violated the ring's protocol: the ring can only be closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the other process corrupted the shm ring between us ({0}); the ring is closed")]
pub struct CorruptRing(&'static str);

#[cfg(test)]
mod tests;
