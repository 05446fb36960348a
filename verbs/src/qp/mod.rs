//! Queue pairs: a [`QueuePairBuilder`] makes a [`PreparedQueuePair`], connected a [`QueuePair`].
//!
//! `ring` holds the buffers of requests in flight; `poster` writes a batch into the work queue's
//! slots (`backend`) and rings the doorbell; `batch` is the typed interface.
//!
//! # Why safe code cannot free, move or alias memory that the device may touch
//!
//! 1. Posting *moves* buffers into the ring before the doorbell rings. The ring returns a buffer
//!    only when a completion retires its request, or when the provider reports that it did not
//!    accept the request.
//! 2. A ring, with its contents, is dropped only after `ibv_destroy_qp` has succeeded: the queue
//!    pair holds a reference to its rings until then, and leaks it if destroying fails.
//! 3. Memory is deregistered when its last buffer is dropped, and freed only if that succeeded.
//! 4. Memory that a peer may write at any time is never lent as a slice.
//! 5. A memory window holds a reference to the region it is bound to and is deallocated before it
//!    releases it: no key outlives its region.
//! 6. Every object holds references to the protection domain, completion queues and context it was
//!    made from, so destruction is in order.

mod adopt;
pub(crate) mod attributes;
mod backend;
mod batch;
mod best;
mod builder;
mod connected;
mod create;
mod endpoint;
pub(crate) mod managed;
mod modify;
mod multicast;
mod object;
mod post_error;
mod poster;
mod prepared;
mod query;
mod receive;
mod ring;
mod split;
mod transport;
mod windows;

pub use attributes::{Explanation, QpState};
pub use backend::{Backend, EitherBackend, PostList, WrPost};
pub use batch::{Batch, WorkRequest};
pub use builder::QueuePairBuilder;
pub use connected::QueuePair;
pub use endpoint::{Endpoint, ParseEndpointError, UdEndpoint};
pub use modify::ModifyQueuePair;
pub(crate) use object::QpObject;
pub use post_error::{PostError, PostTarget, RejectReason, RejectedBatch};
pub use prepared::PreparedQueuePair;
pub use query::{
    ConnectionAttr, GlobalPath, PathAttr, PathMigration, QueuePairAttr, QueuePairCapacity, ReliableAttr, RemoteRights,
};
pub use receive::ReceiveBatch;
pub use ring::QueueKind;
pub(crate) use ring::{QpId, Ring, Slot};
pub use split::{ReceiveHalf, RejoinError};
pub use transport::{
    Connected, Connectionless, GRH_BYTES, HasReceiveQueue, Reliable, ReliableConnection, SendHalf, Transport,
    TransportKind, UnreliableConnection, UnreliableDatagram, WithSrq,
};
