//! A peer's segments, mapped.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;

use nix::sys::mman::{MapFlags, ProtFlags};

use super::segment::{SegmentId, cannot_shrink};
use crate::mapping::SharedMapping;

/// Why a segment cannot be mapped.
#[derive(Debug, thiserror::Error)]
pub enum UnfitSegment {
    /// It could shrink, which would be a SIGBUS here, or it is not plain shared memory.
    #[error("segment {0} of the other process is not a memfd that is sealed against shrinking")]
    RecordKind(SegmentId),
    /// It is mapped already, or there are too many.
    #[error("the other process has shared {MAX_SEGMENTS} segments already, or segment {0} twice")]
    Refused(SegmentId),
    /// Mapping failed.
    #[error("cannot map segment {0} of the other process: {1}")]
    Map(SegmentId, io::Error),
}

const MAX_SEGMENTS: usize = 4096;

/// Segments up to this size are populated when mapped; larger ones on use.
const POPULATE_MAX: usize = 64 << 20;

/// What a mapping of a segment permits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum SegmentAccess {
    Read,
    /// Reading, too.
    Write,
}

#[derive(Debug, Default)]
pub(crate) struct MappedSegments {
    mapped: Vec<MappedSegment>,
    tried: u64,
}

/// A segment of a peer, mapped.
#[derive(Debug)]
pub(crate) struct MappedSegment {
    id: SegmentId,
    map: SharedMapping,
    access: SegmentAccess,
}

impl MappedSegment {
    pub(crate) fn new(id: SegmentId, fd: OwnedFd, access: SegmentAccess) -> Result<Self, UnfitSegment> {
        let file = File::from(fd);
        if !cannot_shrink(&file) {
            return Err(UnfitSegment::RecordKind(id));
        }
        let failed = |error| UnfitSegment::Map(id, error);
        let len = usize::try_from(file.metadata().map_err(failed)?.len()).unwrap_or(0);
        let Some(len) = NonZeroUsize::new(len) else {
            return Err(UnfitSegment::RecordKind(id));
        };
        let populated = len.get() <= POPULATE_MAX;
        let flags = if populated {
            MapFlags::MAP_POPULATE
        } else {
            MapFlags::empty()
        };
        let rights = match access {
            SegmentAccess::Read => ProtFlags::PROT_READ,
            SegmentAccess::Write => ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
        };
        let map = SharedMapping::with_flags(&file, len, rights, flags).map_err(failed)?;
        Ok(Self { id, map, access })
    }
}

impl MappedSegments {
    pub(super) fn add(&mut self, id: SegmentId, fd: OwnedFd) -> Result<(), UnfitSegment> {
        self.tried += 1;
        if self.mapped.iter().any(|mapped| mapped.id == id) {
            return Err(UnfitSegment::Refused(id));
        }
        self.insert(MappedSegment::new(id, fd, SegmentAccess::Read)?)
    }

    /// Adds a segment, or replaces the mapping of one.
    pub(crate) fn insert(&mut self, segment: MappedSegment) -> Result<(), UnfitSegment> {
        self.remove(segment.id);
        if self.mapped.len() >= MAX_SEGMENTS {
            return Err(UnfitSegment::Refused(segment.id));
        }
        self.mapped.push(segment);
        Ok(())
    }

    pub(crate) fn remove(&mut self, id: SegmentId) {
        self.mapped.retain(|mapped| mapped.id != id);
    }

    /// Counts an announcement that is not to be mapped. Returns the count.
    pub(super) fn skip(&mut self) -> u64 {
        self.tried += 1;
        self.tried
    }

    pub(super) fn tried(&self) -> u64 {
        self.tried
    }

    /// The address of a range of a segment, if it is inside and permits the access.
    pub(crate) fn find(&self, id: SegmentId, offset: u64, len: usize, access: SegmentAccess) -> Option<*mut u8> {
        let mapped = self.mapped.iter().find(|mapped| mapped.id == id)?;
        if mapped.access < access {
            return None;
        }
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(len)?;
        // SAFETY: `offset` is within the mapping, as `end` is.
        (end <= mapped.map.len().get()).then(|| unsafe { mapped.map.start().as_ptr().add(offset) })
    }
}
