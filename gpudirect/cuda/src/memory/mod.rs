//! Memory that work on a device reads and writes: the device's own ([`DeviceMemory`]), the host's, pinned ([`HostMemory`]), and what somebody else has allocated ([`Foreign`]). What of a device's other processes can be given is [`Shareable`].
//!
//! A handle keeps its memory; handles are cloned freely. Memory is freed when its last handle is dropped and the work that uses it is done (see the crate's
//! documentation). A [`Span`] is a checked range of it: what copies and launches take; a [`Part`] is one that keeps its memory.

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
pub use share::{Handle, Shareable, Shared};

use crate::error::Error;
use crate::resource::{Place, Resource};
use crate::sys::Address;

/// An address that kernels can use: a `CUdeviceptr`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DevicePtr({:#x})", self.0)
    }
}

/// Memory of any kind.
pub trait Memory: sealed::Sealed {
    /// Its bytes.
    fn len(&self) -> usize {
        self.resource().region().len
    }

    /// Whether it has no bytes: never, but a slice would be asked so.
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
    /// [`Error::OutOfBounds`] where they do not lie in it.
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

    /// What only this crate's memory can do.
    pub trait Sealed {
        /// What keeps it.
        #[allow(private_interfaces)] // Nobody can name this method outside the crate.
        fn resource(&self) -> &Arc<Resource>;
    }
}
pub(crate) use sealed::Sealed;

/// A range of memory, known to lie in it.
#[derive(Clone, Copy)]
pub struct Span<'a> {
    resource: &'a Arc<Resource>,
    offset: usize,
    len: usize,
}

impl<'a> Span<'a> {
    /// Its bytes.
    #[must_use]
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The bytes of `range` of this one.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] where they do not lie in it.
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

    /// Where it begins, for a kernel of the context that the memory is of, and of devices that the memory is mapped for.
    #[must_use]
    pub fn device_ptr(self) -> DevicePtr {
        DevicePtr(self.address())
    }

    /// Where it begins in its memory.
    pub(crate) fn offset(self) -> usize {
        self.offset
    }

    pub(crate) fn address(self) -> Address {
        self.resource.region().address + self.offset as Address
    }

    /// Where it lies; on the host, where it begins there.
    pub(crate) fn place(self) -> Place {
        match self.resource.region().place {
            Place::Device => Place::Device,
            Place::Host { at } => Place::Host { at: at + self.offset },
        }
    }

    pub(crate) fn resource(self) -> &'a Arc<Resource> {
        self.resource
    }
}

impl Span<'_> {
    /// The same range, as a value that keeps its memory.
    #[must_use]
    pub fn keep(self) -> Part {
        Part {
            resource: Arc::clone(self.resource),
            offset: self.offset,
            len: self.len,
        }
    }
}

/// A range of memory that keeps it: of whatever kind, whoever has made it. Cloned freely, as other handles are.
#[derive(Clone)]
pub struct Part {
    resource: Arc<Resource>,
    offset: usize,
    len: usize,
}

impl Part {
    /// Where it begins.
    #[must_use]
    pub fn device_ptr(&self) -> DevicePtr {
        self.all().device_ptr()
    }
}

impl Sealed for Part {
    #[allow(private_interfaces)] // As the trait has it.
    fn resource(&self) -> &Arc<Resource> {
        &self.resource
    }
}

impl Memory for Part {
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

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.all().fmt(f)
    }
}

impl fmt::Debug for Span<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Span")
            .field("place", &self.place())
            .field("address", &self.device_ptr())
            .field("len", &self.len)
            .finish()
    }
}
