//! CUDA contexts.
//!
//! Every call pushes its context and restores the calling thread's previous one, so a PyTorch
//! thread keeps its own. Where it is current already ([`Context::make_current`]), that is only one
//! `cuCtxGetCurrent`.

use core::fmt;
use core::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

use crate::device::{Device, WritesOrdering};
use crate::driver::Driver;
use crate::error::Error;
use crate::resource::DeferredFrees;
use crate::sys::{self, RawContext, status};

/// A context of a device, the primary one or another, kept as long as anything made in it exists.
#[derive(Clone)]
#[doc(alias = "CUcontext")]
pub struct Context(Arc<Inner>);

struct Inner {
    device: Device,
    raw: RawContext,
    is_primary: bool,
    deferred_frees: DeferredFrees,
}

// SAFETY: any thread may use a CUDA context, and this crate never dereferences the pointer.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Context {
    pub(crate) fn primary(device: Device) -> Result<Self, Error> {
        let driver = device.driver();
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a local CUcontext.
        let status = unsafe { (driver.table().primary_ctx_retain)(&raw mut raw, device.raw()) };
        driver.check(status, "cuDevicePrimaryCtxRetain", format_args!("{device}"))?;
        Ok(Self::of(device, raw, true))
    }

    /// Creates a context beside the primary one, and leaves the thread's current one as it was.
    pub(crate) fn separate(device: Device) -> Result<Self, Error> {
        let driver = device.driver();
        let (mut raw, mut popped) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the pointer is to a local CUcontext.
        let status = unsafe { (driver.table().ctx_create)(&raw mut raw, 0, device.raw()) };
        driver.check(status, "cuCtxCreate", format_args!("{device}"))?;
        let context = Self::of(device, raw, false);
        // SAFETY: the pointer is to a local CUcontext; creating a context has pushed it.
        let status = unsafe { (driver.table().ctx_pop_current)(&raw mut popped) };
        driver.check(status, "cuCtxPopCurrent", format_args!("{device}"))?;
        Ok(context)
    }

    fn of(device: Device, raw: RawContext, is_primary: bool) -> Self {
        Self(Arc::new(Inner {
            device,
            raw,
            is_primary,
            deferred_frees: DeferredFrees::default(),
        }))
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// Its driver.
    #[must_use]
    pub fn driver(&self) -> Driver {
        self.0.device.driver()
    }

    /// Whether it is the device's primary context, which the CUDA runtime uses.
    #[must_use]
    pub fn is_primary(&self) -> bool {
        self.0.is_primary
    }

    pub(crate) fn raw(&self) -> RawContext {
        self.0.raw
    }

    pub(crate) fn deferred_frees(&self) -> &DeferredFrees {
        &self.0.deferred_frees
    }

    /// Makes it the thread's current context permanently, so that later calls are slightly faster.
    #[doc(alias = "cuCtxSetCurrent")]
    pub fn make_current(&self) -> Result<(), Error> {
        // SAFETY: the context is retained.
        let status = unsafe { (self.driver().table().ctx_set_current)(self.0.raw) };
        self.driver().check(
            status,
            "cuCtxSetCurrent",
            format_args!("the context of {}", self.0.device),
        )
    }

    /// Calls `work` with it as the thread's current context, and restores the previous one: for
    /// libraries that use the current context.
    ///
    /// # Errors
    /// The driver's, before `work` is called.
    #[doc(alias("cuCtxPushCurrent", "cuCtxPopCurrent"))]
    pub fn with_current<T>(&self, work: impl FnOnce() -> T) -> Result<T, Error> {
        let _entered = self.enter()?;
        Ok(work())
    }

    /// Waits for all work of the device in this context, and frees resources that waited for it.
    ///
    /// # Errors
    /// [`Error::Lost`] if work has failed, or another driver error.
    #[doc(alias("cuCtxSynchronize", "cudaDeviceSynchronize"))]
    pub fn synchronize(&self) -> Result<(), Error> {
        let entered = self.enter()?;
        // SAFETY: the context is current.
        let status = unsafe { (self.driver().table().ctx_synchronize)() };
        drop(entered);
        self.reap();
        self.driver()
            .check(status, "cuCtxSynchronize", format_args!("{}", self.0.device))
    }

    /// Free and total bytes of the device's memory.
    #[doc(alias("cuMemGetInfo", "cudaMemGetInfo"))]
    pub fn memory_info(&self) -> Result<(usize, usize), Error> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to local values, and the context is current.
        let status = unsafe { (self.driver().table().mem_get_info)(&raw mut free, &raw mut total) };
        self.driver()
            .check(status, "cuMemGetInfo", format_args!("{}", self.0.device))?;
        Ok((free, total))
    }

    /// Enables peer access: copies and kernels of this context reach memory of `other` that was not
    /// mapped for particular devices (such as PyTorch's). It applies to the whole context.
    ///
    /// # Errors
    /// [`Error::NoPeerAccess`] if the devices have no peer access, or another driver error.
    #[doc(alias("cuCtxEnablePeerAccess", "cudaDeviceEnablePeerAccess"))]
    pub fn enable_peer_access(&self, other: &Self) -> Result<(), Error> {
        let _entered = self.enter()?;
        // SAFETY: both contexts are retained, and this one is current.
        let status = unsafe { (self.driver().table().ctx_enable_peer_access)(other.0.raw, 0) };
        if status == status::PEER_ACCESS_ALREADY_ENABLED {
            return Ok(());
        }
        self.driver().check(
            status,
            "cuCtxEnablePeerAccess",
            format_args!("{} to {}", self.0.device, other.0.device),
        )
    }

    /// Makes synchronous copies and fills (`cuMemcpy`) of this context return only when all of
    /// their work is done, for mapped memory too, as GPUDirect RDMA requires.
    ///
    /// # Errors
    /// [`Error::Missing`] before CUDA 12.1, or the driver's error.
    #[doc(alias = "CU_CTX_SYNC_MEMOPS")]
    pub fn set_sync_memops(&self) -> Result<(), Error> {
        let driver = self.driver();
        let (Some(get), Some(set)) = (driver.table().ctx_get_flags, driver.table().ctx_set_flags) else {
            return Err(driver.missing("cuCtxSetFlags"));
        };
        let _entered = self.enter()?;
        let mut flags = 0;
        // SAFETY: the pointer is to flags of ours, and the context is current.
        let status = unsafe { get(&raw mut flags) };
        driver.check(status, "cuCtxGetFlags", format_args!("{}", self.0.device))?;
        // SAFETY: the context is current.
        let status = unsafe { set(flags | sys::CTX_SYNC_MEMOPS) };
        driver.check(status, "cuCtxSetFlags", format_args!("{}", self.0.device))
    }

    /// Waits until GPUDirect RDMA writes of other devices (NICs) to this device's memory are
    /// visible to it, or to all devices ([`WritesOrdering::AllDevices`]). Unnecessary, and cheap,
    /// if [`Device::writes_ordering`] is `scope` or more.
    ///
    /// # Errors
    /// [`Error::NotSupported`], [`Error::Missing`], or another driver error.
    #[doc(alias("cuFlushGPUDirectRDMAWrites", "cudaDeviceFlushGPUDirectRDMAWrites"))]
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
        let status = unsafe { flush(sys::FLUSH_CURRENT_CONTEXT, scope) };
        driver.check(status, "cuFlushGPUDirectRDMAWrites", format_args!("{}", self.0.device))
    }

    /// Frees dropped resources whose work is done; returns how many are pending. Also implicit: of
    /// a few when a resource is made or dropped, of all when a stream is synchronized.
    pub fn reap(&self) -> usize {
        self.0.deferred_frees.reap_all(self)
    }

    pub(crate) fn enter(&self) -> Result<Entered<'_>, Error> {
        self.0.enter()
    }

    /// Makes it current in this thread while `work` runs, instead of in each call of this crate.
    #[doc(alias("cuCtxPushCurrent", "cuCtxPopCurrent"))]
    pub fn while_current<R>(&self, work: impl FnOnce() -> R) -> Result<R, Error> {
        let _entered = self.enter()?;
        Ok(work())
    }
}

impl Inner {
    #[inline]
    fn enter(&self) -> Result<Entered<'_>, Error> {
        let driver = self.device.driver();
        let mut current = ptr::null_mut();
        // SAFETY: the pointer is to a local CUcontext.
        let status = unsafe { (driver.table().ctx_get_current)(&raw mut current) };
        driver.check(status, "cuCtxGetCurrent", format_args!("this thread"))?;
        let pushed = current != self.raw;
        if pushed {
            // SAFETY: the context is retained.
            let status = unsafe { (driver.table().ctx_push_current)(self.raw) };
            driver.check(
                status,
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
            self.deferred_frees.close(driver);
        }
        // SAFETY: retained once or created by this value, and nothing made in the context is left:
        // such resources hold this value.
        let status = unsafe {
            if self.is_primary {
                (driver.table().primary_ctx_release)(self.device.raw())
            } else {
                (driver.table().ctx_destroy)(self.raw)
            }
        };
        if status != status::SUCCESS && status != status::DEINITIALIZED {
            tracing::warn!("the context of {} was not released: CUDA error {status}", self.device);
        }
    }
}

/// Guard of a pushed context; dropping it restores the previous one.
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
            // SAFETY: the pointer is to a local CUcontext; the context popped is the one that was
            // pushed, as guards are dropped in reverse order on one thread.
            let status = unsafe { (self.driver.table().ctx_pop_current)(&raw mut popped) };
            if status != status::SUCCESS && status != status::DEINITIALIZED {
                tracing::warn!("the context of this thread could not be restored: CUDA error {status}");
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
        self.0.raw == other.0.raw
    }
}

impl Eq for Context {}
