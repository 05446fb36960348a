//! Safe RDMA verbs.
//!
//! Devices are opened from a [`Library`]: the system's libibverbs, or any other table of verbs, such as the userspace device's. A [`Context`] makes
//! [`ProtectionDomain`]s and [`CompletionQueue`]s; a domain registers memory as [`Buffer`]s and makes [`QueuePair`]s. Posting a buffer moves it to the queue
//! pair, its completion gives it back.

#![deny(unsafe_op_in_unsafe_fn)]

mod context;
mod cq;
mod error;
mod library;
mod memory;
mod pd;
mod port;
mod qp;
mod types;
mod wr;

pub use context::{Context, DeviceAttr};
pub use cq::{CompletionQueue, Completions};
pub use error::{CompletionQueueError, DeviceError, IndexOrAny, MemoryError, QueuePairError};
pub use library::{Device, Library};
pub use memory::{
    All, Atomic, BadRemote, Buffer, Buffers, Chunks, Exposed, Frozen, GrantsAtomic, GrantsRead, GrantsWrite, Key, Kind,
    Local, Memory, Part, PeerWritable, Read, ReadWrite, Readable, Reclaim, Remote, RemoteAll, RemoteAtomic,
    RemoteChunks, RemoteRead, RemoteReadWrite, RemoteWord, RemoteWrite, Rights, Sink, Source, Word, Write,
};
pub use pd::ProtectionDomain;
pub use port::{GidEntry, GidType, LinkLayer, PortAttr, PortState};
pub use qp::{
    BadEndpoint, Batch, Endpoint, Explanation, PreparedQueuePair, QpState, Queue, QueuePair, QueuePairBuilder, Reason,
    ReceiveBatch, Refused, RefusedBatch, Request,
};
pub use types::{Gid, Lid, Mtu, Psn, Qpn, RKey};
pub use wr::completion::{Completion, Success};
pub use wr::status::{Failure, Status};
pub use wr::{op, payload};
