//! What is read and written: bytes of a file, and the memory that they are for.

use doorbell_cuda::Span;

use super::error::StorageError;
use super::file::File;

/// Memory that is read into.
#[derive(Debug)]
pub enum Target<'a> {
    /// Host memory. Where its address suits the offset ([`File::alignment`]), as of whole pages,
    /// the disk writes it without a copy.
    Host(&'a mut [u8]),
    /// GPU memory, or pinned memory, in the order of the stream of the `Storage`.
    Gpu(Span<'a>),
}

/// Memory that is written from.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// Host memory.
    Host(&'a [u8]),
    /// GPU memory, as earlier work of the stream of the `Storage` leaves it.
    Gpu(Span<'a>),
}

/// A read of a batch.
#[derive(Debug)]
pub struct Read<'a> {
    /// The file.
    pub file: &'a File,
    /// The offset of its first byte.
    pub offset: u64,
    /// Where to.
    pub into: Target<'a>,
}

/// A write of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Write<'a> {
    /// The file.
    pub file: &'a File,
    /// The offset of its first byte.
    pub offset: u64,
    /// Where from.
    pub from: Source<'a>,
}

impl<'a> From<&'a mut [u8]> for Target<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Self::Host(bytes)
    }
}

impl<'a> From<&'a mut Vec<u8>> for Target<'a> {
    fn from(bytes: &'a mut Vec<u8>) -> Self {
        Self::Host(bytes)
    }
}

impl<'a> From<Span<'a>> for Target<'a> {
    fn from(span: Span<'a>) -> Self {
        Self::Gpu(span)
    }
}

impl<'a> From<&'a [u8]> for Source<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Host(bytes)
    }
}

impl<'a> From<&'a Vec<u8>> for Source<'a> {
    fn from(bytes: &'a Vec<u8>) -> Self {
        Self::Host(bytes)
    }
}

impl<'a> From<Span<'a>> for Source<'a> {
    fn from(span: Span<'a>) -> Self {
        Self::Gpu(span)
    }
}

/// The memory of a request; borrowed for `'a`, so that addresses stay valid.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place<'a> {
    /// Written only by reads.
    Host(*mut u8),
    Gpu(Span<'a>),
}

/// A read or write of a batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request<'a> {
    pub(super) file: &'a File,
    pub(super) offset: u64,
    pub(super) len: usize,
    pub(super) place: Place<'a>,
}

impl<'a> Request<'a> {
    pub(super) fn read(read: &'a mut Read<'_>) -> Result<Self, StorageError> {
        let (place, len) = match &mut read.into {
            Target::Host(bytes) => (Place::Host(bytes.as_mut_ptr()), bytes.len()),
            Target::Gpu(span) => (Place::Gpu(*span), span.len()),
        };
        Self::checked(read.file, read.offset, len, place)
    }

    pub(super) fn write(write: &'a Write<'_>) -> Result<Self, StorageError> {
        let (place, len) = match &write.from {
            Source::Host(bytes) => (Place::Host(bytes.as_ptr().cast_mut()), bytes.len()),
            Source::Gpu(span) => (Place::Gpu(*span), span.len()),
        };
        Self::checked(write.file, write.offset, len, place)
    }

    fn checked(file: &'a File, offset: u64, len: usize, place: Place<'a>) -> Result<Self, StorageError> {
        file.check_range(offset, len)?;
        Ok(Self {
            file,
            offset,
            len,
            place,
        })
    }

    pub(super) fn is_gpu(&self) -> bool {
        matches!(self.place, Place::Gpu(_))
    }
}
