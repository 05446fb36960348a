//! Queue pairs: made by a [`QueuePairBuilder`], given to the peer as a [`PreparedQueuePair`], used as a [`QueuePair`].
//!
//! `ring` holds what is in flight; `staging` builds a batch into the provider's own format (`backend`) and posts it; `batch` is the typed face of that.
//!
//! # Why nothing safe frees, moves or aliases memory that the device may touch
//!
//! 1. Posting *moves* buffers into the ring, before the device hears of them. The ring gives one back only when a completion confirms its request, or when the
//!    provider says that it did not take the request.
//! 2. A ring is dropped, with what is in it, only after `ibv_destroy_qp` has returned success, when the device is done with the queue pair's memory: the queue pair
//!    holds a reference to its rings until then, and leaks it if destroying fails.
//! 3. Memory is deregistered when its last buffer is gone, and freed only if that succeeded.
//! 4. What a peer may write at any time is never lent as a slice.
//! 5. A memory window holds the region it is bound to, and is deallocated before it lets go: no peer reaches memory by a key whose region is gone.
//! 6. Protection domain, completion queues and context are held by reference count by all that was made of them, so that destruction is in order.

mod adopt;
pub(crate) mod attributes;
mod backend;
mod batch;
mod best;
mod builder;
mod connected;
mod endpoint;
pub(crate) mod managed;
mod modify;
mod object;
mod post_error;
mod poster;
mod prepared;
mod query;
mod ring;
mod transport;
mod windows;

pub use attributes::{Explanation, QpState};
pub use backend::{Backend, EitherBackend, PostList, WorkRequests};
pub use batch::{Batch, ReceiveBatch, Request};
pub use builder::QueuePairBuilder;
pub use connected::QueuePair;
pub use endpoint::{BadEndpoint, Endpoint, UdEndpoint};
pub use modify::Change;
pub(crate) use object::QpObject;
pub use post_error::{Reason, Refused, RefusedBatch, RefusedBy};
pub use prepared::PreparedQueuePair;
pub use query::{
    Capacity, ConnectionAttr, GlobalPath, PathAttr, PathMigration, QueuePairAttr, ReliableAttr, RemoteRights,
};
pub use ring::Queue;
pub(crate) use ring::{Ring, Slot};
pub use transport::{
    Connected, Connectionless, GRH_BYTES, OwnReceives, Rc, Reliable, SharedReceive, Transport, TransportKind, Uc, Ud,
};
