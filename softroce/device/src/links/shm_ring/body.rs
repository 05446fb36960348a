//! The payload of a received record, and the copy modes that move it.

use std::ptr;

use doorbell_roce_proto::memory::CopyError;

use super::layout::Mapping;
use super::mapped::{MappedSegments, SegmentAccess};
use super::record::Reference;
use super::ring::Consumer;
use crate::memory::Fault;
use crate::memory::copy::{self, WORD, tail_to_peer_visible};

#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    /// In the ring, in one piece from here on.
    Ring(*const u8),
    Referred {
        /// Some are outside the ring.
        revocable: bool,
        bulk: bool,
    },
}

/// The payload of a received record.
#[derive(Clone, Copy, Debug)]
pub struct RecordBody<'a> {
    pub(super) map: &'a Mapping,
    pub(super) segments: &'a MappedSegments,
    pub(super) own: bool,
    pub(super) position: u64,
    pub(super) references: &'a [Reference],
    pub(super) source: Source,
    pub(super) len: usize,
}

impl RecordBody<'_> {
    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[must_use]
    pub(crate) fn has_device(&self) -> bool {
        let is_device = |reference: &Reference| matches!(reference, Reference::Device { .. });
        matches!(self.source, Source::Referred { .. }) && self.references.iter().any(is_device)
    }

    /// The references to a range with GPU memory, each with its offset in the payload.
    pub fn pieces(&self, at: usize, len: usize) -> impl Iterator<Item = (usize, Reference)> {
        self.parts(at, len).scan(at, |next, part| {
            let start = *next;
            *next += part.len();
            Some((start, part))
        })
    }

    /// Whether it may be revoked until it is copied: not if it is in the ring.
    #[must_use]
    pub(crate) fn is_revocable(&self) -> bool {
        matches!(self.source, Source::Referred { revocable: true, .. })
    }

    /// Copies the `len` bytes from `at` on into memory of this process, the last eight after all
    /// others. Parts may be copied in any order, and more than once.
    ///
    /// # Errors
    /// [`CopyError::Gone`] when they are unavailable, and [`CopyError::Access`] when `dst` is not
    /// mapped. All but the last eight bytes there may have been written then.
    ///
    /// # Panics
    /// When the payload has no such range.
    ///
    /// # Safety
    /// `dst` is the application's or the caller's for `len` bytes, which are no part of the ring.
    /// They may be accessed concurrently; where they are the payload's own (of a ring to this
    /// process, or shared with the sender), their final content is as undefined as with any device.
    pub(crate) unsafe fn copy_to(&self, at: usize, len: usize, dst: *mut u8) -> Result<(), CopyError> {
        let end = at.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "{len} bytes from {at} on, of {}",
            self.len
        );
        // What this process itself has revoked may be unmapped. It revokes nothing while it
        // receives: both happen under the device's lock.
        if self.own && self.is_revocable() && Consumer::was_revoked(self.map, self.position) {
            return Err(CopyError::Gone);
        }
        let last = len.min(WORD);
        let mut word = [0; WORD];
        let head = len - last;
        // SAFETY: all but the last bytes of the caller's range; then as many bytes of `word`.
        unsafe {
            self.fetch(at, head, dst)?;
            self.fetch(at + head, last, word.as_mut_ptr())?;
        }
        if self.is_revocable() && Consumer::was_revoked(self.map, self.position) {
            return Err(CopyError::Gone);
        }
        // SAFETY: these are the last bytes of the caller's range.
        unsafe { tail_to_peer_visible(&word[..last], dst.wrapping_add(head)) }.map_err(|Fault| CopyError::Access)
    }

    /// Copies the bytes from `at` on into a slice.
    ///
    /// # Errors
    /// When they are unavailable.
    ///
    /// # Panics
    /// As `copy_to`.
    pub fn copy_to_slice(&self, at: usize, dst: &mut [u8]) -> Result<(), CopyError> {
        // SAFETY: a unique reference, so that it is part of nothing else.
        unsafe { self.copy_to(at, dst.len(), dst.as_mut_ptr()) }
    }

    /// Copies `len` bytes from `at` on, part by part.
    ///
    /// # Safety
    /// The payload has the range. `dst` is as for [`copy_to`](Self::copy_to).
    unsafe fn fetch(&self, at: usize, len: usize, mut dst: *mut u8) -> Result<(), CopyError> {
        if let Source::Ring(bytes) = self.source {
            // SAFETY: the payload is there (`Receiver::take` checked it against slot and bulk
            // area), so its part is. Each byte is read once, and is only copied.
            return unsafe { copy::unordered(bytes.add(at), dst, len) }.map_err(|Fault| CopyError::Access);
        }
        for part in self.parts(at, len) {
            // SAFETY: the parts together are as long as the range of `dst`.
            unsafe {
                self.fetch_part(part, dst)?;
                dst = dst.wrapping_add(part.len());
            }
        }
        Ok(())
    }

    /// # Safety
    /// `dst` is, for the part's length, as for [`copy_to`](Self::copy_to).
    unsafe fn fetch_part(&self, part: Reference, dst: *mut u8) -> Result<(), CopyError> {
        let len = part.len();
        let src = match part {
            Reference::Bulk { offset, .. } => self.map.bulk(offset, len).map(<*mut u8>::cast_const),
            Reference::Segment { id, offset, .. } => self
                .segments
                .find(id, offset, len, SegmentAccess::Read)
                .map(<*mut u8>::cast_const),
            Reference::Process { addr, .. } => self.own.then(|| ptr::with_exposed_provenance(addr as usize)),
            // GPU memory is copied by the GPU, not here.
            Reference::Device { .. } => None,
        };
        let src = src.ok_or(CopyError::Gone)?;
        // SAFETY: ring and segments are mapped for these ranges and cannot shrink; in a ring to
        // this process they are the application's. They are only copied, whatever is written
        // meanwhile.
        unsafe { copy::unordered(src, dst, len) }.map_err(|Fault| match part {
            // SAFETY: the same range. The sender finds it unmapped when it sends the packet again.
            Reference::Process { .. } if unsafe { copy::probe(src, len) }.is_err() => CopyError::Gone,
            _ => CopyError::Access,
        })
    }

    fn parts(&self, at: usize, len: usize) -> impl Iterator<Item = Reference> {
        let (mut skip, mut left) = (at, len);
        self.references.iter().filter_map(move |reference| {
            if skip >= reference.len() {
                skip -= reference.len();
                return None;
            }
            let len = left.min(reference.len() - skip);
            let part = reference.part(skip, len);
            skip = 0;
            left -= len;
            (len != 0).then_some(part)
        })
    }
}
