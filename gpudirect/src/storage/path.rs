//! The paths by which a file's bytes reach memory, and why a path is refused.

use core::fmt;
use core::str::FromStr;

/// How a file is read and written, from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StoragePath {
    /// NVIDIA's cuFile: the disk's controller writes into GPU memory. For GPU memory alone.
    CuFile,
    /// io_uring with registered buffers; to GPU memory through pinned memory and copy engines.
    IoUring,
    /// pread(2) and pwrite(2), one at a time, with the same copies.
    Pread,
}

impl StoragePath {
    /// All paths, best first.
    pub const ALL: [Self; 3] = [Self::CuFile, Self::IoUring, Self::Pread];

    /// The environment variable that forces one: `cufile`, `io_uring` or `pread`; unset, empty or
    /// `auto` selects the best.
    pub const ENVIRONMENT: &'static str = "DOORBELL_STORAGE_PATH";

    /// Its name in results and the environment.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::CuFile => "cufile",
            Self::IoUring => "io_uring",
            Self::Pread => "pread",
        }
    }

    /// The path that the environment forces, if any.
    ///
    /// # Errors
    /// [`InvalidStoragePath`] for an unknown name.
    pub fn from_environment() -> Result<Option<Self>, InvalidStoragePath> {
        let Some(value) = doorbell_trust::variable(Self::ENVIRONMENT) else {
            return Ok(None);
        };
        match value.to_str() {
            Some("" | "auto") => Ok(None),
            Some(name) => name.parse().map(Some),
            None => Err(InvalidStoragePath(value.to_string_lossy().into_owned())),
        }
    }
}

impl fmt::Display for StoragePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for StoragePath {
    type Err = InvalidStoragePath;

    fn from_str(name: &str) -> Result<Self, InvalidStoragePath> {
        let named = Self::ALL.into_iter().find(|path| path.name() == name);
        named.ok_or_else(|| InvalidStoragePath(name.to_owned()))
    }
}

/// An unknown path name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{}' is no path for files ({}): use cufile, io_uring, pread or auto", .0.escape_debug(), StoragePath::ENVIRONMENT)]
pub struct InvalidStoragePath(pub String);

/// A refused path with the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedStorage {
    /// The path.
    pub path: StoragePath,
    /// The reason, in one line.
    pub why: String,
}

impl fmt::Display for RefusedStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.why)
    }
}
