//! Device memory between processes: exported as a file descriptor, which goes over a Unix socket, and imported from one.
//!
//! The memory lives as long as any process has it mapped or holds a descriptor of it: no process can free what another uses, and none need outlive another.

use core::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use super::device::{DeviceMemory, DeviceMemoryOptions, round_up};
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
