//! Device memory (DM; ibv_alloc_dm(3)): small memory on the adapter itself.

use core::mem::ManuallyDrop;
use std::any::Any;
use std::io;
use std::sync::Arc;

use doorbell_verbs_sys::{self as sys, inline};

use crate::context::{Context, ContextInner};
use crate::error::{MemoryError, check};
use crate::pd::PdInner;
use crate::raw::Lender;

/// Memory of the device, reached by copies and, once registered
/// ([`ProtectionDomain::register_device_memory`](crate::ProtectionDomain::register_device_memory)),
/// by requests (ibv_alloc_dm(3)). Cloning is cheap; it is freed with the last clone and the last
/// buffer registered of it.
#[derive(Clone)]
#[doc(alias("ibv_dm", "ibv_alloc_dm", "ibv_free_dm"))]
pub struct DeviceMemory {
    inner: Arc<DmInner>,
}

struct DmInner {
    raw: *mut sys::ibv_dm,
    len: usize,
    context: ManuallyDrop<Arc<ContextInner>>,
    lender: Lender,
}

// SAFETY: `raw` is only passed to verbs, which may be called from any thread.
unsafe impl Send for DmInner {}
// SAFETY: as above.
unsafe impl Sync for DmInner {}

impl DeviceMemory {
    pub(crate) fn new(context: &Context, len: usize, align: usize) -> Result<Self, MemoryError> {
        let context = context.inner();
        if len == 0 {
            return Err(MemoryError::Empty);
        }
        let mut attr = sys::ibv_alloc_dm_attr {
            length: len,
            log_align_req: align.max(1).next_power_of_two().ilog2(),
            comp_mask: 0,
        };
        // SAFETY: the context is live.
        let raw = unsafe { inline::alloc_dm(context.raw, &mut attr) };
        if raw.is_null() {
            return Err(MemoryError::DeviceMemory {
                verb: "ibv_alloc_dm",
                device: context.name.clone(),
                len,
                error: io::Error::last_os_error(),
            });
        }
        // SAFETY: just made on this device.
        Ok(unsafe { Self::adopt(context, raw, len, None) })
    }

    /// # Safety
    /// `raw` is live memory of `len` bytes of this device, which only the lender, if any, frees.
    pub(crate) unsafe fn adopt(context: &Arc<ContextInner>, raw: *mut sys::ibv_dm, len: usize, lender: Lender) -> Self {
        Self {
            inner: Arc::new(DmInner {
                raw,
                len,
                context: ManuallyDrop::new(Arc::clone(context)),
                lender,
            }),
        }
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// Copies `from` to `offset` (ibv_memcpy_to_dm(3)).
    ///
    /// # Errors
    /// When beyond it, or refused: some devices require offset and length to be multiples of 4.
    #[doc(alias = "ibv_memcpy_to_dm")]
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryError> {
        self.check(offset, from.len())?;
        // SAFETY: the device memory is live, and `from` is readable.
        let result = unsafe { inline::memcpy_to_dm(self.inner.raw, offset, from.as_ptr().cast(), from.len()) };
        self.copied("ibv_memcpy_to_dm", from.len(), result)
    }

    /// Copies from `offset` into `into` (ibv_memcpy_from_dm(3)).
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    #[doc(alias = "ibv_memcpy_from_dm")]
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        self.check(offset, into.len())?;
        // SAFETY: the device memory is live, and `into` may be written.
        let result = unsafe { inline::memcpy_from_dm(into.as_mut_ptr().cast(), self.inner.raw, offset, into.len()) };
        self.copied("ibv_memcpy_from_dm", into.len(), result)
    }

    fn copied(&self, verb: &'static str, len: usize, result: i32) -> Result<(), MemoryError> {
        check(result).map_err(|error| MemoryError::DeviceMemory {
            verb,
            device: self.inner.context.name.clone(),
            len,
            error,
        })
    }

    pub(super) fn check(&self, offset: u64, len: usize) -> Result<(), MemoryError> {
        let whole = self.inner.len as u64;
        if offset.checked_add(len as u64).is_some_and(|end| end <= whole) {
            return Ok(());
        }
        Err(MemoryError::BeyondDeviceMemory { offset, len, whole })
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_dm {
        self.inner.raw
    }

    pub(super) fn is_of(&self, pd: &PdInner) -> bool {
        self.inner.context.raw == pd.context.raw
    }

    pub(super) fn keeper(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self.inner) as _
    }
}

impl core::fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("DeviceMemory")
            .field("len", &self.inner.len)
            .finish_non_exhaustive()
    }
}

impl Drop for DmInner {
    fn drop(&mut self) {
        let result = match self.lender {
            Some(_) => Ok(()),
            // SAFETY: the last reference: regions of it hold one until they are deregistered.
            None => check(unsafe { inline::free_dm(self.raw) }),
        };
        match result {
            // SAFETY: dropped once, here.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.context) },
            Err(error) => {
                tracing::error!(device = %self.context.name, %error, "ibv_free_dm failed; it is leaked, and its context");
            }
        }
    }
}
