//! Memory regions: registration, and the guarantee that memory is freed only after the device has let go of it.

use core::mem::ManuallyDrop;
use std::io;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::buffer::{Buffer, Chunks};
use super::rights::Rights;
use super::storage::Memory;
use crate::error::{MemoryError, check, register_advice};
use crate::pd::PdInner;

/// The longest message, hence the longest buffer: 2^31 bytes (IBTA vol 1, 9.7.7).
pub(super) const MAX_BUFFER: usize = 1 << 31;

/// A registered region. Every range of it holds a reference; the last one deregisters, then frees.
pub(crate) struct Region {
    mr: *mut sys::ibv_mr,
    lkey: u32,
    rkey: u32,
    memory: ManuallyDrop<Memory>,
    pd: ManuallyDrop<Arc<PdInner>>,
}

// SAFETY: `mr` is only passed to verbs, which may be called from any thread; the memory is reached only through ranges, which are unique.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

pub(crate) fn register<R: Rights>(pd: &Arc<PdInner>, memory: Memory, _: R) -> Result<Buffer<R>, MemoryError> {
    let len = memory.len();
    if len > MAX_BUFFER {
        return Err(MemoryError::TooLong { len, max: MAX_BUFFER });
    }
    let region = Region::new::<R>(pd, memory)?;
    let start = region.start();
    Ok(Buffer::new(region, start, len))
}

pub(crate) fn register_chunks<R: Rights>(
    pd: &Arc<PdInner>,
    memory: Memory,
    chunk: usize,
    _: R,
) -> Result<Chunks<R>, MemoryError> {
    if chunk > MAX_BUFFER {
        return Err(MemoryError::TooLong {
            len: chunk,
            max: MAX_BUFFER,
        });
    }
    if chunk == 0 {
        return Err(MemoryError::Empty);
    }
    let len = memory.len();
    let region = Region::new::<R>(pd, memory)?;
    let start = region.start();
    Ok(Chunks::new(region, start, len, chunk))
}

impl Region {
    fn new<R: Rights>(pd: &Arc<PdInner>, memory: Memory) -> Result<Arc<Self>, MemoryError> {
        let len = memory.len();
        if len == 0 {
            return Err(MemoryError::Empty);
        }
        let context = &pd.context;
        // SAFETY: the domain is live; the memory is `len` owned bytes, which outlive the registration (see Drop). The device, and this crate through
        // buffers, reach it by address from here on: `start` is exposed below.
        let mr = unsafe { (context.api.reg_mr)(pd.raw, memory.start().cast(), len, R::ACCESS.cast_signed()) };
        if mr.is_null() {
            let error = io::Error::last_os_error();
            return Err(MemoryError::Register {
                device: context.name.clone(),
                len,
                advice: register_advice(&error),
                error,
            });
        }
        // SAFETY: just made, live.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(Arc::new(Self {
            mr,
            lkey,
            rkey,
            memory: ManuallyDrop::new(memory),
            pd: ManuallyDrop::new(Arc::clone(pd)),
        }))
    }

    pub(super) fn len(&self) -> usize {
        self.memory.size()
    }

    pub(super) fn start(&self) -> u64 {
        self.memory.start().expose_provenance() as u64
    }

    pub(super) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(super) fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Deregisters, and gives the memory back.
    pub(super) fn dissolve(self) -> Result<Memory, MemoryError> {
        let mut this = ManuallyDrop::new(self);
        this.deregister().map_err(MemoryError::Deregister)?;
        // SAFETY: both are taken once, here, since Drop does not run; the device has let go of the memory.
        unsafe {
            ManuallyDrop::drop(&mut this.pd);
            Ok(ManuallyDrop::take(&mut this.memory))
        }
    }

    fn deregister(&self) -> Result<(), io::Error> {
        // SAFETY: made by reg_mr of this Api, and deregistered once: by `dissolve` or by Drop, which exclude each other.
        check(unsafe { (self.pd.context.api.dereg_mr)(self.mr) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        match self.deregister() {
            // SAFETY: dropped once, here; the device has let go of the memory. The domain goes after the region, as it must.
            Ok(()) => unsafe {
                ManuallyDrop::drop(&mut self.memory);
                ManuallyDrop::drop(&mut self.pd);
            },
            Err(error) => tracing::error!(
                device = %self.pd.context.name,
                len = self.memory.size(),
                %error,
                "ibv_dereg_mr failed; the memory is leaked, because the device may still touch it"
            ),
        }
    }
}
