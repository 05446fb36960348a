//! Files that are read and written past the page cache where the file system has that.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, fallocate, fcntl};

use super::cufile::Handle;
use super::error::{Action, StorageError};
use super::sys;

/// The maximum of an offset: `off_t` is signed.
const MAX_OFFSET: u64 = i64::MAX as u64;

/// An open regular file or block device. Reads and writes go past the page cache (`O_DIRECT`)
/// where the file system has that; else [`File::buffered`] says why not.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    /// Of cuFile, once GPU memory is read or written; before the descriptors, which it uses.
    cufile: OnceLock<Result<Handle, String>>,
    /// Why cuFile refused a read or write after it had accepted the file.
    cufile_refused_later: OnceLock<String>,
    /// For first and last blocks that are written in part, and all else where O_DIRECT is refused.
    cached: fs::File,
    direct: Result<Direct, String>,
    /// Why O_DIRECT was refused after it had been accepted by open(2).
    refused_later: OnceLock<String>,
}

#[derive(Debug)]
struct Direct {
    file: fs::File,
    alignment: usize,
}

/// What identifies a file's contents without reading it: see [`File::stamp`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    /// The file's length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "of a file, not of a collection")]
    pub fn len(&self) -> u64 {
        self.len
    }
}

impl File {
    /// Opens `path` for reading.
    ///
    /// # Errors
    /// [`StorageError::File`]; a folder or pipe is an error, too.
    #[doc(alias = "O_DIRECT")]
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StorageError> {
        Self::with(path.as_ref(), OpenOptions::new().read(true))
    }

    /// Opens `path`, which must exist, for reading and writing. Its length stays as it is.
    ///
    /// # Errors
    /// As [`File::open`].
    pub fn open_for_writing(path: impl AsRef<Path>) -> Result<Self, StorageError> {
        Self::with(path.as_ref(), OpenOptions::new().read(true).write(true))
    }

    /// Creates `path`, which must not exist, for reading and writing; of this user alone.
    ///
    /// # Errors
    /// As [`File::open`].
    pub fn create_new(path: impl AsRef<Path>) -> Result<Self, StorageError> {
        let path = path.as_ref();
        let created = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(|error| StorageError::file(Action::Open, path, error))?;
        Self::of(path, created)
    }

    fn with(path: &Path, options: &mut OpenOptions) -> Result<Self, StorageError> {
        // Not to wait for the other end of a pipe; regular files ignore the flag.
        let file = options
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(|error| StorageError::file(Action::Open, path, error))?;
        Self::of(path, file)
    }

    /// A file that is open already, such as one below a folder; `path` is for messages.
    pub(super) fn of(path: &Path, cached: fs::File) -> Result<Self, StorageError> {
        let failed = |error| StorageError::file(Action::Open, path, error);
        let kind = cached.metadata().map_err(failed)?.file_type();
        if !kind.is_file() && !std::os::unix::fs::FileTypeExt::is_block_device(&kind) {
            return Err(failed(io::Error::other("neither a regular file nor a block device")));
        }
        let flags = fcntl(&cached, FcntlArg::F_GETFL).map_err(|errno| failed(errno.into()))?;
        let flags = OFlag::from_bits_retain(flags);
        // With it io_uring refuses what would wait for the disk.
        fcntl(&cached, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK)).map_err(|errno| failed(errno.into()))?;
        let direct = Direct::of(&cached, flags & OFlag::O_ACCMODE == OFlag::O_RDWR);
        Ok(Self {
            path: path.to_owned(),
            cufile: OnceLock::new(),
            cufile_refused_later: OnceLock::new(),
            cached,
            direct,
            refused_later: OnceLock::new(),
        })
    }

    /// As if the file system refused O_DIRECT: reads and writes use the page cache.
    #[must_use]
    pub fn through_page_cache(mut self) -> Self {
        self.direct = Err("the page cache was requested".to_owned());
        self
    }

    /// Its path, as it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Why it is read and written through the page cache; `None` if it is not.
    #[must_use]
    pub fn buffered(&self) -> Option<&str> {
        match &self.direct {
            Ok(_) => self.refused_later.get().map(String::as_str),
            Err(why) => Some(why),
        }
    }

    /// The alignment of offsets, lengths and memory for O_DIRECT: at least a page, as a page of the
    /// cache must not hold bytes of both kinds of writes. 1 through the page cache.
    #[must_use]
    pub fn alignment(&self) -> usize {
        match &self.direct {
            Ok(direct) if self.refused_later.get().is_none() => direct.alignment,
            _ => 1,
        }
    }

    /// Its length in bytes now, of a block device too.
    ///
    /// # Errors
    /// [`StorageError::File`].
    #[expect(clippy::len_without_is_empty, reason = "a system call")]
    pub fn len(&self) -> Result<u64, StorageError> {
        use std::io::{Seek, SeekFrom};
        (&self.cached)
            .seek(SeekFrom::End(0))
            .map_err(|error| StorageError::file(Action::Query, &self.path, error))
    }

    /// What the kernel says of the file's contents: inode, length, times of changes. Timestamps
    /// have the clock's tick (some milliseconds), so a change within one can escape.
    ///
    /// # Errors
    /// [`StorageError::File`].
    pub fn stamp(&self) -> Result<Stamp, StorageError> {
        let metadata = self
            .cached
            .metadata()
            .map_err(|error| StorageError::file(Action::Query, &self.path, error))?;
        Ok(Stamp {
            device: metadata.dev(),
            inode: metadata.ino(),
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    /// Checks that the file is as it was when `stamp` was taken.
    ///
    /// # Errors
    /// [`StorageError::Changed`] with the difference; [`StorageError::File`].
    pub fn check_unchanged(&self, stamp: &Stamp) -> Result<(), StorageError> {
        let now = self.stamp()?;
        if now == *stamp {
            return Ok(());
        }
        let what = if now.len == stamp.len {
            "it was written to, or replaced".to_owned()
        } else {
            format!("it had {} bytes, and has {}", stamp.len, now.len)
        };
        Err(StorageError::Changed {
            file: self.path.clone(),
            what,
        })
    }

    /// Makes it `len` bytes long, with blocks on the disk where the file system can, so that a disk
    /// without space says so now, and writes of several requests need not extend the file in turn.
    ///
    /// # Errors
    /// [`StorageError::File`], as with `ENOSPC`; the file is then of any length up to `len`.
    #[doc(alias = "fallocate")]
    pub fn allocate(&self, len: u64) -> Result<(), StorageError> {
        let failed = |error: io::Error| StorageError::file(Action::Allocate, &self.path, error);
        let bytes = i64::try_from(len).map_err(|_| failed(io::Error::from_raw_os_error(libc::EFBIG)))?;
        if len > 0 {
            match fallocate(&self.cached, FallocateFlags::empty(), 0, bytes) {
                Ok(()) | Err(nix::errno::Errno::EOPNOTSUPP | nix::errno::Errno::ENOSYS) => {}
                Err(error) => return Err(failed(error.into())),
            }
        }
        self.cached.set_len(len).map_err(failed)
    }

    /// Returns when its bytes are on the disk (fdatasync(2)).
    ///
    /// # Errors
    /// [`StorageError::File`]; which bytes are on the disk is then unknown.
    #[doc(alias = "fdatasync")]
    pub fn sync(&self) -> Result<(), StorageError> {
        self.cached
            .sync_data()
            .map_err(|error| StorageError::file(Action::Sync, &self.path, error))
    }

    /// Checks that `len` bytes at `offset` are offsets of files.
    pub(super) fn check_range(&self, offset: u64, len: usize) -> Result<(), StorageError> {
        // A block more, as a piece ends at a multiple of the alignment.
        match offset.checked_add(len as u64) {
            Some(end) if end < MAX_OFFSET - (1 << 30) => Ok(()),
            _ => Err(StorageError::Offset {
                file: self.path.clone(),
                offset,
                len,
            }),
        }
    }

    /// The descriptor for bytes that are aligned.
    pub(super) fn bulk_fd(&self) -> RawFd {
        match &self.direct {
            Ok(direct) if self.refused_later.get().is_none() => direct.file.as_raw_fd(),
            _ => self.cached.as_raw_fd(),
        }
    }

    /// The descriptor for any bytes, through the page cache.
    pub(super) fn cached_fd(&self) -> RawFd {
        self.cached.as_fd().as_raw_fd()
    }

    /// The descriptor with O_DIRECT, or why there is none.
    pub(super) fn direct_fd(&self) -> Result<RawFd, String> {
        match &self.direct {
            Ok(direct) => Ok(direct.file.as_raw_fd()),
            Err(why) => Err(why.clone()),
        }
    }

    /// The registration with cuFile, or why there is none.
    pub(super) fn cufile(&self) -> Result<&Handle, &str> {
        if let Some(why) = self.cufile_refused_later.get() {
            return Err(why);
        }
        let registered = self.cufile.get_or_init(|| Handle::new(self.direct_fd()?));
        registered.as_ref().map_err(String::as_str)
    }

    /// cuFile refused a read or write: from now on other paths are used.
    pub(super) fn refuse_cufile(&self, why: String) {
        tracing::debug!("{}: cuFile is not used any more: {why}", self.path.display());
        // Of two refusals the first stays.
        let _ = self.cufile_refused_later.set(why);
    }

    pub(super) fn write_cached(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.cached.write_all_at(bytes, offset)
    }

    /// A read or write with O_DIRECT was refused with `EINVAL`: from now on the page cache is used.
    pub(super) fn refuse_direct(&self) {
        let set = self
            .refused_later
            .set("the file system refuses reads and writes with O_DIRECT: Invalid argument (os error 22)".to_owned());
        if set.is_ok() {
            tracing::debug!(
                "{}: the page cache is used from now on: O_DIRECT was refused",
                self.path.display()
            );
        }
    }
}

impl Direct {
    /// Opens the same file again, with O_DIRECT, by its descriptor: its name may be another's now.
    fn of(file: &fs::File, writable: bool) -> Result<Self, String> {
        let name = format!("/proc/self/fd/{}", file.as_raw_fd());
        let opened = OpenOptions::new()
            .read(true)
            .write(writable)
            .custom_flags(libc::O_DIRECT)
            .open(name)
            .map_err(|error| match error.raw_os_error() {
                Some(libc::EINVAL) => format!("the file system has no O_DIRECT: {error}"),
                _ => format!("the file cannot be opened again with O_DIRECT: {error}"),
            })?;
        let alignment = match sys::direct_alignment(&opened) {
            // Not said, as before Linux 6.1: a page is enough for every disk with blocks up to one.
            None => 1,
            Some((0, _) | (_, 0)) => {
                return Err("the file system has no O_DIRECT for this file (statx: alignment 0)".to_owned());
            }
            Some((memory, offset)) => memory.max(offset),
        };
        let alignment = alignment.max(sys::page_size());
        if !alignment.is_power_of_two() || alignment > super::MAX_ALIGNMENT {
            return Err(format!("O_DIRECT needs an alignment of {alignment} bytes"));
        }
        Ok(Self {
            file: opened,
            alignment,
        })
    }
}
