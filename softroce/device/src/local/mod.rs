//! Lanes: how packets go from one process of a host to another without a socket.
//!
//! A lane goes one way, from the process that made it ([`Sender`]) to the one it gave the descriptor to ([`Receiver`]). It is one memfd: a ring of slots for packets,
//! one each, and a *bulk area* for what does not fit in a slot. Nothing here knows the protocol: a [`Record`] is the bytes of a packet's headers and its payload, which
//! either lies in the lane or is named by [`Reference`]s to the sender's memory. **The receiver copies**, from a segment that it has mapped too ([`segment`]), by
//! process_vm_readv(2), or from the bulk area; nobody writes into another process, so what a reference needs is read access.
//!
//! | file | what it holds |
//! |---|---|
//! | `ring` | the order of things: publishing and consuming, sleeping and waking, waiting for room, taking back; with its models |
//! | `layout` | the memfd: where what lies, and the checks of a lane that somebody else has made |
//! | `record` | what a slot says |
//! | `sender`, `receiver` | the two ends |
//! | `body` | the movers |
//! | `segment`, `mapped` | memory that several processes can map, at its owner and at its peers |
//!
//! **The neighbour is hostile until checked.** Both ends can write all of the lane at any time. So each reads a word once, keeps what it counts in memory of its own, checks
//! every number before it is a bound, and says [`Broken`] when one is impossible; then the lane is good for nothing but being closed. No reference (`&[u8]`) is made to
//! shared memory: a byte that changes under a copy is a wrong byte and nothing worse.
//!
//! **Taking back.** A sender that deregisters memory revokes the records that refer to it. It waits for nobody: the receiver looks *after* each copy whether the
//! record was revoked, before it stores the last bytes, and then what it copied never was a message ([`Gone`]). A receiver that is stopped or dead
//! in the middle of a copy blocks nothing.

mod body;
mod layout;
mod mapped;
mod receiver;
mod record;
mod ring;
pub mod segment;
mod sender;

pub use body::{Body, Gone};
pub use layout::Shape;
pub use mapped::UnfitSegment;
pub use receiver::{After, Received, Receiver};
pub use record::{Kind, Payload, Record, Reference};
pub use sender::{Full, Referrer, Sender};

/// The most header bytes of a record.
pub const HEADER: usize = 96;
/// The most references of a record.
pub const REFERENCES: usize = 32;
/// The most payload bytes of a record.
pub const LARGEST: usize = 256 << 10;

/// The other end of a lane does what none does: the lane can only be closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the other process wrote nonsense into the lane between us ({0}); the lane is closed")]
pub struct Broken(&'static str);

#[cfg(test)]
mod tests;
