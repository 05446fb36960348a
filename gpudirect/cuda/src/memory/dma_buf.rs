//! Device memory as a dma-buf: what other drivers of the kernel, a NIC's, import it by.

use core::ffi::c_void;
use std::os::fd::OwnedFd;

use super::{DevicePtr, Span};
use crate::error::Error;
use crate::memory::share::owned;
use crate::sys::{self, pointer};

/// A dma-buf of device memory.
#[derive(Debug)]
pub struct DmaBuf {
    /// Its file descriptor. Whoever has registered it may close it.
    pub fd: OwnedFd,
    /// Where the memory begins that was asked for, in the dma-buf.
    pub offset: usize,
    /// The bytes of the dma-buf: whole pages of the host.
    pub len: usize,
    /// Where the dma-buf begins on the device.
    pub start: DevicePtr,
}

impl Span<'_> {
    /// The pages that it lies in as a dma-buf. The memory must be there as long as whoever imports it.
    ///
    /// # Errors
    /// [`Error::NotSupported`] where the device, its driver or its kernel modules have no dma-buf; [`Error::Missing`] before CUDA 11.7; [`Error::Empty`]; or what the driver says
    /// otherwise: of memory of the host, and of memory that was not made for GPUDirect RDMA.
    pub fn dma_buf(self) -> Result<DmaBuf, Error> {
        if self.is_empty() {
            return Err(Error::Empty);
        }
        let context = self.resource().context();
        let driver = context.driver();
        let Some(get) = driver.table().mem_get_handle_for_address_range else {
            return Err(driver.missing("cuMemGetHandleForAddressRange"));
        };
        let page = page_size();
        let (address, end) = (self.address(), self.address() + self.len() as u64);
        let start = address / page * page;
        let len = (end.next_multiple_of(page) - start) as usize;

        let _entered = context.enter()?;
        let mut fd = -1;
        // SAFETY: the pointer is to a file descriptor's room, which is what this kind of handle is written to. Device memory is mapped in pages of 64 KiB and more,
        // so that the host's pages around the range are mapped too.
        let answer = unsafe { get((&raw mut fd).cast::<c_void>(), start, len, sys::RANGE_DMA_BUF_FD, 0) };
        driver.check(
            answer,
            "cuMemGetHandleForAddressRange",
            format_args!("{len} bytes of {} as a dma-buf", context.device()),
        )?;
        Ok(DmaBuf {
            fd: owned("cuMemGetHandleForAddressRange", fd)?,
            offset: (address - start) as usize,
            len,
            start: DevicePtr(start),
        })
    }

    /// Makes copies and fills of CUDA that wait for their own end (`cuMemcpy`) wait for all of their work where they are of the allocation that it lies in: what GPUDirect RDMA asks for.
    ///
    /// # Errors
    /// What the driver says: some do not have it for mapped memory, where [`Context::set_sync_memops`](crate::Context::set_sync_memops) does the same.
    pub fn set_sync_memops(self) -> Result<(), Error> {
        let context = self.resource().context();
        let driver = context.driver();
        let _entered = context.enter()?;
        let yes: u32 = 1;
        // SAFETY: this attribute is set from an unsigned int; the address lies in memory that is live.
        let answer = unsafe {
            (driver.table().pointer_set_attribute)((&raw const yes).cast(), pointer::SYNC_MEMOPS, self.address())
        };
        driver.check(
            answer,
            "cuPointerSetAttribute",
            format_args!("SYNC_MEMOPS of memory of {}", context.device()),
        )
    }
}

/// The host's page size.
fn page_size() -> u64 {
    // SAFETY: sysconf(3) has no requirements.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size)
        .ok()
        .filter(|size| size.is_power_of_two())
        .unwrap_or(4096)
}
