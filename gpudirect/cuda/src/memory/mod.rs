//! Memory used by device work: VMM allocations ([`DeviceMemory`]), pinned host memory
//! ([`HostMemory`]), and memory allocated elsewhere ([`Foreign`]), some of it [`Shareable`].
//!
//! A handle keeps its memory. A [`Span`] is a checked, borrowed range for copies and launches; an
//! [`OwnedSpan`] also keeps its memory.

mod device;
mod dma_buf;
mod foreign;
mod host;
mod share;

use core::fmt;
use core::ops::{Bound, RangeBounds};
use std::sync::Arc;

pub use device::{DeviceMemory, DeviceMemoryOptions};
pub use dma_buf::DmaBuf;
pub use foreign::{Foreign, IpcHandle, MemoryType, PointerInfo};
pub use host::HostMemory;
pub use share::{ExportedRange, MemoryHandle, Shareable};

use crate::error::Error;
use crate::resource::{MemorySpace, Resource};
use crate::sys::Address;

/// A device pointer: a `CUdeviceptr`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
#[doc(alias = "CUdeviceptr")]
pub struct DevicePtr(pub u64);

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DevicePtr({:#x})", self.0)
    }
}

/// Memory of any kind.
pub trait Memory: sealed::Sealed {
    /// Its length in bytes.
    fn len(&self) -> usize {
        self.resource().region().len
    }

    /// Whether it has no bytes: always `false`, present because `len` is.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of it.
    fn all(&self) -> Span<'_> {
        Span {
            resource: self.resource(),
            offset: 0,
            len: self.len(),
        }
    }

    /// The bytes of `range`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if they exceed the memory.
    fn span(&self, range: impl RangeBounds<usize>) -> Result<Span<'_>, Error>
    where
        Self: Sized,
    {
        self.all().span(range)
    }
}

mod sealed {
    use std::sync::Arc;

    use crate::resource::Resource;

    /// Implemented only by this crate's memory types.
    pub trait Sealed {
        /// The resource that keeps it.
        #[allow(private_interfaces)] // Unnameable outside the crate.
        fn resource(&self) -> &Arc<Resource>;
    }
}
pub(crate) use sealed::Sealed;

/// A checked range of memory.
#[derive(Clone, Copy)]
pub struct Span<'a> {
    resource: &'a Arc<Resource>,
    offset: usize,
    len: usize,
}

impl<'a> Span<'a> {
    /// Its length in bytes.
    #[must_use]
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The bytes of `range` within it.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if they exceed it.
    pub fn span(self, range: impl RangeBounds<usize>) -> Result<Self, Error> {
        let start = match range.start_bound() {
            Bound::Included(at) => *at,
            Bound::Excluded(at) => at.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(at) => at.saturating_add(1),
            Bound::Excluded(at) => *at,
            Bound::Unbounded => self.len,
        };
        if start > end || end > self.len {
            return Err(Error::OutOfBounds {
                start,
                end,
                len: self.len,
            });
        }
        Ok(Self {
            resource: self.resource,
            offset: self.offset + start,
            len: end - start,
        })
    }

    /// Its device pointer, for kernels of every device that the memory is mapped for.
    #[must_use]
    pub fn device_ptr(self) -> DevicePtr {
        DevicePtr(self.address())
    }

    pub(crate) fn offset(self) -> usize {
        self.offset
    }

    pub(crate) fn address(self) -> Address {
        self.resource.region().address + self.offset as Address
    }

    /// Its memory space; for host memory, with the host address of the range.
    pub(crate) fn space(self) -> MemorySpace {
        match self.resource.region().space {
            MemorySpace::Device => MemorySpace::Device,
            MemorySpace::Host { at } => MemorySpace::Host { at: at + self.offset },
        }
    }

    pub(crate) fn resource(self) -> &'a Arc<Resource> {
        self.resource
    }
}

impl Span<'_> {
    /// The same range as a value that keeps its memory.
    #[must_use]
    pub fn keep(self) -> OwnedSpan {
        OwnedSpan {
            resource: Arc::clone(self.resource),
            offset: self.offset,
            len: self.len,
        }
    }
}

/// A range that keeps its memory, of any kind. Handles are reference-counted.
#[derive(Clone)]
pub struct OwnedSpan {
    resource: Arc<Resource>,
    offset: usize,
    len: usize,
}

impl OwnedSpan {
    /// Its device pointer.
    #[must_use]
    pub fn device_ptr(&self) -> DevicePtr {
        self.all().device_ptr()
    }
}

impl Sealed for OwnedSpan {
    #[allow(private_interfaces)] // As declared in the trait.
    fn resource(&self) -> &Arc<Resource> {
        &self.resource
    }
}

impl Memory for OwnedSpan {
    fn len(&self) -> usize {
        self.len
    }

    fn all(&self) -> Span<'_> {
        Span {
            resource: &self.resource,
            offset: self.offset,
            len: self.len,
        }
    }
}

impl fmt::Debug for OwnedSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.all().fmt(f)
    }
}

impl fmt::Debug for Span<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Span")
            .field("place", &self.space())
            .field("address", &self.device_ptr())
            .field("len", &self.len)
            .finish()
    }
}
