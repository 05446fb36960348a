//! Device memory exported as a dma-buf, which other kernel drivers (a NIC's) import.

use core::ffi::c_void;
use std::os::fd::OwnedFd;

use super::{DevicePtr, Span};
use crate::error::Error;
use crate::memory::share::owned;
use crate::sys::{self, pointer};

/// A dma-buf of device memory.
#[derive(Debug)]
pub struct DmaBuf {
    /// Its file descriptor. It may be closed once the memory is registered.
    pub fd: OwnedFd,
    /// Offset of the requested memory in the dma-buf.
    pub offset: usize,
    /// Bytes of the dma-buf: whole host pages.
    pub len: usize,
    /// The device pointer at which the dma-buf starts.
    pub start: DevicePtr,
}

impl Span<'_> {
    /// Exports the host pages that contain it as a dma-buf. The memory must outlive the import.
    ///
    /// # Errors
    /// [`Error::NotSupported`] if the device, driver or kernel modules lack dma-buf;
    /// [`Error::Missing`] before CUDA 11.7; [`Error::Empty`]; or the driver's, for host memory and
    /// memory not allocated for GPUDirect RDMA.
    #[doc(alias = "cuMemGetHandleForAddressRange")]
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
        // SAFETY: the pointer is to a local int, which this handle type is written to. Device
        // memory is mapped in pages of 64 KiB and more, so the host pages around the range are
        // mapped too.
        let status = unsafe { get((&raw mut fd).cast::<c_void>(), start, len, sys::RANGE_DMA_BUF_FD, 0) };
        driver.check(
            status,
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

    /// Sets `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`: synchronous copies (`cuMemcpy`) of its allocation
    /// return only when all of their work is done, as GPUDirect RDMA requires.
    ///
    /// # Errors
    /// The driver's error: some do not support it for mapped memory, for which
    /// [`Context::set_sync_memops`](crate::Context::set_sync_memops) has the same effect.
    #[doc(alias("CU_POINTER_ATTRIBUTE_SYNC_MEMOPS", "cuPointerSetAttribute"))]
    pub fn set_sync_memops(self) -> Result<(), Error> {
        let context = self.resource().context();
        let driver = context.driver();
        let _entered = context.enter()?;
        let yes: u32 = 1;
        // SAFETY: this attribute is set from an unsigned int; the address lies in live memory.
        let status = unsafe {
            (driver.table().pointer_set_attribute)((&raw const yes).cast(), pointer::SYNC_MEMOPS, self.address())
        };
        driver.check(
            status,
            "cuPointerSetAttribute",
            format_args!("SYNC_MEMOPS of memory of {}", context.device()),
        )
    }
}

fn page_size() -> u64 {
    // SAFETY: sysconf(3) has no requirements.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size)
        .ok()
        .filter(|size| size.is_power_of_two())
        .unwrap_or(4096)
}
