//! Registered GPU memory: the buffer to post, and how it was registered.

use core::ops::RangeBounds;
use std::sync::Arc;

use doorbell_cuda::{HostMemory, Memory, Stream};
use doorbell_verbs::{Buffer, Local, MemoryKind, Opaque, PeerAccessible, Remote, Rights};

use crate::memory::GpuMemory;
use crate::path::{Path, Refused};
use crate::transfer::Transfer;

/// A buffer of GPU memory with rights `R` ([`Opaque`]) and its registration; each keeps the memory.
#[derive(Debug)]
pub struct GpuBuffer<R: Rights = Local> {
    buffer: Buffer<Opaque<R>>,
    region: GpuRegion,
}

impl<R: Rights> GpuBuffer<R> {
    pub(crate) fn new(buffer: Buffer<Opaque<R>>, region: GpuRegion) -> Self {
        Self { buffer, region }
    }

    /// Its registration.
    #[must_use]
    pub fn region(&self) -> &GpuRegion {
        &self.region
    }

    /// The buffer.
    #[must_use]
    pub fn buffer(&self) -> &Buffer<Opaque<R>> {
        &self.buffer
    }

    /// Splits it into the buffer and its registration.
    #[must_use]
    pub fn into_parts(self) -> (Buffer<Opaque<R>>, GpuRegion) {
        (self.buffer, self.region)
    }
}

impl<R: PeerAccessible> GpuBuffer<R> {
    /// The remote key for a peer, with the buffer's rights.
    #[must_use]
    pub fn remote(&self) -> Remote<R::Key> {
        self.buffer.remote()
    }
}

/// A reference-counted registration that keeps its GPU memory, with the copies that it needs.
#[derive(Clone)]
pub struct GpuRegion(Arc<Inner>);

struct Inner {
    memory: GpuMemory,
    path: Path,
    refused: Vec<Refused>,
    /// Its address in work requests and remote keys.
    start: u64,
    staging: Option<HostMemory>,
}

impl GpuRegion {
    pub(crate) fn new(memory: GpuMemory, path: Path, refused: Vec<Refused>, staging: Option<HostMemory>) -> Self {
        let start = staging
            .as_ref()
            .map_or(memory.device_ptr().0, |staging| staging.as_ptr().addr() as u64);
        Self(Arc::new(Inner {
            memory,
            path,
            refused,
            start,
            staging,
        }))
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> Path {
        self.0.path
    }

    /// The better paths with the reason each failed.
    #[must_use]
    pub fn refused(&self) -> &[Refused] {
        &self.0.refused
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &GpuMemory {
        &self.0.memory
    }

    /// The range of the memory that corresponds to `buffer`, a slice of its buffer.
    #[must_use]
    pub fn range_of<K: MemoryKind>(&self, buffer: &Buffer<K>) -> core::ops::Range<usize> {
        let offset = usize::try_from(buffer.addr().wrapping_sub(self.0.start)).unwrap_or(usize::MAX);
        offset..offset.saturating_add(buffer.len())
    }

    /// Prepares `range`, as left by earlier work of `stream`, for the adapter. A direct path only
    /// waits for that work; a staging buffer is filled in parts, each to be posted once the
    /// transfer returns it, so that sending overlaps copying.
    ///
    /// # Errors
    /// The CUDA driver's error; [`OutOfBounds`](doorbell_cuda::Error::OutOfBounds).
    pub fn push(&self, range: impl RangeBounds<usize>, stream: &Stream) -> Result<Transfer, doorbell_cuda::Error> {
        let memory = self.0.memory.span(range)?;
        let offset = (memory.device_ptr().0 - self.0.memory.device_ptr().0) as usize;
        match &self.0.staging {
            None => Transfer::after(stream, offset, memory.len()),
            Some(staging) => {
                let into = staging.span(offset..offset + memory.len())?;
                Transfer::copy(stream, offset, into, memory)
            }
        }
    }

    /// Makes data that the adapter has written to `range`, as reported by a completion, available
    /// to later work of `stream`, by a copy if staged. Flushes: [`Arrivals`](crate::Arrivals).
    ///
    /// # Errors
    /// The CUDA driver's error; [`OutOfBounds`](doorbell_cuda::Error::OutOfBounds).
    pub fn pull(&self, range: impl RangeBounds<usize>, stream: &Stream) -> Result<Transfer, doorbell_cuda::Error> {
        let memory = self.0.memory.span(range)?;
        let offset = (memory.device_ptr().0 - self.0.memory.device_ptr().0) as usize;
        match &self.0.staging {
            None => Ok(Transfer::done(offset, memory.len())),
            Some(staging) => {
                let from = staging.span(offset..offset + memory.len())?;
                Transfer::copy(stream, offset, memory, from)
            }
        }
    }
}

debug_fields!(GpuRegion, self, path = self.0.path, memory = self.0.memory);
