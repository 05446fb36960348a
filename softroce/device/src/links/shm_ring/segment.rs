//! Memory of this process that others can map: segments.
//!
//! Any program that maps a memfd shared has such memory (decision 023). [`find`] resolves an
//! address range by /proc/self/maps, and its file by /proc/self/fd. The file must not be able to
//! shrink (F_SEAL_SHRINK is set if permitted): a SIGBUS in another process. Numbers that only grow
//! need no model.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
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

/// A shared memory file that this process has mapped; kept open.
#[derive(Debug)]
pub struct Segment {
    id: SegmentId,
    /// Opened read-only.
    file: File,
    inode: Inode,
    len: u64,
    /// Allocated for this purpose, by `Memory::shared` of doorbell-verbs.
    allocated: bool,
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

    /// Whether peers may map it for access to `len` bytes from `offset` on: it was allocated by
    /// doorbell-verbs, and has no other bytes but the rest of the last page.
    pub(crate) fn is_exactly(&self, offset: u64, len: u64) -> bool {
        self.allocated && offset == 0 && len.next_multiple_of(PAGE) == self.len
    }

    /// A descriptor by which a peer can map it to write.
    pub(crate) fn writable(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let file = File::options().read(true).write(true).open(path)?;
        Ok(file.into())
    }
}

/// A range of a segment.
#[derive(Clone, Debug)]
pub struct SegmentRange {
    /// The segment.
    pub segment: Arc<Segment>,
    /// The range's offset in it.
    pub offset: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Inode {
    dev: u64,
    number: u64,
}

const PAGE: u64 = 4096;

static SEGMENTS: Mutex<Vec<Weak<Segment>>> = Mutex::new(Vec::new());
static NEXT_ID: AtomicU32 = AtomicU32::new(1);

pub(crate) fn next_id() -> SegmentId {
    SegmentId(NEXT_ID.fetch_add(1, Ordering::Relaxed))
}

/// The segment with all of a range of this process's memory; valid while that stays mapped.
#[must_use]
pub fn find(addr: usize, len: usize) -> Option<SegmentRange> {
    let maps = fs::read("/proc/self/maps").ok()?;
    let range = mapped_file(&maps, addr, addr.checked_add(len)?)?;
    let end = range.offset.checked_add(len as u64)?;
    let mut known = SEGMENTS.lock();
    known.retain(|segment| segment.strong_count() != 0);
    // A file that has grown is mapped too short by peers: it becomes another segment.
    let found = known
        .iter()
        .filter_map(Weak::upgrade)
        .find(|segment| segment.inode == range.inode && end <= segment.len);
    let segment = match found {
        Some(segment) => segment,
        None => {
            let (file, allocated) = open(range.inode)?;
            let len = file.metadata().ok()?.len();
            let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
            if end > len || id >> ID_BITS != 0 {
                return None;
            }
            let segment = Arc::new(Segment {
                id: SegmentId(id),
                file,
                inode: range.inode,
                len,
                allocated,
            });
            known.push(Arc::downgrade(&segment));
            segment
        }
    };
    Some(SegmentRange {
        segment,
        offset: range.offset,
    })
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct FileRange {
    inode: Inode,
    offset: u64,
}

/// The part of a memfd mapped shared from `start` to `end` in /proc/self/maps (proc_pid_maps(5)),
/// where protection and advice may split a mapping into several lines.
fn mapped_file(maps: &[u8], start: usize, end: usize) -> Option<FileRange> {
    let mut found: Option<FileRange> = None;
    let mut reached = start;
    for line in maps.split(|byte| *byte == b'\n') {
        let line = String::from_utf8_lossy(line);
        let Some(piece) = Piece::parse(&line) else {
            continue;
        };
        if piece.end <= reached {
            continue;
        }
        if piece.start > reached || !piece.is_shared_memfd {
            return None;
        }
        let offset = piece.offset.checked_add((reached - piece.start) as u64)?;
        match found {
            None => {
                let inode = piece.inode;
                found = Some(FileRange { inode, offset });
            }
            Some(begun) if begun.inode == piece.inode && begun.offset + (reached - start) as u64 == offset => {}
            Some(_) => return None,
        }
        reached = piece.end;
        if reached >= end {
            return found;
        }
    }
    None
}

struct Piece {
    start: usize,
    end: usize,
    is_shared_memfd: bool,
    offset: u64,
    inode: Inode,
}

impl Piece {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let rights = words.next()?;
        let offset = words.next()?;
        let (major, minor) = words.next()?.split_once(':')?;
        let number = words.next()?;
        let path = words.next().unwrap_or_default();
        let hex = |text| u32::from_str_radix(text, 16).ok();
        Some(Self {
            start: usize::from_str_radix(start, 16).ok()?,
            end: usize::from_str_radix(end, 16).ok()?,
            is_shared_memfd: rights.ends_with('s') && path.starts_with("/memfd:"),
            offset: u64::from_str_radix(offset, 16).ok()?,
            inode: Inode {
                dev: libc::makedev(hex(major)?, hex(minor)?),
                number: number.parse().ok()?,
            },
        })
    }
}

/// Opens the file of one of this process's descriptors read-only, if it can be a segment; and
/// whether it is a memfd of doorbell-verbs, by its name.
fn open(inode: Inode) -> Option<(File, bool)> {
    for entry in fs::read_dir("/proc/self/fd").ok()? {
        // A memfd has no name: it is reached through the link. The descriptor may be closed or
        // reused at any time, so the opened file is checked again.
        let Ok(path) = entry.map(|entry| entry.path()) else {
            continue;
        };
        // Opening other files may have side effects.
        let Ok(target) = fs::read_link(&path) else {
            continue;
        };
        let name = target.as_os_str().as_bytes();
        if !name.starts_with(b"/memfd:") {
            continue;
        }
        let Ok(found) = fs::metadata(&path).map(|found| inode_of(&found)) else {
            continue;
        };
        if found != inode {
            continue;
        }
        let Ok(file) = File::open(&path) else {
            continue;
        };
        if !file.metadata().is_ok_and(|opened| inode_of(&opened) == inode) {
            continue;
        }
        if cannot_shrink(&file) || (seal(&path, inode) && cannot_shrink(&file)) {
            return Some((file, name == b"/memfd:doorbell (deleted)"));
        }
    }
    None
}

fn inode_of(file: &fs::Metadata) -> Inode {
    Inode {
        dev: file.dev(),
        number: file.ino(),
    }
}

/// Seals a memfd against shrinking, which needs a writable descriptor.
fn seal(path: &Path, inode: Inode) -> bool {
    let Ok(file) = File::options().write(true).open(path) else {
        return false;
    };
    file.metadata().is_ok_and(|opened| inode_of(&opened) == inode)
        && fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).is_ok()
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
