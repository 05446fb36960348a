//! Memory of this process that others can map: segments.
//!
//! A segment is the memfd of memory that was allocated to be shared: its owner has sealed its
//! length and registers all of it by its descriptor (decision 072). Any other memory, memfds of the
//! application included, is neither sealed nor shared. A peer that maps the file relies on the
//! seal: a file that shrinks is a SIGBUS. Numbers that only grow need no model.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::stat::fstat;
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use parking_lot::Mutex;

use super::record::ID_BITS;

/// The number of a segment in the process that owns it, from 1 on. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SegmentId(pub u32);

impl fmt::Display for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A memfd that this process has mapped to share it; kept open.
#[derive(Debug)]
pub struct Segment {
    id: SegmentId,
    /// Opened read-only.
    file: File,
    inode: Inode,
}

impl Segment {
    /// Its number.
    #[must_use]
    pub fn id(&self) -> SegmentId {
        self.id
    }

    /// A read-only descriptor, by which another process can map it.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// A descriptor by which a peer can map it to write.
    pub(crate) fn writable(&self) -> io::Result<OwnedFd> {
        open(self.file.as_fd(), true).map(OwnedFd::from)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let mut known = SEGMENTS.lock();
        // The file may have become another segment since the last reference was dropped.
        if known
            .get(&self.inode)
            .is_some_and(|segment| segment.strong_count() == 0)
        {
            known.remove(&self.inode);
        }
    }
}

/// Device and number of a file.
type Inode = (u64, u64);

const PAGE: u64 = 4096;

static SEGMENTS: Mutex<BTreeMap<Inode, Weak<Segment>>> = Mutex::new(BTreeMap::new());
static NEXT_ID: AtomicU32 = AtomicU32::new(1);

pub(crate) fn next_id() -> SegmentId {
    SegmentId(NEXT_ID.fetch_add(1, Ordering::Relaxed))
}

/// Whether `fd` is a memfd to be shared as a segment of `len` bytes: it cannot shrink, and has no
/// other bytes but the rest of the last page.
#[must_use]
pub(crate) fn is_segment(fd: BorrowedFd<'_>, len: u64) -> bool {
    let whole = fstat(fd).is_ok_and(|file| u64::try_from(file.st_size) == Ok(len.next_multiple_of(PAGE)));
    whole && cannot_shrink(&fd)
}

/// The segment of a memfd that can be one; the same for each registration. `None` where it
/// cannot be opened again.
#[must_use]
pub fn of(fd: BorrowedFd<'_>) -> Option<Arc<Segment>> {
    let file = open(fd, false).ok()?;
    let found = file.metadata().ok()?;
    let inode = (found.dev(), found.ino());
    let mut known = SEGMENTS.lock();
    if let Some(segment) = known.get(&inode).and_then(Weak::upgrade) {
        return Some(segment);
    }
    let id = next_id();
    if id.0 >> ID_BITS != 0 {
        return None;
    }
    let segment = Arc::new(Segment { id, file, inode });
    known.insert(inode, Arc::downgrade(&segment));
    Some(segment)
}

/// A memfd has no name: it is opened again through the link of a descriptor.
fn open(fd: BorrowedFd<'_>, write: bool) -> io::Result<File> {
    File::options()
        .read(true)
        .write(write)
        .open(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Whether it is a sealed memfd of ordinary pages, which can always be allocated.
pub(super) fn cannot_shrink(file: &impl AsFd) -> bool {
    // Reserved huge pages may run out when a hole is read, which is a SIGBUS.
    let ordinary = fstatfs(file).is_ok_and(|system| system.filesystem_type() == TMPFS_MAGIC);
    let seals = fcntl(file, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_retain);
    ordinary && seals.is_ok_and(|seals| seals.contains(SealFlag::F_SEAL_SHRINK))
}

#[cfg(test)]
mod tests;
