//! Device memory (ibv_alloc_dm(3)): memory of the process, at most [`capacity::DEVICE_MEMORY`]
//! bytes, that the application accesses by copies under the core lock.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

use super::fault::Fault;
use super::{Mr, Region, RegisterError, RegisteredMemory, Rights, copy};
use crate::capacity;
use crate::device::{Device, LimitError};
use crate::pd::Pd;

/// The minimum alignment in bytes: atomics need 8.
const ALIGNMENT: usize = 64;

/// The largest alignment, as a power of two: a page.
const MAX_ALIGNMENT_LOG: u32 = 12;

/// Zeroed device memory. Clones share it; it is freed with the last of them and of its regions.
#[derive(Clone, Debug)]
pub struct Dm(Arc<DmHandle>);

#[derive(Debug)]
struct DmHandle {
    device: Arc<Device>,
    memory: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is the handle's own, and is read and written under the core lock alone.
unsafe impl Send for DmHandle {}
// SAFETY: as above.
unsafe impl Sync for DmHandle {}

/// The range is not within the device memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the range is not within the device memory")]
pub struct OutOfRange;

impl Device {
    /// Allocates `len` bytes of device memory, at a multiple of 2^`alignment_log` bytes.
    ///
    /// # Errors
    /// When `len` is 0 or more than is left, or the alignment is more than a page.
    pub fn device_memory(self: &Arc<Self>, len: usize, alignment_log: u32) -> Result<Dm, LimitError> {
        if len == 0 || len > capacity::DEVICE_MEMORY || alignment_log > MAX_ALIGNMENT_LOG {
            return Err(LimitError::Size);
        }
        let alignment = ALIGNMENT.max(1 << alignment_log);
        let layout = Layout::from_size_align(len, alignment).map_err(|_| LimitError::Size)?;
        if !self.shared().core.lock().objects.alloc_device_memory(len) {
            return Err(LimitError::Exhausted);
        }
        // SAFETY: the layout has bytes, as checked.
        let Some(memory) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            self.shared().core.lock().objects.free_device_memory(len);
            return Err(LimitError::Exhausted);
        };
        Ok(Dm(Arc::new(DmHandle {
            device: Arc::clone(self),
            memory,
            layout,
        })))
    }
}

impl Dm {
    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.0.device
    }

    /// Whether anything else, such as a memory region, holds it.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// When they do not fit there; nothing was copied.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfRange> {
        let to = self.locate(offset, bytes.len())?;
        let _core = self.device().shared().core.lock();
        // SAFETY: within the allocation, which is accessed under this lock alone; `bytes` is a
        // reference, and there are none to this memory.
        unsafe { copy::to_peer_visible(bytes, to) }.map_err(|Fault| OutOfRange)
    }

    /// Copies from `offset` into `bytes`.
    ///
    /// # Errors
    /// When they are beyond its end; nothing was copied.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), OutOfRange> {
        let from = self.locate(offset, bytes.len())?;
        let _core = self.device().shared().core.lock();
        // SAFETY: as in `write`.
        unsafe { copy::from(from, bytes) }.map_err(|Fault| OutOfRange)
    }

    fn locate(&self, offset: u64, len: usize) -> Result<*mut u8, OutOfRange> {
        let start = usize::try_from(offset).map_err(|_| OutOfRange)?;
        let inside = start.checked_add(len).is_some_and(|end| end <= self.0.layout.size());
        if inside {
            Ok(self.0.memory.as_ptr().wrapping_add(start))
        } else {
            Err(OutOfRange)
        }
    }
}

impl Drop for DmHandle {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; no region refers to it, for each holds this handle.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
        self.device
            .shared()
            .core
            .lock()
            .objects
            .free_device_memory(self.layout.size());
    }
}

impl Pd {
    /// Registers `len` bytes of device memory from `offset` on; peers and work requests address
    /// them from 0 on (ibv_alloc_dm(3)).
    ///
    /// # Errors
    /// When range or rights do not allow it, `dm` is of another device, or this one is full.
    pub fn register_device_memory(
        &self,
        dm: &Dm,
        offset: u64,
        len: usize,
        rights: Rights,
    ) -> Result<Mr, RegisterError> {
        rights.check()?;
        let base = dm.locate(offset, len).map_err(|OutOfRange| RegisterError::Range)?;
        if !Arc::ptr_eq(dm.device(), self.device()) {
            return Err(RegisterError::Range);
        }
        let region = Region::new(base, len as u64, 0, self.id(), rights);
        self.add(region, RegisteredMemory::Device { _dm: dm.clone() })
    }
}
