//! Contexts: what a process has of a device.
//!
//! CUDA's functions work on the context that is current for the calling thread. Nobody who uses this crate need know: every call enters its context and leaves it as it
//! found it, so that a thread of PyTorch's keeps its own. Where the context is current already that costs one look; [`Context::make_current`] makes it so for a thread.

use core::fmt;
use core::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

use crate::device::{Device, WritesOrdering};
use crate::driver::Driver;
use crate::error::Error;
use crate::resource::Graves;
use crate::sys::{self, RawContext, status};

/// The primary context of a device, held as long as anything made in it.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    device: Device,
    raw: RawContext,
    graves: Graves,
}

// SAFETY: CUDA's contexts may be used by any thread, and the pointer is never followed here.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Context {
    pub(crate) fn primary(device: Device) -> Result<Self, Error> {
        let driver = device.driver();
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a CUcontext of ours.
        let answer = unsafe { (driver.table().primary_ctx_retain)(&raw mut raw, device.raw()) };
        driver.check(answer, "cuDevicePrimaryCtxRetain", format_args!("{device}"))?;
        Ok(Self(Arc::new(Inner {
            device,
            raw,
            graves: Graves::default(),
        })))
    }

    /// The device it is of.
    #[must_use]
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// The driver it is of.
    #[must_use]
    pub fn driver(&self) -> Driver {
        self.0.device.driver()
    }

    pub(crate) fn raw(&self) -> RawContext {
        self.0.raw
    }

    pub(crate) fn graves(&self) -> &Graves {
        &self.0.graves
    }

    /// Makes it the current context of the calling thread, for good. Never needed; it makes each later call of this thread a little quicker.
    ///
    /// # Errors
    /// What the driver says.
    pub fn make_current(&self) -> Result<(), Error> {
        // SAFETY: the context is retained.
        let answer = unsafe { (self.driver().table().ctx_set_current)(self.0.raw) };
        self.driver().check(
            answer,
            "cuCtxSetCurrent",
            format_args!("the context of {}", self.0.device),
        )
    }

    /// Waits for all work of the device in this context, and frees what only waited for such work.
    ///
    /// # Errors
    /// What the driver says; [`Error::Lost`] when work has failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        let entered = self.enter()?;
        // SAFETY: the context is current.
        let answer = unsafe { (self.driver().table().ctx_synchronize)() };
        drop(entered);
        self.reap();
        self.driver()
            .check(answer, "cuCtxSynchronize", format_args!("{}", self.0.device))
    }

    /// The free and the whole bytes of the device's memory.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory_info(&self) -> Result<(usize, usize), Error> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to values of ours, and the context is current.
        let answer = unsafe { (self.driver().table().mem_get_info)(&raw mut free, &raw mut total) };
        self.driver()
            .check(answer, "cuMemGetInfo", format_args!("{}", self.0.device))?;
        Ok((free, total))
    }

    /// Lets copies and kernels of this context reach the memory of `other` that was not mapped for chosen devices (PyTorch's): a matter of the whole context.
    ///
    /// # Errors
    /// [`Error::NoPeerAccess`] where the one device does not reach the other, or what the driver says otherwise.
    pub fn enable_peer_access(&self, other: &Self) -> Result<(), Error> {
        let _entered = self.enter()?;
        // SAFETY: both contexts are retained, and this one is current.
        let answer = unsafe { (self.driver().table().ctx_enable_peer_access)(other.0.raw, 0) };
        if answer == status::PEER_ACCESS_ALREADY_ENABLED {
            return Ok(());
        }
        self.driver().check(
            answer,
            "cuCtxEnablePeerAccess",
            format_args!("{} to {}", self.0.device, other.0.device),
        )
    }

    /// Makes copies and fills that are waited for by the call itself (`cuMemcpy`) wait for all of their work, in all memory of the context, mapped memory too: what GPUDirect RDMA asks
    /// for. This crate's own copies are all asynchronous, and streams order them.
    ///
    /// # Errors
    /// [`Error::Missing`] before CUDA 12.1, or what the driver says.
    pub fn set_sync_memops(&self) -> Result<(), Error> {
        let driver = self.driver();
        let (Some(get), Some(set)) = (driver.table().ctx_get_flags, driver.table().ctx_set_flags) else {
            return Err(driver.missing("cuCtxSetFlags"));
        };
        let _entered = self.enter()?;
        let mut flags = 0;
        // SAFETY: the pointer is to flags of ours, and the context is current.
        let answer = unsafe { get(&raw mut flags) };
        driver.check(answer, "cuCtxGetFlags", format_args!("{}", self.0.device))?;
        // SAFETY: the context is current.
        let answer = unsafe { set(flags | sys::CTX_SYNC_MEMOPS) };
        driver.check(answer, "cuCtxSetFlags", format_args!("{}", self.0.device))
    }

    /// Waits until what other devices (NICs) have written to this one's memory so far can be read: by the device itself, or by all devices with `scope`
    /// [`WritesOrdering::AllDevices`]. Needless, and quick, where [`Device::writes_ordering`] is `scope` or more.
    ///
    /// # Errors
    /// [`Error::NotSupported`], [`Error::Missing`], or what the driver says otherwise.
    pub fn flush_gpu_direct_rdma_writes(&self, scope: WritesOrdering) -> Result<(), Error> {
        let scope = match scope {
            WritesOrdering::None => return Ok(()),
            WritesOrdering::Owner => sys::FLUSH_TO_OWNER,
            WritesOrdering::AllDevices => sys::FLUSH_TO_ALL_DEVICES,
        };
        let driver = self.driver();
        let Some(flush) = driver.table().flush_gpu_direct_rdma_writes else {
            return Err(driver.missing("cuFlushGPUDirectRDMAWrites"));
        };
        let _entered = self.enter()?;
        // SAFETY: the context is current.
        let answer = unsafe { flush(sys::FLUSH_CURRENT_CONTEXT, scope) };
        driver.check(answer, "cuFlushGPUDirectRDMAWrites", format_args!("{}", self.0.device))
    }

    /// Frees what was dropped while work still used it, as far as that work is done by now; how many things still wait. This happens by the way too:
    /// for a few of them whenever something is made or dropped, for all when a stream is waited for.
    pub fn reap(&self) -> usize {
        self.0.graves.reap_all(self)
    }

    /// Makes it current until the guard is dropped.
    pub(crate) fn enter(&self) -> Result<Entered<'_>, Error> {
        self.0.enter()
    }
}

impl Inner {
    #[inline]
    fn enter(&self) -> Result<Entered<'_>, Error> {
        let driver = self.device.driver();
        let mut current = ptr::null_mut();
        // SAFETY: the pointer is to a CUcontext of ours.
        let answer = unsafe { (driver.table().ctx_get_current)(&raw mut current) };
        driver.check(answer, "cuCtxGetCurrent", format_args!("this thread"))?;
        let pushed = current != self.raw;
        if pushed {
            // SAFETY: the context is retained.
            let answer = unsafe { (driver.table().ctx_push_current)(self.raw) };
            driver.check(
                answer,
                "cuCtxPushCurrent",
                format_args!("the context of {}", self.device),
            )?;
        }
        Ok(Entered {
            driver,
            pushed,
            context: PhantomData,
            thread: PhantomData,
        })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let driver = self.device.driver();
        if let Ok(_entered) = self.enter() {
            self.graves.close(driver);
        }
        // SAFETY: it was retained once by this, and nothing made in it is left: whatever is holds this.
        let answer = unsafe { (driver.table().primary_ctx_release)(self.device.raw()) };
        if answer != status::SUCCESS && answer != status::DEINITIALIZED {
            tracing::warn!("the context of {} was not released: CUDA error {answer}", self.device);
        }
    }
}

/// A context is current for this thread; the one before is again when this is dropped.
pub(crate) struct Entered<'a> {
    driver: Driver,
    pushed: bool,
    context: PhantomData<&'a Inner>,
    thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: the pointer is to a CUcontext of ours; the context popped is the one that was pushed, as guards are dropped in reverse order on one thread.
            let answer = unsafe { (self.driver.table().ctx_pop_current)(&raw mut popped) };
            if answer != status::SUCCESS && answer != status::DEINITIALIZED {
                tracing::warn!("the context of this thread could not be restored: CUDA error {answer}");
            }
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Context").field(&self.0.device).finish()
    }
}

impl PartialEq for Context {
    fn eq(&self, other: &Self) -> bool {
        self.0.device == other.0.device
    }
}

impl Eq for Context {}
