//! Safe RDMA verbs.
//!
//! A [`Library`] opens devices: the system's libibverbs, or another table of verbs, such as the
//! userspace device's. A [`Context`] makes [`ProtectionDomain`]s and [`CompletionQueue`]s; a domain
//! makes [`Buffer`]s and [`QueuePair`]s, which are connected to a peer's [`Endpoint`]. Posting
//! moves a buffer, its [`Completion`] returns it: safe code cannot touch what the device may touch.
//!
//! Every item that corresponds to a C call, struct or constant has its C name as an alias: search
//! this documentation for `ibv_reg_mr` or `IBV_WR_RDMA_WRITE`.
//!
//! ```no_run
//! use doorbell_verbs::{Endpoint, Library, Local, Remote, WriteAccess};
//!
//! # fn example(exchange: fn(Endpoint) -> (Endpoint, Remote<WriteAccess>)) -> Result<(), Box<dyn std::error::Error>> {
//! let device = Library::system()?.open("mlx5_0")?;
//! let pd = device.protection_domain()?;
//! let mut cq = device.completion_queue(256)?;
//! let prepared = pd.queue_pair(&cq).max_inline_data(64).rc()?;
//! // The peers exchange their endpoints, and keys to writable memory, out of band: over TCP, say.
//! let (peer, inbox) = exchange(prepared.endpoint());
//! let mut qp = prepared.connect(&peer)?;
//!
//! let log = pd.register(vec![0_u8; 1 << 20], Local)?;
//! let done = 1_u64.to_be_bytes();
//! qp.post(|batch| {
//!     for (chunk, at) in log.chunks(64 << 10).zip(inbox.chunks(64 << 10)) {
//!         batch.write(chunk, at);
//!     }
//!     batch.write_inline(&done, inbox).imm(7).signaled();
//! })?;
//! let mut free = Vec::new();
//! while free.len() < 16 {
//!     for mut completion in cq.poll()? {
//!         completion.result()?;
//!         free.extend(completion.take::<Local>());
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! The book (docs/book) has a page for each common task.
//!
//! # Sleeping instead of polling
//!
//! A completion queue made on a [`CompletionChannel`] can be waited for: [`CompletionQueue::wait`]
//! by a thread, with a timeout, `TokioChannel` (feature `tokio`) by a task, and the channel's
//! descriptor by an event loop. Asynchronous events come from [`Context::events`].
//!
//! ```no_run
//! # use std::time::Duration;
//! # fn serve(device: &doorbell_verbs::Context) -> Result<(), Box<dyn std::error::Error>> {
//! let channel = device.completion_channel()?;
//! let mut cq = device.completion_queue_on(&channel, 256)?;
//! for completion in cq.wait(Duration::from_secs(1))? {
//!     println!("{:?}", completion.result()?);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Datagrams
//!
//! A queue pair made by [`ud`](QueuePairBuilder::ud) has no peer: each message names its
//! destination by an [`AddressHandle`], and a [`Datagram`] received names its source. Transports
//! are type parameters of queue pairs: operations that one does not have do not compile.
//!
//! ```no_run
//! # use doorbell_verbs::{Buffer, CompletionQueue, GRH_BYTES, Local, ProtectionDomain};
//! # fn echo(pd: &ProtectionDomain, cq: &mut CompletionQueue) -> Result<(), Box<dyn std::error::Error>> {
//! let mut qp = pd.queue_pair(cq).ud()?;
//! println!("send to {:?}", qp.endpoint());
//! qp.receive(pd.register(vec![0; GRH_BYTES + 1024], Local)?)?;
//! for mut done in cq.poll()? {
//!     if let (Some(datagram), Some(received)) = (done.datagram(), done.take::<Local>()) {
//!         let ah = pd.address_handle().reply_to(&datagram, &received)?;
//!         qp.send_to(received.part(datagram.payload()), &ah, datagram.source(), qp.endpoint().qkey)?;
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Taking completions
//!
//! [`Completions::try_for_each`] is the fastest path, and a [`BufferPool`] the cheapest free list
//! for returned buffers; neither allocates. Extended completion queues
//! ([`Context::extended_completion_queue`]) time-stamp completions; code for any `Q: CqKind` serves
//! both kinds, of which [`Context::best_completion_queue`] creates the better one.
//!
//! ```no_run
//! use doorbell_verbs::{CompletionQueue, CompletionQueueError, CqKind, CompletionError, BufferPool};
//!
//! #[derive(Debug)]
//! enum Error {
//!     Queue(CompletionQueueError),
//!     Request(CompletionError),
//! }
//!
//! /// Returns the buffers of all completed requests to the pool.
//! fn reap<Q: CqKind>(cq: &mut CompletionQueue<Q>, pool: &mut BufferPool) -> Result<(), Error> {
//!     let completions = cq.poll().map_err(Error::Queue)?;
//!     completions.try_for_each(|done| {
//!         done.check().map_err(Error::Request)?;
//!         pool.extend(done.into_buffer());
//!         Ok(())
//!     })
//! }
//! ```
//!
//! # Guarantees
//!
//! - No safe code frees, moves or aliases memory that a device may touch: see [`QueuePair`] for a
//!   drop with work in flight, and [`Buffer`] for memory that peers read or write.
//! - From posting to completion there is no allocation, no lock, no atomic read-modify-write, and
//!   one call of the provider per batch.
//! - A batch that does not fit is rejected whole, with its buffers, before anything is written. A
//!   completion queue cannot overflow: queue pairs reserve their entries in it.
//! - No wake-up is lost, however many threads wait on the same channel, and every event is
//!   acknowledged before its object is destroyed.
//! - Every error names the verb that failed, its object, and what to do.

#![deny(unsafe_op_in_unsafe_fn)]

mod ah;
mod clock;
pub mod cm;
mod context;
mod cq;
mod describe;
mod error;
mod event;
pub mod exchange;
#[cfg(feature = "ibverbs")]
pub mod interop;
mod library;
mod memory;
mod pd;
mod port;
mod qp;
pub mod raw;
mod srq;
mod sync;
mod types;
mod wait;
mod wr;

pub use ah::{AddressHandle, AddressHandleBuilder, AddressHandleError};
pub use clock::DeviceClock;
pub use context::{Context, DeviceAttr, MemoryWindowSupport};
pub use cq::{
    BestCompletionQueue, ClassicCq, CompletionQueue, CompletionQueueDescription, Completions, CqKind,
    ExtendedCompletionQueueBuilder, ExtendedCq, Notify,
};
pub use describe::{AtomicSupport, BufferDescription, DeviceDescription, PortDescription};
pub use error::{CompletionQueueError, DeviceError, EventError, IndexOrAny, MemoryError, QueuePairError};
pub use event::channel::CqId;
pub use event::{AsyncEvent, CompletionChannel, Events, PortEvent, QueuePairEvent, SharedReceiveQueueEvent};
#[cfg(feature = "tokio")]
pub use event::{TokioChannel, TokioEvents};
pub use library::{Device, Library};
pub use memory::{
    AllAccess, AtomicAccess, AtomicWord, Bindable, BoundWindow, Buffer, BufferAlias, BufferPart, BufferPool,
    BufferPoolDrain, Buffers, CacheLimits, CacheStats, Chunks, DeviceMemory, Frozen, GrantsAtomic, GrantsRead,
    GrantsWrite, HostMemory, HugePage, IntoMemoryError, Invalidation, KeyAccess, Local, Memory, MemoryKind,
    MemoryWindow, Opaque, ParseRemoteError, PeerAccessible, PeerAll, PeerAtomic, PeerRead, PeerReadWrite, PeerWritable,
    PeerWrite, ReadAccess, ReadWriteAccess, Readable, RegionAttr, Registration, RegistrationCache, Remote,
    RemoteChunks, RemoteWord, ReregisterError, Rights, Scratch, Sink, Source, WindowType, WindowType1, WindowType2,
    Windowed, WriteAccess,
};
pub use pd::ProtectionDomain;
pub use port::{GidEntry, GidType, LinkLayer, PortAttr, PortState};
pub use qp::{
    Backend, Batch, Connected, ConnectionAttr, Connectionless, EitherBackend, Endpoint, Explanation, GRH_BYTES,
    GlobalPath, HasReceiveQueue, ModifyQueuePair, ParseEndpointError, PathAttr, PathMigration, PostError, PostList,
    PostTarget, PreparedQueuePair, QpState, QueueKind, QueuePair, QueuePairAttr, QueuePairBuilder, QueuePairCapacity,
    ReceiveBatch, ReceiveHalf, RejectReason, RejectedBatch, RejoinError, Reliable, ReliableAttr, ReliableConnection,
    RemoteRights, SendHalf, Transport, TransportKind, UdEndpoint, UnreliableConnection, UnreliableDatagram, WithSrq,
    WorkRequest, WrPost,
};
pub use srq::{
    SharedReceiveBatch, SharedReceiveQueue, SharedReceiveQueueAttr, SharedReceiveQueueBuilder, SharedReceiveQueueError,
    SharedReceiveQueueHandle, SrqId, SrqQueuePairBuilder,
};
pub use types::{Gid, Lid, Mtu, Psn, QKey, Qpn, RKey};
pub use wr::completion::{Completion, Success};
pub use wr::datagram::Datagram;
pub use wr::status::{CompletionError, CompletionStatus};
pub use wr::{op, payload};
