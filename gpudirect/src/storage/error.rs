//! Errors of files, each with the file, and the offset and errno where there are any.

use core::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::path::{InvalidStoragePath, StoragePath};

/// What was done with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Opened or created.
    Open,
    /// Read.
    Read,
    /// Written.
    Write,
    /// Given its length, with blocks of the disk.
    Allocate,
    /// Written to the disk (fdatasync(2)).
    Sync,
    /// Queried (statx(2)).
    Query,
    /// Given another name.
    Rename,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Read => "read",
            Self::Write => "write",
            Self::Allocate => "allocate",
            Self::Sync => "sync",
            Self::Query => "query",
            Self::Rename => "rename",
        })
    }
}

/// A failed operation on a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// A call on the file as a whole failed.
    #[error("{}: cannot {action}: {error}", .file.display())]
    File {
        /// What failed.
        action: Action,
        /// The file.
        file: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// A read or write failed. Of a write, any of the request's bytes may have been written.
    #[error("{}: cannot {action} {len} bytes at offset {offset}: {error}{}", .file.display(), advice(.error))]
    Io {
        /// Read or write.
        action: Action,
        /// The file.
        file: PathBuf,
        /// The offset of the first byte that failed.
        offset: u64,
        /// The bytes from there on that this request was for.
        len: usize,
        /// The system's error.
        error: io::Error,
    },
    /// The file ends before the last byte that was to be read.
    #[error("{}: ends at offset {end}, before {wanted}", .file.display())]
    EndOfFile {
        /// The file.
        file: PathBuf,
        /// Where it ended.
        end: u64,
        /// The end of the bytes that were to be read.
        wanted: u64,
    },
    /// The file is not what it was when its [`Stamp`](super::Stamp) was taken.
    #[error("{}: has changed while it was read: {what}", .file.display())]
    Changed {
        /// The file.
        file: PathBuf,
        /// The difference.
        what: String,
    },
    /// The bytes lie beyond the maximum offset of a file, 2^63 - 1.
    #[error("{}: {len} bytes at offset {offset}: a file ends before 2^63", .file.display())]
    Offset {
        /// The file.
        file: PathBuf,
        /// The offset.
        offset: u64,
        /// The length.
        len: usize,
    },
    /// An option is out of range.
    #[error("{option} = {value}: use {allowed}")]
    Option {
        /// The option.
        option: &'static str,
        /// Its value.
        value: usize,
        /// What is allowed.
        allowed: &'static str,
    },
    /// GPU memory was given to a [`Storage`](super::Storage) that has no GPU, or another one.
    #[error("GPU memory needs a Storage on a stream of its GPU: use Storage::on_stream")]
    NoGpu,
    /// No path to the file works.
    #[error("{path} is forced, and refused: {why}")]
    Refused {
        /// The forced path.
        path: StoragePath,
        /// The reason.
        why: String,
    },
    /// The forced path's name is invalid.
    #[error(transparent)]
    InvalidPath(#[from] InvalidStoragePath),
    /// From the CUDA driver.
    #[error(transparent)]
    Cuda(#[from] doorbell_cuda::Error),
}

impl StorageError {
    pub(super) fn file(action: Action, file: &Path, error: impl Into<io::Error>) -> Self {
        Self::File {
            action,
            file: file.to_owned(),
            error: error.into(),
        }
    }
}

fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOSPC) => "; the file is incomplete: free space, or write to another file system",
        Some(libc::EDQUOT) => "; the file is incomplete: the user's or project's quota is used up",
        Some(libc::EIO) => "; the kernel's log has the device's error",
        _ => "",
    }
}
