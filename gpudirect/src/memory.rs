//! GPU memory, allocated here or elsewhere.

use core::fmt;
use core::ops::RangeBounds;

use doorbell_cuda::{Context, DeviceMemory, DevicePtr, Foreign, Memory, Owner, Span};

/// Reference-counted GPU memory, freed once no handle, GPU work or adapter uses it any longer.
#[derive(Clone)]
pub struct GpuMemory {
    kind: Kind,
    context: Context,
}

#[derive(Clone)]
enum Kind {
    Allocated(DeviceMemory),
    Foreign(Foreign),
}

impl GpuMemory {
    /// Allocates `len` bytes on the GPU of `context`, exportable to other processes
    /// ([`DeviceMemory::export_fd`]) and GPUDirect RDMA capable if the GPU is.
    pub fn alloc(context: &Context, len: usize) -> Result<Self, doorbell_cuda::Error> {
        DeviceMemory::alloc(context, len).map(Self::from)
    }

    /// Wraps memory allocated elsewhere (PyTorch); `owner` keeps it, and is dropped after all use.
    ///
    /// # Safety
    /// Work of `context` must be able to read and write them until `owner` is dropped.
    #[expect(unsafe_code, reason = "the caller vouches for what the driver cannot check")]
    pub unsafe fn wrap(
        context: &Context,
        address: DevicePtr,
        len: usize,
        owner: Owner,
    ) -> Result<Self, doorbell_cuda::Error> {
        // SAFETY: the caller's promise, verbatim.
        let foreign = unsafe { Foreign::wrap(context, address, len, owner)? };
        Ok(Self {
            kind: Kind::Foreign(foreign),
            context: context.clone(),
        })
    }

    /// Its context.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Its length in bytes; never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there is no memory of no bytes")]
    pub fn len(&self) -> usize {
        self.all().len()
    }

    /// Its device pointer.
    #[must_use]
    pub fn device_ptr(&self) -> DevicePtr {
        self.all().device_ptr()
    }

    /// All of it, for copies and launches.
    #[must_use]
    pub fn all(&self) -> Span<'_> {
        match &self.kind {
            Kind::Allocated(memory) => memory.all(),
            Kind::Foreign(memory) => memory.all(),
        }
    }

    /// The bytes of `range`, for copies and launches.
    ///
    /// # Errors
    /// [`OutOfBounds`](doorbell_cuda::Error::OutOfBounds) if they exceed it.
    pub fn span(&self, range: impl RangeBounds<usize>) -> Result<Span<'_>, doorbell_cuda::Error> {
        self.all().span(range)
    }

    /// The allocation, if it was made here.
    #[must_use]
    pub fn allocated(&self) -> Option<&DeviceMemory> {
        match &self.kind {
            Kind::Allocated(memory) => Some(memory),
            Kind::Foreign(_) => None,
        }
    }
}

impl From<DeviceMemory> for GpuMemory {
    fn from(memory: DeviceMemory) -> Self {
        let context = memory.context().clone();
        Self {
            kind: Kind::Allocated(memory),
            context,
        }
    }
}

impl fmt::Debug for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            Kind::Allocated(memory) => memory.fmt(f),
            Kind::Foreign(memory) => memory.fmt(f),
        }
    }
}
