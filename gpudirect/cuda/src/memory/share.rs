//! Device memory between processes: exported as a file descriptor, which goes over a Unix socket, and imported from one; or, where somebody has allocated it by `cuMemAlloc`, by the older kind of handle.
//!
//! What goes by a descriptor lives as long as any process has it mapped or holds a descriptor of it: no process can free what another uses, and none need outlive another. What goes by a handle must be kept by whoever has allocated it.

use core::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use super::device::{DeviceMemory, DeviceMemoryOptions, reaches, round_up};
use super::foreign::{Foreign, IpcHandle};
use super::{Memory, Part};
use crate::context::Context;
use crate::driver::Driver;
use crate::error::Error;
use crate::sys::{self, AllocationHandle, AllocationProp};

impl DeviceMemory {
    /// A file descriptor that other processes, and this one, import it by. It stands for all of [`DeviceMemory::mapped_len`] and for every right to it.
    ///
    /// # Errors
    /// What the driver says: of memory that was imported and may not go further, and beyond the limit of open files.
    pub fn export_fd(&self) -> Result<OwnedFd, Error> {
        let _entered = self.context().enter()?;
        export(self.context().driver(), self.handle())
    }

    /// Maps what a file descriptor stands for, for the device of `context`; see [`DeviceMemoryOptions::import`].
    ///
    /// # Errors
    /// As [`DeviceMemoryOptions::import`].
    pub fn import(context: &crate::Context, fd: BorrowedFd<'_>, len: usize) -> Result<Self, Error> {
        Self::options(context).import(fd, len)
    }
}

impl DeviceMemoryOptions<'_> {
    /// Maps `len` bytes of what `fd` stands for, which [`DeviceMemory::export_fd`] gave, of whatever device they are. The descriptor is not needed any longer then.
    ///
    /// # Errors
    /// [`Error::NoPeerAccess`] where the device does not reach the memory's, [`Error::Empty`], or what the driver says: `CUDA_ERROR_INVALID_VALUE` of a descriptor
    /// that stands for no memory, or for less than `len`.
    pub fn import(&self, fd: BorrowedFd<'_>, len: usize) -> Result<DeviceMemory, Error> {
        if len == 0 {
            return Err(Error::Empty);
        }
        let device = self.context().device();
        let driver = device.driver();
        let _entered = self.context().enter()?;
        let mut handle = 0;
        let number = usize::try_from(fd.as_raw_fd()).unwrap_or(usize::MAX);
        // SAFETY: the pointer is to a handle of ours. The descriptor goes in the place of a pointer, as the driver has it; the driver keeps a duplicate of what it stands for.
        let answer = unsafe {
            (driver.table().mem_import)(
                &raw mut handle,
                ptr::without_provenance_mut(number),
                sys::HANDLE_POSIX_FD,
            )
        };
        driver.check(
            answer,
            "cuMemImportFromShareableHandle",
            format_args!("{len} bytes for {device}"),
        )?;
        let rounded = properties(driver, handle).and_then(|prop| Ok((prop, round_up(device, &prop, len)?)));
        match rounded {
            Ok((prop, (granularity, mapped))) => self.map(handle, &prop, granularity, len, mapped),
            Err(error) => {
                release(driver, handle);
                Err(error)
            }
        }
    }
}

/// What another process is given an allocation by.
#[derive(Debug)]
pub enum Handle {
    /// A descriptor of mapped memory, to be sent over a Unix socket.
    Descriptor(OwnedFd),
    /// What `cuIpcOpenMemHandle` takes: bytes, for other processes of this host.
    Ipc(IpcHandle),
}

/// A range of memory, as another process is told of it.
#[derive(Debug)]
pub struct Shared {
    /// Of the allocation.
    pub handle: Handle,
    /// Bytes of the allocation.
    pub allocation: usize,
    /// Where in the allocation the range begins.
    pub offset: usize,
    /// Bytes of the range.
    pub len: usize,
}

/// Memory of a device that other processes can be given.
pub trait Shareable: Memory + core::fmt::Debug {
    /// What another process needs to reach all of it.
    ///
    /// # Errors
    /// [`Error::Scattered`], or what the driver says of memory that cannot be shared.
    fn share(&self) -> Result<Shared, Error>;
}

impl Shareable for DeviceMemory {
    fn share(&self) -> Result<Shared, Error> {
        Ok(Shared {
            handle: Handle::Descriptor(self.export_fd()?),
            allocation: self.len(),
            offset: 0,
            len: self.len(),
        })
    }
}

impl Shareable for Foreign {
    fn share(&self) -> Result<Shared, Error> {
        let (allocation, is_mapped) = self.allocation()?;
        let (handle, offset) = if is_mapped {
            let (fd, offset) = self.export_fd()?;
            (Handle::Descriptor(fd), offset)
        } else {
            let (handle, offset) = self.ipc_handle()?;
            (Handle::Ipc(handle), offset)
        };
        let len = self.len();
        if offset.saturating_add(len) > allocation {
            let first = allocation.saturating_sub(offset);
            return Err(Error::Scattered { len, first });
        }
        Ok(Shared {
            handle,
            allocation,
            offset,
            len,
        })
    }
}

impl Shared {
    /// Maps it for the device of `context`. A descriptor is not needed any longer then.
    ///
    /// # Safety
    /// What goes by [`Handle::Ipc`] must be another process's, and be kept by it until this one has let go of it: see [`Foreign::open`].
    ///
    /// # Errors
    /// As [`DeviceMemory::import`] and [`Foreign::open`]; [`Error::NoPeerAccess`] where the device does not reach it, [`Error::OutOfBounds`] where the range is not in the allocation.
    pub unsafe fn open(&self, context: &Context) -> Result<Part, Error> {
        let range = self.offset..self.offset.saturating_add(self.len);
        match &self.handle {
            Handle::Descriptor(fd) => {
                let memory = DeviceMemory::import(context, fd.as_fd(), self.allocation)?;
                // Of a device that this process does not see nothing can be asked.
                if let Some(home) = memory.device().filter(|home| *home != context.device()) {
                    reaches(context.device(), home)?;
                }
                Ok(memory.span(range)?.keep())
            }
            Handle::Ipc(handle) => {
                // SAFETY: the caller's promise, word for word.
                let memory = unsafe { Foreign::open(context, handle)? };
                Ok(memory.span(range)?.keep())
            }
        }
    }
}

/// A descriptor of an allocation.
pub(super) fn export(driver: Driver, handle: AllocationHandle) -> Result<OwnedFd, Error> {
    let mut fd = -1;
    // SAFETY: the pointer is to a file descriptor's room, which is what this kind of handle is written to; the allocation is live.
    let answer =
        unsafe { (driver.table().mem_export)((&raw mut fd).cast::<c_void>(), handle, sys::HANDLE_POSIX_FD, 0) };
    driver.check(answer, "cuMemExportToShareableHandle", format_args!("device memory"))?;
    owned("cuMemExportToShareableHandle", fd)
}

/// The descriptor that the driver gave.
pub(super) fn owned(call: &'static str, fd: i32) -> Result<OwnedFd, Error> {
    if fd < 0 {
        return Err(Error::NoDescriptor { call, fd });
    }
    // SAFETY: the driver has opened it for this, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// What an allocation was made like.
pub(super) fn properties(driver: Driver, handle: AllocationHandle) -> Result<AllocationProp, Error> {
    let mut prop = AllocationProp::NONE;
    // SAFETY: the pointer is to properties of ours; the allocation is live.
    let answer = unsafe { (driver.table().mem_get_allocation_properties)(&raw mut prop, handle) };
    driver.check(
        answer,
        "cuMemGetAllocationPropertiesFromHandle",
        format_args!("device memory"),
    )?;
    Ok(prop)
}

/// Lets go of an allocation that was only looked at.
pub(super) fn release(driver: Driver, handle: AllocationHandle) {
    // SAFETY: the handle was retained or imported once by the caller, and is used no more.
    let answer = unsafe { (driver.table().mem_release)(handle) };
    if let Err(error) = driver.check(answer, "cuMemRelease", format_args!("device memory")) {
        tracing::warn!("device memory was not let go of: {error}");
    }
}
