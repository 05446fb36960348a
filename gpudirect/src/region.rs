//! Registered GPU memory: the buffer that is posted, and what is known of how it was registered.

use core::fmt;
use core::ops::RangeBounds;
use std::sync::Arc;

use doorbell_cuda::{HostMemory, Memory, Stream};
use doorbell_verbs::{Buffer, Exposed, Kind, Local, Opaque, Remote, Rights};

use crate::memory::GpuMemory;
use crate::path::{Path, Refused};
use crate::transfer::Transfer;

/// GPU memory as a buffer of verbs with rights `R`, and how it came to be one.
///
/// The buffer is posted as any other ([`Opaque`]); the memory is kept as long as either is there.
#[derive(Debug)]
pub struct GpuBuffer<R: Rights = Local> {
    buffer: Buffer<Opaque<R>>,
    region: GpuRegion,
}

impl<R: Rights> GpuBuffer<R> {
    pub(crate) fn new(buffer: Buffer<Opaque<R>>, region: GpuRegion) -> Self {
        Self { buffer, region }
    }

    /// How it was registered.
    #[must_use]
    pub fn region(&self) -> &GpuRegion {
        &self.region
    }

    /// The buffer.
    #[must_use]
    pub fn buffer(&self) -> &Buffer<Opaque<R>> {
        &self.buffer
    }

    /// The buffer, to be posted and cut up, and how it was registered.
    #[must_use]
    pub fn into_parts(self) -> (Buffer<Opaque<R>>, GpuRegion) {
        (self.buffer, self.region)
    }
}

impl<R: Exposed> GpuBuffer<R> {
    /// What to hand to a peer, so that it can reach this memory with the rights it has.
    #[must_use]
    pub fn remote(&self) -> Remote<R::Key> {
        self.buffer.remote()
    }
}

/// How GPU memory was registered, and what that asks for before its bytes are sent and after they have arrived. Handles are reference-counted; each keeps the memory.
#[derive(Clone)]
pub struct GpuRegion(Arc<Inner>);

struct Inner {
    memory: GpuMemory,
    path: Path,
    refused: Vec<Refused>,
    /// Where it begins, as requests and peers name it.
    start: u64,
    mirror: Option<HostMemory>,
}

impl GpuRegion {
    pub(crate) fn new(memory: GpuMemory, path: Path, refused: Vec<Refused>, mirror: Option<HostMemory>) -> Self {
        let start = mirror
            .as_ref()
            .map_or(memory.device_ptr().0, |mirror| mirror.as_ptr().addr() as u64);
        Self(Arc::new(Inner {
            memory,
            path,
            refused,
            start,
            mirror,
        }))
    }

    /// By which path it was registered.
    #[must_use]
    pub fn path(&self) -> Path {
        self.0.path
    }

    /// The better paths, and why each was not possible.
    #[must_use]
    pub fn refused(&self) -> &[Refused] {
        &self.0.refused
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &GpuMemory {
        &self.0.memory
    }

    /// The mirror in the host's memory that is registered in its place, where it is staged.
    #[must_use]
    pub fn mirror(&self) -> Option<&HostMemory> {
        self.0.mirror.as_ref()
    }

    /// Where `buffer`, which was cut from it, lies in the memory.
    #[must_use]
    pub fn range_of<K: Kind>(&self, buffer: &Buffer<K>) -> core::ops::Range<usize> {
        let offset = usize::try_from(buffer.addr().wrapping_sub(self.0.start)).unwrap_or(usize::MAX);
        offset..offset.saturating_add(buffer.len())
    }

    /// Has the bytes of `range` ready for the adapter, as work put into `stream` before leaves them: when the transfer says so of a part, that part may be posted.
    ///
    /// A direct path only waits for that work. A mirror is copied to, part by part, so that the first can be on its way while the others are copied.
    ///
    /// # Errors
    /// The CUDA driver's error; [`OutOfBounds`](doorbell_cuda::Error::OutOfBounds).
    pub fn push(&self, range: impl RangeBounds<usize>, stream: &Stream) -> Result<Transfer, doorbell_cuda::Error> {
        let memory = self.0.memory.span(range)?;
        let offset = (memory.device_ptr().0 - self.0.memory.device_ptr().0) as usize;
        match &self.0.mirror {
            None => Transfer::after(stream, offset, memory.len()),
            Some(mirror) => {
                let into = mirror.span(offset..offset + memory.len())?;
                Transfer::copy(stream, offset, into, memory)
            }
        }
    }

    /// Has work put into `stream` from now on find in `range` what the adapter has written there, as a completion has said: a mirror is copied from; a direct path needs nothing
    /// here. For what else it may need see [`Arrivals`](crate::Arrivals).
    ///
    /// # Errors
    /// The CUDA driver's error; [`OutOfBounds`](doorbell_cuda::Error::OutOfBounds).
    pub fn pull(&self, range: impl RangeBounds<usize>, stream: &Stream) -> Result<Transfer, doorbell_cuda::Error> {
        let memory = self.0.memory.span(range)?;
        let offset = (memory.device_ptr().0 - self.0.memory.device_ptr().0) as usize;
        match &self.0.mirror {
            None => Ok(Transfer::done(offset, memory.len())),
            Some(mirror) => {
                let from = mirror.span(offset..offset + memory.len())?;
                Transfer::copy(stream, offset, memory, from)
            }
        }
    }
}

impl fmt::Debug for GpuRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuRegion")
            .field("path", &self.0.path)
            .field("memory", &self.0.memory)
            .finish_non_exhaustive()
    }
}
