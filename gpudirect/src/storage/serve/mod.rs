//! Files served to peers by queue pairs: the server reads with O_DIRECT into registered memory,
//! from which its adapter WRITEs them into the peer's memory, of the host or of a GPU. No byte is
//! in a page cache, and none is copied by either host's processors.
//!
//! ```no_run
//! use std::time::Duration;
//! use doorbell_gpudirect::storage::{FileClient, FileServer};
//! use doorbell_gpudirect::{GpuMemory, register};
//! use doorbell_verbs::exchange::{Exchange, Listener};
//! use doorbell_verbs::{PeerWrite, ProtectionDomain};
//!
//! fn serve(pd: &ProtectionDomain) -> Result<(), Box<dyn std::error::Error>> {
//!     let server = FileServer::new("/srv/weights")?;
//!     let exchange = Listener::bind("10.0.0.1:18517")?.accept(Duration::from_secs(60))?;
//!     server.serve(pd, exchange)?; // until the client leaves
//!     Ok(())
//! }
//!
//! fn fetch(pd: &ProtectionDomain, memory: &GpuMemory) -> Result<u64, Box<dyn std::error::Error>> {
//!     let inbox = register(pd, memory, PeerWrite)?;
//!     let exchange = Exchange::connect("10.0.0.1:18517", Duration::from_secs(10))?;
//!     let mut client = FileClient::new(pd, exchange)?;
//!     Ok(client.read_at("layer-0.bin", 0, inbox.remote())?) // then Arrivals::publish, for kernels
//! }
//! ```
//!
//! A name is resolved below the server's folder alone: openat2(2) refuses one that leaves it, also
//! by symbolic links. Files are only read; of one whose length the client has requested last a read
//! fails if it was changed since. Hosts are not authenticated, and data is not encrypted:
//! serve only on networks whose hosts may read all of the folder.
//!
//! # The protocol, version 1
//!
//! The client SENDs a request, the server WRITEs the file's bytes, and SENDs its answer, which
//! arrives after them (IBTA vol 1, 9.5); then the client may send another. Integers are big-endian.
//!
//! | bytes | of a request |
//! |---|---|
//! | 4 | `44 42 46 53` ("DBFS") |
//! | 1 | the version, 1 |
//! | 1 | 1 for the length of the file, 2 to read |
//! | 2 | *n*, the length of the name: 1 to 1024 |
//! | 8 | the offset |
//! | 24 | where to, as [`Remote::to_bytes`](doorbell_verbs::Remote::to_bytes): at most 1 GiB; zeros for the length |
//! | *n* | the name |
//!
//! | bytes | of an answer |
//! |---|---|
//! | 4 | "DBFS" |
//! | 1 | the version, 1 |
//! | 1 | 0: done; 1: failed |
//! | 2 | *n*, the length of the text: at most 200 |
//! | 8 | the length of the file; or the bytes read, fewer than requested where the file ends |
//! | 4 | errno, or 0 |
//! | *n* | the error in words |

mod client;
mod message;
mod server;

use std::ffi::OsStr;
use std::io;
use std::path::PathBuf;

use doorbell_verbs::exchange::ExchangeError;
use doorbell_verbs::{MemoryError, PostError};

pub use client::FileClient;
pub use server::FileServer;

use super::error::StorageError;

/// Serving files, or reading served ones, failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The folder cannot be served.
    #[error("{}: cannot be served: {error}", .folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The system's error: `ENOSYS` before Linux 5.6, which has no openat2(2).
        error: io::Error,
    },
    /// A file.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A read of a served file failed.
    #[error("{}: {len} bytes at offset {offset}: {error}", .file.display())]
    Read {
        /// The file, as the client has named it.
        file: PathBuf,
        /// The offset of the first byte that was requested.
        offset: u64,
        /// The count of bytes that were requested.
        len: u64,
        /// The reason.
        error: Box<ServeError>,
    },
    /// The server could not do what was requested.
    #[error("the server: {text}")]
    Refused {
        /// Its errno, or 0.
        errno: i32,
        /// Its error.
        text: String,
    },
    /// The peer has sent what is no message of the protocol.
    #[error("the peer has sent {0}")]
    Protocol(&'static str),
    /// The connection.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// Memory of the connection.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A request of the connection.
    #[error(transparent)]
    Post(#[from] PostError),
}

impl ServeError {
    /// The error of a read of these bytes.
    fn of(self, file: &OsStr, offset: u64, len: u64) -> Self {
        Self::Read {
            file: file.into(),
            offset,
            len,
            error: Box::new(self),
        }
    }
}
