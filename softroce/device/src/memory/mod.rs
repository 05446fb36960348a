//! Registered memory: the table of regions and windows behind the engine's `Memory` trait, and the moving of bytes.
//!
//! The table lives under the engine's lock, and so does every copy. Deregistering takes that lock: once it returns, no copy is in flight and none
//! can begin.
//!
//! The application uses its memory while peers write it, as with any RDMA device. The bytes are moved by plain copies; what a reader may rely on
//! is what RDMA gives it: the last eight bytes of a packet become visible after the rest (`copy::to_peer_visible`).

mod copy;
mod pages;
mod table;
mod window;

use std::sync::Arc;

use doorbell_roce_proto::{LKey, RKey};

use crate::capacity;
use crate::device::Device;
use crate::pd::Pd;

pub(crate) use table::{Region, Table};
pub use window::{Bound, Mw, WindowKind};

/// What a region may be used for (ibv_reg_mr(3)). Local reading is always allowed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Rights {
    /// IBV_ACCESS_LOCAL_WRITE: receives, READ responses and atomic results may land here.
    pub local_write: bool,
    /// IBV_ACCESS_REMOTE_WRITE.
    pub remote_write: bool,
    /// IBV_ACCESS_REMOTE_READ.
    pub remote_read: bool,
    /// IBV_ACCESS_REMOTE_ATOMIC.
    pub remote_atomic: bool,
    /// IBV_ACCESS_MW_BIND: memory windows may be bound to it.
    pub bind: bool,
}

/// Why memory could not be registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RegisterError {
    /// The length is 0, or address or I/O virtual address wrap around.
    #[error("a memory region needs at least one byte and must not wrap around the address space")]
    Range,
    /// Remote writing and atomics need LOCAL_WRITE as well (ibv_reg_mr(3)).
    #[error("REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE as well")]
    Rights,
    /// Part of it is not mapped, or not writable though LOCAL_WRITE is asked for.
    #[error("part of the memory is not mapped, or not writable though LOCAL_WRITE is asked for")]
    Fault,
    /// The machine has no memory left for its pages.
    #[error("no memory left for the pages of the region")]
    OutOfMemory,
    /// The device has [`capacity::REGIONS`] already.
    #[error("the device has {max} memory regions already", max = capacity::REGIONS)]
    Exhausted,
}

/// A memory region (ibv_reg_mr(3)). Dropping it deregisters it: after that no peer and no queue pair touches the memory. Windows that are bound to it are unbound
/// then; [`deregister`](Mr::deregister) refuses instead.
#[derive(Debug)]
pub struct Mr {
    pd: Pd,
    key: u32,
}

impl Pd {
    /// Registers `len` bytes at `addr`, which peers and work requests then name by addresses from `iova` on.
    ///
    /// Its pages are brought in, as a device with DMA would pin them.
    ///
    /// # Safety
    /// The memory stays mapped, and writable if `rights` allow any writing, until the region is dropped. Rust code holds no reference to it while a
    /// work request or a peer uses it against that reference's rules.
    ///
    /// # Errors
    /// When range, rights or pages do not allow it, or the device is full.
    pub unsafe fn register(&self, addr: *mut u8, len: usize, iova: u64, rights: Rights) -> Result<Mr, RegisterError> {
        if (rights.remote_write || rights.remote_atomic) && !rights.local_write {
            return Err(RegisterError::Rights);
        }
        let wraps = addr.addr().checked_add(len).is_none() || iova.checked_add(len as u64).is_none();
        if len == 0 || wraps {
            return Err(RegisterError::Range);
        }
        pages::populate(addr.addr(), len, rights.local_write)?;
        let region = Region::new(addr, len as u64, iova, self.id(), rights);
        let mut core = self.device().shared().core.lock();
        let key = core.memory.add_region(region).ok_or(RegisterError::Exhausted)?;
        drop(core);
        Ok(Mr { pd: self.clone(), key })
    }
}

impl Mr {
    /// The key for work requests on this device.
    pub fn lkey(&self) -> LKey {
        LKey(self.key)
    }

    /// The key for peers; worth nothing to them without remote rights.
    pub fn rkey(&self) -> RKey {
        RKey(self.key)
    }

    /// The device it is of.
    pub fn device(&self) -> &Arc<Device> {
        self.pd.device()
    }

    /// Takes the region's memory away from peers and queue pairs: all that is left to do is to drop it. Its keys are worth nothing from then on.
    ///
    /// # Errors
    /// While windows are bound to it (IBTA vol 1, 10.6.7.2.6); nothing changed then.
    pub fn deregister(&self) -> Result<(), Bound> {
        let mut core = self.device().shared().core.lock();
        core.memory.deregister(self.key)
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        self.device().shared().core.lock().memory.remove(self.key);
    }
}
