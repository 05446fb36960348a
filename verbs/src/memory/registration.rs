//! Registering with options: relaxed ordering, on-demand paging, dma-bufs, device memory.

use core::any::Any;
use core::ffi::c_uint;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use doorbell_verbs_sys::{self as sys, inline};

use super::buffer::{Buffer, Chunks};
use super::device::DeviceMemory;
use super::region::{self, Backing, Region, check_buffer};
use super::rights::{Opaque, Rights};
use super::storage::{Memory, PAGE};
use crate::error::MemoryError;
use crate::pd::{PdInner, ProtectionDomain};

/// Options of a registration; made by [`ProtectionDomain::registration`] (ibv_reg_mr(3),
/// ibv_reg_mr_iova(3)).
///
/// ```no_run
/// # use doorbell_verbs::{HugePage, Memory, ProtectionDomain, PeerWrite};
/// # fn example(pd: &ProtectionDomain) -> Result<(), Box<dyn std::error::Error>> {
/// let memory = Memory::huge(1 << 30, HugePage::Size2M)?;
/// let inbox = pd.registration().relaxed_ordering().huge_pages().register(memory, PeerWrite)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
#[must_use = "nothing is registered until register() is called"]
#[doc(alias("ibv_reg_mr", "ibv_reg_mr_iova", "ibv_access_flags"))]
pub struct Registration<'a> {
    pd: &'a ProtectionDomain,
    flags: c_uint,
}

impl<'a> Registration<'a> {
    pub(crate) fn new(pd: &'a ProtectionDomain) -> Self {
        Self { pd, flags: 0 }
    }

    /// Lets the device write the region's bytes in any order (`IBV_ACCESS_RELAXED_ORDERING`, PCIe
    /// relaxed ordering), which is faster on many hosts. Then only a completion proves that data
    /// has arrived: a flag that a peer writes last may be visible before the data. A device or
    /// kernel without the flag ignores it.
    #[doc(alias = "IBV_ACCESS_RELAXED_ORDERING")]
    pub fn relaxed_ordering(mut self) -> Self {
        self.flags |= sys::IBV_ACCESS_RELAXED_ORDERING;
        self
    }

    /// On-demand paging (ODP): does not pin the region; the device faults pages in as needed
    /// (`IBV_ACCESS_ON_DEMAND`), see [`Buffer::prefetch`]. For [devices that support
    /// it](crate::DeviceAttr::on_demand_paging).
    ///
    /// Implicit ODP, of the whole address space, is not offered: it would reach others' memory.
    #[doc(alias("IBV_ACCESS_ON_DEMAND", "ODP"))]
    pub fn on_demand(mut self) -> Self {
        self.flags |= sys::IBV_ACCESS_ON_DEMAND;
        self
    }

    /// Declares huge pages (`IBV_ACCESS_HUGETLB`), which on-demand paging does not detect.
    #[doc(alias = "IBV_ACCESS_HUGETLB")]
    pub fn huge_pages(mut self) -> Self {
        self.flags |= sys::IBV_ACCESS_HUGETLB;
        self
    }

    /// See [`ProtectionDomain::register`].
    ///
    /// # Errors
    /// As there, and when on-demand paging was requested of a device without it.
    #[doc(alias = "ibv_reg_mr")]
    pub fn register<R: Rights>(self, memory: impl Into<Memory>, _: R) -> Result<Buffer<R>, MemoryError> {
        self.check()?;
        region::register(self.pd.inner(), memory.into(), self.flags)
    }

    /// See [`ProtectionDomain::register_chunks`].
    ///
    /// # Errors
    /// As [`register`](Self::register).
    #[doc(alias = "ibv_reg_mr")]
    pub fn register_chunks<R: Rights>(
        self,
        memory: impl Into<Memory>,
        chunk: usize,
        _: R,
    ) -> Result<Chunks<R>, MemoryError> {
        self.check()?;
        region::register_chunks(self.pd.inner(), memory.into(), chunk, self.flags)
    }

    /// Registers the `len` bytes at `address` that the device reaches: GPU memory, by
    /// nvidia_peermem or by a software device. Split into buffers of `chunk` bytes (the last may be
    /// shorter). `keeper` is dropped when the device has released the memory.
    ///
    /// # Safety
    /// Until `keeper` is dropped the bytes are memory, no reference covers any of them, and the
    /// device and peers may do anything to them that `rights` allows.
    ///
    /// # Errors
    /// When the range is empty, `chunk` too long, or the device cannot resolve such addresses.
    #[doc(alias("ibv_reg_mr", "peermem"))]
    pub unsafe fn register_opaque<R: Rights>(
        self,
        address: u64,
        len: usize,
        chunk: usize,
        keeper: Arc<dyn Any + Send + Sync>,
        _: R,
    ) -> Result<Chunks<Opaque<R>>, MemoryError> {
        self.check()?;
        check_buffer(chunk)?;
        let start = core::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: the caller's promise; the region keeps the keeper. Buffers of this kind give no
        // bytes, so nothing here dereferences the address.
        let region = unsafe {
            Region::register(
                self.pd.inner(),
                start,
                len,
                R::ACCESS | self.flags,
                Backing::KeepAlive(keeper),
            )?
        };
        Ok(Chunks::new(region, address, len, chunk))
    }

    /// As [`ProtectionDomain::register_dmabuf`], with these options, in buffers of `chunk` bytes
    /// (the last may be shorter). `keeper` is dropped when the device has released the memory.
    ///
    /// # Errors
    /// As [`ProtectionDomain::register_dmabuf`]; only `chunk` must fit a message.
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of ibv_reg_dmabuf_mr(3), and what becomes of it here"
    )]
    #[doc(alias = "ibv_reg_dmabuf_mr")]
    pub fn register_dmabuf<R: Rights>(
        self,
        fd: OwnedFd,
        offset: u64,
        len: usize,
        iova: u64,
        chunk: usize,
        keeper: Arc<dyn Any + Send + Sync>,
        rights: R,
    ) -> Result<Chunks<Opaque<R>>, MemoryError> {
        self.check()?;
        check_buffer(chunk)?;
        let region = dmabuf_region(
            self.pd.inner(),
            fd,
            (offset, len, iova),
            self.flags,
            Backing::KeepAlive(keeper),
            rights,
        )?;
        Ok(Chunks::new(region, iova, len, chunk))
    }

    fn check(self) -> Result<(), MemoryError> {
        let context = &self.pd.inner().context;
        if self.flags & sys::IBV_ACCESS_ON_DEMAND != 0 && !context.attr.on_demand_paging {
            return Err(MemoryError::NoOnDemandPaging {
                device: context.name.clone(),
            });
        }
        Ok(())
    }
}

/// Probes whether the device registers dma-bufs, by its error for an invalid descriptor.
pub(crate) fn check_dmabuf(pd: &PdInner) -> io::Result<()> {
    let Some(reg_dmabuf_mr) = pd.context.api.reg_dmabuf_mr else {
        return Err(io::ErrorKind::Unsupported.into());
    };
    // SAFETY: the domain is live; no descriptor is -1, so nothing is registered.
    let mr = unsafe { reg_dmabuf_mr(pd.raw, 0, PAGE, 0, -1, 0) };
    if mr.is_null() {
        let error = io::Error::last_os_error();
        return if unsupported(&error) { Err(error) } else { Ok(()) };
    }
    // SAFETY: should a device have registered something after all, it is not used.
    unsafe { (pd.context.api.dereg_mr)(mr) };
    Ok(())
}

/// The two errors of a missing call: the kernel's, and that of providers without it.
fn unsupported(error: &io::Error) -> bool {
    const EPROTONOSUPPORT: i32 = 93;
    error.kind() == io::ErrorKind::Unsupported || error.raw_os_error() == Some(EPROTONOSUPPORT)
}

pub(crate) fn register_dmabuf<R: Rights>(
    pd: &Arc<PdInner>,
    fd: OwnedFd,
    offset: u64,
    len: usize,
    iova: u64,
    rights: R,
) -> Result<Buffer<Opaque<R>>, MemoryError> {
    check_buffer(len)?;
    let region = dmabuf_region(pd, fd, (offset, len, iova), 0, Backing::External, rights)?;
    Ok(Buffer::new(region, iova, len))
}

fn dmabuf_region<R: Rights>(
    pd: &Arc<PdInner>,
    fd: OwnedFd,
    (offset, len, iova): (u64, usize, u64),
    flags: c_uint,
    backing: Backing,
    _: R,
) -> Result<Arc<Region>, MemoryError> {
    if len == 0 {
        return Err(MemoryError::Empty);
    }
    let device = || pd.context.name.clone();
    let page = PAGE as u64;
    if offset % page != iova % page || iova.checked_add(len as u64).is_none() {
        return Err(MemoryError::DmaBufAddress { offset, iova, len });
    }
    let Some(reg_dmabuf_mr) = pd.context.api.reg_dmabuf_mr else {
        return Err(MemoryError::NoDmaBuf { device: device() });
    };
    let access = R::ACCESS | flags;
    // SAFETY: the domain is live and the descriptor open. The kernel holds the dma-buf as long as
    // the region is; none of this process' memory is registered.
    let mr = unsafe { reg_dmabuf_mr(pd.raw, offset, len, iova, fd.as_raw_fd(), access.cast_signed()) };
    if mr.is_null() {
        let error = io::Error::last_os_error();
        return Err(if unsupported(&error) {
            MemoryError::NoDmaBuf { device: device() }
        } else {
            MemoryError::RegisterDmaBuf {
                device: device(),
                len,
                error,
            }
        });
    }
    // SAFETY: just made in this domain. The device addresses its bytes from `iova` on (the struct's
    // `addr` is the offset, by ibv_reg_dmabuf_mr(3)).
    Ok(unsafe { Region::adopt(pd, mr, iova, len, access, backing) })
}

pub(crate) fn register_device_memory<R: Rights>(
    pd: &Arc<PdInner>,
    memory: &DeviceMemory,
    offset: u64,
    len: usize,
    _: R,
) -> Result<Buffer<Opaque<R>>, MemoryError> {
    check_buffer(len)?;
    memory.check(offset, len)?;
    let failed = |error| MemoryError::DeviceMemory {
        verb: "ibv_reg_dm_mr",
        device: pd.context.name.clone(),
        len,
        error,
    };
    if !memory.is_of(pd) {
        return Err(MemoryError::ForeignDeviceMemory {
            device: pd.context.name.clone(),
        });
    }
    // Device memory has no address of its own: the region is zero-based (ibv_alloc_dm(3)).
    let access = R::ACCESS | sys::IBV_ACCESS_ZERO_BASED;
    // SAFETY: domain and device memory are live, of one device, and the region keeps the latter.
    let mr = unsafe { inline::reg_dm_mr(pd.raw, memory.raw(), offset, len, access) };
    if mr.is_null() {
        return Err(failed(io::Error::last_os_error()));
    }
    // SAFETY: just made in this domain.
    let region = unsafe { Region::adopt(pd, mr, 0, len, access, Backing::KeepAlive(memory.keeper())) };
    Ok(Buffer::new(region, 0, len))
}
