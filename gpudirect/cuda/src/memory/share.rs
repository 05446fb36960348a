//! Sharing device memory between processes: by file descriptor over a Unix socket, where it lives
//! as long as any process maps it or holds a descriptor; or, for memory from `cuMemAlloc`, by CUDA
//! IPC handle, where its allocating process must keep it.

use core::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use super::device::{DeviceMemory, DeviceMemoryOptions, check_peer_access, round_up};
use super::foreign::{Foreign, IpcHandle};
use super::{Memory, OwnedSpan};
use crate::context::Context;
use crate::driver::Driver;
use crate::error::Error;
use crate::sys::{self, AllocationHandle, AllocationProp};

impl DeviceMemory {
    /// A descriptor to import it by; grants access to all of [`DeviceMemory::mapped_len`].
    ///
    /// # Errors
    /// The driver's, for memory that may not be re-exported, and beyond the open-file limit.
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export_fd(&self) -> Result<OwnedFd, Error> {
        let _entered = self.context().enter()?;
        export(self.context().driver(), self.handle())
    }

    /// Maps the memory of `fd` for the device of `context`; see [`DeviceMemoryOptions::import`].
    #[doc(alias = "cuMemImportFromShareableHandle")]
    pub fn import(context: &crate::Context, fd: BorrowedFd<'_>, len: usize) -> Result<Self, Error> {
        Self::options(context).import(fd, len)
    }
}

impl DeviceMemoryOptions<'_> {
    /// Maps `len` bytes of an [exported](DeviceMemory::export_fd) `fd`, not needed afterwards.
    ///
    /// # Errors
    /// [`Error::NoPeerAccess`] if the device cannot access the memory's, [`Error::Empty`], or
    /// the driver's: `CUDA_ERROR_INVALID_VALUE` for a descriptor of less than `len`, or no, memory.
    pub fn import(&self, fd: BorrowedFd<'_>, len: usize) -> Result<DeviceMemory, Error> {
        if len == 0 {
            return Err(Error::Empty);
        }
        let device = self.context().device();
        let driver = device.driver();
        let _entered = self.context().enter()?;
        let mut handle = 0;
        let number = usize::try_from(fd.as_raw_fd()).unwrap_or(usize::MAX);
        // SAFETY: the pointer is to a local handle. The descriptor is passed in place of a pointer,
        // as the driver specifies; the driver keeps its own reference.
        let status = unsafe {
            (driver.table().mem_import)(
                &raw mut handle,
                ptr::without_provenance_mut(number),
                sys::HANDLE_POSIX_FD,
            )
        };
        driver.check(
            status,
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

/// The handle by which another process opens an allocation.
#[derive(Debug)]
pub enum MemoryHandle {
    /// The file descriptor of a VMM allocation, sent over a Unix socket.
    Descriptor(OwnedFd),
    /// The bytes that `cuIpcOpenMemHandle` takes, for other processes of this host.
    Ipc(IpcHandle),
}

/// A range of memory as exported to another process.
#[derive(Debug)]
pub struct ExportedRange {
    /// The handle of the allocation.
    pub handle: MemoryHandle,
    /// Bytes of the allocation.
    pub allocation: usize,
    /// Offset of the range in the allocation.
    pub offset: usize,
    /// Bytes of the range.
    pub len: usize,
}

/// Device memory that can be shared with other processes.
pub trait Shareable: Memory + core::fmt::Debug {
    /// Exports all of it.
    ///
    /// # Errors
    /// [`Error::MultipleMappings`], or the driver's error for memory that cannot be shared.
    fn share(&self) -> Result<ExportedRange, Error>;
}

impl Shareable for DeviceMemory {
    fn share(&self) -> Result<ExportedRange, Error> {
        Ok(ExportedRange {
            handle: MemoryHandle::Descriptor(self.export_fd()?),
            allocation: self.len(),
            offset: 0,
            len: self.len(),
        })
    }
}

impl Shareable for Foreign {
    fn share(&self) -> Result<ExportedRange, Error> {
        let (allocation, is_mapped) = self.allocation()?;
        let (handle, offset) = if is_mapped {
            let (fd, offset) = self.export_fd()?;
            (MemoryHandle::Descriptor(fd), offset)
        } else {
            let (handle, offset) = self.ipc_handle()?;
            (MemoryHandle::Ipc(handle), offset)
        };
        let len = self.len();
        if offset.saturating_add(len) > allocation {
            let first = allocation.saturating_sub(offset);
            return Err(Error::MultipleMappings { len, first });
        }
        Ok(ExportedRange {
            handle,
            allocation,
            offset,
            len,
        })
    }
}

impl ExportedRange {
    /// Maps it for the device of `context`. A descriptor is not needed afterwards.
    ///
    /// # Safety
    /// For [`MemoryHandle::Ipc`], the memory must be another process's, which keeps it until this
    /// one has closed it: see [`Foreign::open`].
    ///
    /// # Errors
    /// As [`DeviceMemory::import`], [`Foreign::open`]; [`Error::OutOfBounds`] for a bad range.
    pub unsafe fn open(&self, context: &Context) -> Result<OwnedSpan, Error> {
        let range = self.offset..self.offset.saturating_add(self.len);
        match &self.handle {
            MemoryHandle::Descriptor(fd) => {
                let memory = DeviceMemory::import(context, fd.as_fd(), self.allocation)?;
                // Peer access to a device that this process does not see cannot be queried.
                if let Some(home) = memory.device().filter(|home| *home != context.device()) {
                    check_peer_access(context.device(), home)?;
                }
                Ok(memory.span(range)?.keep())
            }
            MemoryHandle::Ipc(handle) => {
                // SAFETY: the caller's promise, verbatim.
                let memory = unsafe { Foreign::open(context, handle)? };
                Ok(memory.span(range)?.keep())
            }
        }
    }
}

pub(super) fn export(driver: Driver, handle: AllocationHandle) -> Result<OwnedFd, Error> {
    let mut fd = -1;
    // SAFETY: the pointer is to a local int, which this handle type is written to; the allocation
    // is live.
    let status =
        unsafe { (driver.table().mem_export)((&raw mut fd).cast::<c_void>(), handle, sys::HANDLE_POSIX_FD, 0) };
    driver.check(status, "cuMemExportToShareableHandle", format_args!("device memory"))?;
    owned("cuMemExportToShareableHandle", fd)
}

pub(super) fn owned(call: &'static str, fd: i32) -> Result<OwnedFd, Error> {
    if fd < 0 {
        return Err(Error::NoDescriptor { call, fd });
    }
    // SAFETY: the driver has just opened it for this call, so it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(super) fn properties(driver: Driver, handle: AllocationHandle) -> Result<AllocationProp, Error> {
    let mut prop = AllocationProp::NONE;
    // SAFETY: the pointer is to properties of ours; the allocation is live.
    let status = unsafe { (driver.table().mem_get_allocation_properties)(&raw mut prop, handle) };
    driver.check(
        status,
        "cuMemGetAllocationPropertiesFromHandle",
        format_args!("device memory"),
    )?;
    Ok(prop)
}

pub(super) fn release(driver: Driver, handle: AllocationHandle) {
    // SAFETY: the caller retained or imported the handle once, and uses it no more.
    let status = unsafe { (driver.table().mem_release)(handle) };
    if let Err(error) = driver.check(status, "cuMemRelease", format_args!("device memory")) {
        tracing::warn!("device memory was not let go of: {error}");
    }
}
