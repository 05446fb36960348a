//! Byte streams on RDMA queue pairs, for tasks of a tokio runtime.
//!
//! An [`RdmaStream`] is what a `TcpStream` is: it implements `AsyncRead` and `AsyncWrite`, closes
//! each direction by itself, and has back-pressure. Bytes go by SENDs of a reliable connection; an
//! [`RdmaListener`] and [`RdmaStream::connect`] exchange the endpoints over a TCP connection, which
//! stays open, as its end says that the peer's process is gone.
//!
//! ```
//! use doorbell_test::Context;
//! use doorbell_tokio::{RdmaListener, RdmaStream, StreamConfig};
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! # type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
//! async fn hello(a: Context, b: Context) -> Result<()> {
//!     let mut listener = RdmaListener::bind("127.0.0.1:0", a.protection_domain()?, StreamConfig::default()).await?;
//!     let address = listener.local_addr();
//!     let client = async {
//!         let mut stream = RdmaStream::connect(address, b.protection_domain()?, StreamConfig::default()).await?;
//!         stream.write_all(b"hello").await?;
//!         stream.shutdown().await?;
//!         Result::Ok(())
//!     };
//!     let server = async {
//!         let mut text = String::new();
//!         listener.accept().await?.read_to_string(&mut text).await?;
//!         Result::Ok(text)
//!     };
//!     let ((), text) = tokio::try_join!(client, server)?;
//!     assert_eq!(text, "hello");
//!     Ok(())
//! }
//!
//! #[doorbell_test::test]
//! fn hello_by_rdma(a: Context, b: Context) -> Result<()> {
//!     tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(hello(a, b))
//! }
//! # fn main() {}
//! ```
//!
//! # What moves the bytes
//!
//! [`AsyncWriteExt::write`](tokio::io::AsyncWriteExt::write) copies into a registered buffer, which
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
mod credits;
mod link;
mod stream;
mod wakers;

pub use chunk::SendChunk;
pub use config::{ConfigError, StreamConfig};
pub use connect::{ConnectError, RdmaListener};
pub use stream::RdmaStream;
