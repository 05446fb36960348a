//! Registered memory: the table of regions and windows behind the engine's `Memory` trait.
//!
//! Table and copies are under the core lock: after deregistering none is in flight, and none
//! begins. The application uses its memory meanwhile; a reader may rely on what RDMA guarantees:
//! the last eight bytes of a packet become visible after the rest (`copy::to_peer_visible`).

pub(crate) mod copy;
mod dm;
mod fault;
mod pages;
mod table;
mod window;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use doorbell_roce_proto::memory::{Memory, Sge};
use doorbell_roce_proto::{LKey, RKey};

use crate::capacity;
use crate::device::Device;
use crate::gpu;
use crate::links::shm_ring::segment;
use crate::pd::Pd;

pub use dm::{Dm, OutOfRange};
pub(crate) use fault::Fault;
pub(crate) use table::{Location, PayloadRef, Region, SharedBacking, Table};
pub use window::{Mw, WindowKind, WindowsBound};

/// Whether GPU memory can be registered. Loads the CUDA driver: a tenth of a second the first time.
pub fn supports_gpu_memory() -> bool {
    gpu::is_possible()
}

/// Access rights of a region (ibv_reg_mr(3)). Local reading is always allowed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Rights {
    /// IBV_ACCESS_LOCAL_WRITE: receives, READ responses and atomic results may be written here.
    pub local_write: bool,
    /// IBV_ACCESS_REMOTE_WRITE.
    pub remote_write: bool,
    /// IBV_ACCESS_REMOTE_READ.
    pub remote_read: bool,
    /// IBV_ACCESS_REMOTE_ATOMIC.
    pub remote_atomic: bool,
    /// IBV_ACCESS_FLUSH_GLOBAL: a peer's FLUSH may require its writes to be visible to all.
    pub flush_global: bool,
    /// IBV_ACCESS_MW_BIND: memory windows may be bound to it.
    pub bind: bool,
    /// IBV_ACCESS_ON_DEMAND: pages are populated by the copies that need them, which are errors
    /// where nothing is mapped.
    pub on_demand: bool,
}

impl Rights {
    fn check(self) -> Result<(), RegisterError> {
        if (self.remote_write || self.remote_atomic) && !self.local_write {
            return Err(RegisterError::Rights);
        }
        Ok(())
    }
}

/// Why memory could not be registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RegisterError {
    /// The length is 0, or the address or I/O virtual address wraps around.
    #[error("a memory region needs at least one byte and must not wrap around the address space")]
    Range,
    /// Remote writing and atomics need LOCAL_WRITE as well (ibv_reg_mr(3)).
    #[error("REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE as well")]
    Rights,
    /// Part of it is not mapped, or not writable though LOCAL_WRITE is set.
    #[error("part of the memory is not mapped, or not writable though LOCAL_WRITE is set")]
    Fault,
    /// The memfd can shrink, or is not exactly as long as the range.
    #[error("the memfd is not sealed against shrinking (F_SEAL_SHRINK), or is not as long as the range")]
    Memfd,
    /// It is not GPU memory known to CUDA in this process.
    #[error("the addresses are not GPU memory known to CUDA in this process")]
    NoDevice,
    /// No memory is left for its pages.
    #[error("no memory left for the pages of the region")]
    OutOfMemory,
    /// Windows are bound to the region.
    #[error("memory windows are bound to the memory region")]
    Bound,
    /// The device has [`capacity::REGIONS`] already.
    #[error("the device has {max} memory regions already", max = capacity::REGIONS)]
    Exhausted,
}

/// A memory region (ibv_reg_mr(3)). Dropping it deregisters it, and unbinds its windows;
/// [`deregister`](Mr::deregister) fails instead. The memory is not accessed after that.
#[derive(Debug)]
pub struct Mr {
    pd: Pd,
    key: u32,
    memory: RegisteredMemory,
}

#[derive(Debug)]
enum RegisteredMemory {
    Host(HostRange),
    Device {
        _dm: Dm,
    },
    /// No memory: writes are dropped.
    Null,
}

/// A range of the application's memory, and its I/O virtual address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostRange {
    /// The first byte.
    pub addr: *mut u8,
    /// Bytes.
    pub len: usize,
    /// The address of the first byte for peers and work requests.
    pub iova: u64,
}

// SAFETY: the promise made to [`Pd::register`] is for the whole process, and the pointer is used to
// find the mapping alone.
unsafe impl Send for HostRange {}
// SAFETY: as above.
unsafe impl Sync for HostRange {}

impl HostRange {
    fn check(&self) -> Result<(), RegisterError> {
        let wraps =
            self.addr.addr().checked_add(self.len).is_none() || self.iova.checked_add(self.len as u64).is_none();
        if self.len == 0 || wraps {
            return Err(RegisterError::Range);
        }
        Ok(())
    }

    /// Checks it and populates its pages, unless they are on demand. Returns GPU memory if the CPU
    /// cannot access the range; only then is CUDA loaded.
    fn prepare(&self, rights: Rights) -> Result<Option<gpu::Range>, RegisterError> {
        self.check()?;
        fault::install();
        if rights.on_demand {
            return Ok(None);
        }
        match pages::populate(self.addr.addr(), self.len, rights.local_write) {
            Ok(()) => Ok(None),
            Err(error) => match gpu::find(self.addr.addr() as u64, self.len) {
                None => Err(error),
                Some(gpu::MemoryKind::Host) => Ok(None),
                Some(gpu::MemoryKind::Device(range)) => Ok(Some(range)),
            },
        }
    }
}

/// The attributes of a re-registration (ibv_rereg_mr(3)); `None` is kept.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reregister<'a> {
    /// Its memory.
    pub range: Option<HostRange>,
    /// Its protection domain.
    pub pd: Option<&'a Pd>,
    /// Its rights.
    pub rights: Option<Rights>,
}

impl Pd {
    /// Registers memory, which peers and work requests address from `iova` on, and populates it.
    ///
    /// # Safety
    /// Until the region is dropped the range has no other memory than this, writable if `rights`
    /// allow any writing, or none: accesses fail where it is unmapped. Rust code holds no reference
    /// to it while a work request or a peer uses it against that reference's rules.
    ///
    /// # Errors
    /// When range, rights or pages do not allow it, or the device is full.
    pub unsafe fn register(&self, range: HostRange, rights: Rights) -> Result<Mr, RegisterError> {
        rights.check()?;
        let device = range.prepare(rights)?;
        if let Some(range) = &device {
            self.device().shared().enable_device_memory(range);
        }
        let region = Region::new(range.addr, range.len as u64, range.iova, self.id(), rights);
        self.add(region.on_device(device), RegisteredMemory::Host(range))
    }

    /// Registers all of a memfd, for which `range` is the mapping, to share it: peers of this host
    /// may map it, to read it even if `rights` allow them less.
    ///
    /// # Safety
    /// As for [`register`](Self::register); and `range` is `fd`, mapped shared from its beginning.
    ///
    /// # Errors
    /// [`RegisterError::Memfd`] when it is not sealed or not as long; or as
    /// [`register`](Self::register).
    pub unsafe fn register_memfd(
        &self,
        fd: BorrowedFd<'_>,
        range: HostRange,
        rights: Rights,
    ) -> Result<Mr, RegisterError> {
        rights.check()?;
        if !segment::is_segment(fd, range.len as u64) {
            return Err(RegisterError::Memfd);
        }
        let device = range.prepare(rights)?;
        let region = Region::new(range.addr, range.len as u64, range.iova, self.id(), rights);
        let region = region.in_segment(self.device().segment_of(fd)).on_device(device);
        self.add(region, RegisteredMemory::Host(range))
    }

    /// Registers GPU memory, as from a dma-buf; [`register`](Self::register) detects it otherwise.
    ///
    /// # Safety
    /// It stays allocated until the region is dropped.
    ///
    /// # Errors
    /// [`RegisterError::NoDevice`] when it is no GPU memory; or as [`register`](Self::register).
    pub unsafe fn register_device(&self, range: HostRange, rights: Rights) -> Result<Mr, RegisterError> {
        rights.check()?;
        range.check()?;
        let Some(gpu::MemoryKind::Device(device)) = gpu::find(range.addr.addr() as u64, range.len) else {
            return Err(RegisterError::NoDevice);
        };
        self.device().shared().enable_device_memory(&device);
        let region = Region::new(range.addr, range.len as u64, range.iova, self.id(), rights);
        self.add(region.on_device(Some(device)), RegisteredMemory::Host(range))
    }

    /// A null region (ibv_alloc_null_mr(3)), for local use: reads give zeroes, writes are dropped.
    ///
    /// # Errors
    /// When the device is full.
    pub fn null_region(&self) -> Result<Mr, RegisterError> {
        self.add(Region::null(self.id()), RegisteredMemory::Null)
    }

    fn add(&self, region: Region, memory: RegisteredMemory) -> Result<Mr, RegisterError> {
        let mut core = self.device().shared().core.lock();
        let key = core.memory.add_region(region).ok_or(RegisterError::Exhausted)?;
        core.expose(key);
        drop(core);
        let pd = self.clone();
        Ok(Mr { pd, key, memory })
    }

    /// Whether a work request may use all of `sge`, for writing when `write`.
    pub fn allows(&self, sge: &Sge, write: bool) -> bool {
        let memory = &mut self.device().shared().core.lock().memory;
        memory.check_local(self.id(), sge, write).is_ok()
    }

    /// Populates the pages of `sge`, which is [allowed](Self::allows); `false` where that fails.
    pub fn populate(&self, sge: &Sge, write: bool) -> bool {
        let found = self.device().shared().core.lock().memory.host_address(self.id(), sge);
        found.is_none_or(|at| pages::populate(at.addr(), sge.len as usize, write).is_ok())
    }
}

impl Mr {
    /// The local key.
    pub fn lkey(&self) -> LKey {
        LKey(self.key)
    }

    /// The remote key; of no use without remote rights.
    pub fn rkey(&self) -> RKey {
        RKey(self.key)
    }

    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        self.pd.device()
    }

    /// Changes memory, domain or rights between two packets; keeps the keys (ibv_rereg_mr(3)).
    ///
    /// # Safety
    /// As for [`Pd::register`], for a new range or new rights. When this returns without an error,
    /// the former range is not accessed again.
    ///
    /// # Errors
    /// When range, rights or pages do not allow it, the domain is of another device, or windows are
    /// bound to it; or for a range or rights of a null region, or a range of device memory. Nothing
    /// changed then.
    pub unsafe fn reregister(&mut self, change: &Reregister<'_>) -> Result<(), RegisterError> {
        if change.pd.is_some_and(|pd| !Arc::ptr_eq(pd.device(), self.device())) {
            return Err(RegisterError::Range);
        }
        let before = self.device().shared().core.lock().memory.rights(self.key);
        let rights = change.rights.unwrap_or(before);
        rights.check()?;
        let range = match self.memory {
            RegisteredMemory::Host(range) => {
                let range = change.range.unwrap_or(range);
                let device = range.prepare(rights)?;
                if let Some(range) = &device {
                    self.device().shared().enable_device_memory(range);
                }
                Some((range, device))
            }
            _ if change.range.is_some() => return Err(RegisterError::Range),
            RegisteredMemory::Device { .. } => None,
            RegisteredMemory::Null if change.rights.is_some() => return Err(RegisterError::Rights),
            RegisteredMemory::Null => None,
        };
        let pd = change.pd.unwrap_or(&self.pd);
        self.device().shared().core.lock().memory.withdraw(self.key);
        self.device().shared().wait_for_direct(None, Some(self.key));
        let mut core = self.device().shared().core.lock();
        let before = core
            .memory
            .change(self.key, range.clone(), pd.id(), rights)
            .map_err(|WindowsBound| RegisterError::Bound)?;
        core.revoke_region_memory(self.key, before);
        core.expose(self.key);
        drop(core);
        self.device().shared().wait_for_copies(None, Some(self.key));
        if let Some((range, _)) = range {
            self.memory = RegisteredMemory::Host(range);
        }
        self.pd = pd.clone();
        Ok(())
    }

    /// Deregisters: the keys are invalid, and the region is only to be dropped.
    ///
    /// # Errors
    /// While windows are bound to it (IBTA vol 1, 10.6.7.2.6); nothing changed then.
    pub fn deregister(&self) -> Result<(), WindowsBound> {
        let mut core = self.device().shared().core.lock();
        core.memory.deregister(self.key)?;
        core.revoke_region_memory(self.key, SharedBacking::default());
        drop(core);
        self.device().shared().wait_for_access(None, Some(self.key));
        Ok(())
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        let mut core = self.device().shared().core.lock();
        let shares = core.memory.remove(self.key);
        core.revoke_region_memory(self.key, shares);
        drop(core);
        self.device().shared().wait_for_access(None, Some(self.key));
    }
}
