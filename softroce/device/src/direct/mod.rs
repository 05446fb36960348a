//! Direct operations: WRITEs, READs and atomics that the initiator carries out in the memory of
//! another process of this host, as an adapter does: no thread of the target runs (decision 066).
//!
//! A process publishes [`tables`] of its regions and queue pairs, which its peers map read-only,
//! and gives them the files of its remotely accessible segments. An initiator whose request has
//! nothing before it on its queue pair checks what the responder would check, and copies: in its
//! mapping of the segment, or, while the target sleeps, into and out of other memory by a system
//! call, where the kernel permits that. Everything else takes the ring, where the target executes
//! it and reports errors.
//!
//! | file | content |
//! |---|---|
//! | `entry` | the protocol of an entry and an access: publishing, checking, withdrawing; its model |
//! | `tables` | the file with the entries, at its owner and at its peers |
//! | `grant` | the checks of a queue pair and a key, kept for later requests |
//! | `initiator` | the checks and copies of a request |
//! | `process` | memory that is no segment, through the kernel |
//!
//! **Withdrawing.** An initiator announces the queue pair and the key in the *access word* of its
//! ring to the target before it checks the entries, and clears it after the copy. Who deregisters
//! memory or ends a queue pair withdraws the entry and then waits until no access word names it.
//! A ring permits accesses once its target scans its access word.
//! A process that is killed during a copy leaves the group, and its ring goes with it; one that is
//! stopped during a copy delays the call until it continues, as an adapter's DMA would.
//!
//! **Trust.** What the tables say is checked against what this process has mapped, and the kernel
//! names the peer's process: a wrong value misdirects bytes within the peer's own memory. Only
//! memfds that were registered whole for remote access, by their descriptor, are given to peers,
//! writable only with a right to write.

use std::sync::Arc;

mod entry;
pub mod fuzzing;
mod grant;
mod initiator;
mod process;
mod tables;

pub(crate) use entry::Access;
pub(crate) use initiator::{DirectPeers, Initiator};
pub(crate) use tables::{DirectRights, Place, Published, PublishedRegion};

/// What this process and its peers have published.
#[derive(Default)]
pub(crate) struct DirectTables {
    pub(crate) peers: DirectPeers,
    /// This process's, unless it uses UDP only.
    pub(crate) published: Option<Arc<Published>>,
}
