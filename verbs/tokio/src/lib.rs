//! RDMA for tasks of a tokio runtime: byte streams, and operations that are awaited.
//!
//! The operations of an [`AsyncQueuePair`] are futures that give their buffers back. An
//! [`RdmaServer`] receives the messages of many of them, by one shared receive queue.
//!
//! An [`RdmaStream`] is what a `TcpStream` is: it implements `AsyncRead` and `AsyncWrite`, closes
//! each direction by itself, and has back-pressure. Bytes go by SENDs of a reliable connection; an
//! [`RdmaListener`] and [`RdmaStream::connect`] exchange the endpoints over a TCP connection, which
//! stays open, as its end says that the peer's process is gone. [`RdmaListener::bind_cm`] and
//! [`RdmaStream::connect_cm`] connect by the connection manager (rdma_cm(7)) instead.
//!
//! ```no_run
//! use doorbell_tokio::{RdmaListener, RdmaStream, StreamConfig};
//! use doorbell_verbs::ProtectionDomain;
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! # type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
//! async fn serve(pd: ProtectionDomain) -> Result<String> {
//!     let mut listener = RdmaListener::bind("0.0.0.0:18517", pd, StreamConfig::default()).await?;
//!     let mut text = String::new();
//!     listener.accept().await?.read_to_string(&mut text).await?;
//!     Ok(text)
//! }
//!
//! async fn send(pd: ProtectionDomain) -> Result<()> {
//!     let mut stream = RdmaStream::connect("server:18517", pd, StreamConfig::default()).await?;
//!     stream.write_all(b"hello").await?;
//!     Ok(stream.shutdown().await?)
//! }
//! ```
//!
//! # What moves the bytes
//!
//! Writing ([`AsyncWrite`](tokio::io::AsyncWrite)) copies into a registered buffer, which
//! a SEND takes at once: nothing waits to be joined with later bytes. The peer reads out of the
//! buffer that its device has filled. [`RdmaStream::read_bytes`] hands that buffer out without a
//! copy, as [`Bytes`](bytes::Bytes) whose drop posts it again; [`RdmaStream::reserve`] hands out a
//! buffer to be filled in place.
//!
//! A side that reads slowly holds the other up when all receives are full. A task that waits polls
//! its completion queue for some turns of the runtime first ([`StreamConfig::spins`]), then sleeps.
//!
//! # Trust
//!
//! As [`exchange`](doorbell_verbs::exchange): hosts are not authenticated and bytes are not
//! encrypted. Listen on trusted networks only, or run TLS over the stream.

#![forbid(unsafe_code)]

mod chunk;
mod config;
mod connect;
mod connection;
mod credits;
mod events;
mod managed;
mod peer;
mod pending;
mod queue_pair;
mod server;
mod stream;

pub use chunk::SendChunk;
pub use config::{ConfigError, StreamConfig};
pub use connect::{ConnectError, RdmaListener};
pub use queue_pair::{AsyncQueuePair, Operation, OperationError};
pub use server::{Client, Message, RdmaServer, ServerConfig};
pub use stream::RdmaStream;
