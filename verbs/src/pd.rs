//! Protection domains (PD; IBTA vol 1, 10.2.3).

use core::mem::ManuallyDrop;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use crate::ah::{AddressHandleBuilder, DeferredHandles};
use crate::context::{Context, ContextInner};
use crate::cq::{CompletionQueue, CqKind};
use crate::error::{DeviceError, MemoryError, check};
use crate::memory::{
    Buffer, Chunks, DeviceMemory, Memory, MemoryWindow, Opaque, Registration, Rights, WindowType1, registration,
};
use crate::qp::QueuePairBuilder;
use crate::raw::Lender;
use crate::srq::SharedReceiveQueueBuilder;

/// A protection domain (ibv_alloc_pd(3); IBTA vol 1, 10.2.3), kept by clones and by its objects.
#[derive(Clone)]
#[doc(alias("ibv_pd", "ibv_alloc_pd", "ibv_dealloc_pd"))]
pub struct ProtectionDomain {
    inner: Arc<PdInner>,
}

pub(crate) struct PdInner {
    pub(crate) raw: *mut sys::ibv_pd,
    pub(crate) context: ManuallyDrop<Arc<ContextInner>>,
    pub(crate) handles: DeferredHandles,
    lender: Lender,
}

// SAFETY: `raw` is only passed to verbs, which may be called from any thread.
unsafe impl Send for PdInner {}
// SAFETY: as above.
unsafe impl Sync for PdInner {}

impl ProtectionDomain {
    pub(crate) fn new(context: &Context) -> Result<Self, DeviceError> {
        let context = context.inner();
        // SAFETY: the context is live.
        let raw = unsafe { (context.api.alloc_pd)(context.raw) };
        if raw.is_null() {
            return Err(DeviceError::ProtectionDomain {
                device: context.name.clone(),
                error: io::Error::last_os_error(),
            });
        }
        // SAFETY: just made on this device.
        Ok(unsafe { Self::adopt(context, raw, None) })
    }

    /// # Safety
    /// `raw` is a live domain of this device, which no other owner than the lender deallocates.
    pub(crate) unsafe fn adopt(context: &Arc<ContextInner>, raw: *mut sys::ibv_pd, lender: Lender) -> Self {
        Self {
            inner: Arc::new(PdInner {
                raw,
                context: ManuallyDrop::new(Arc::clone(context)),
                handles: DeferredHandles::default(),
                lender,
            }),
        }
    }

    pub(crate) fn inner(&self) -> &Arc<PdInner> {
        &self.inner
    }

    /// The device it belongs to.
    #[must_use]
    pub fn context(&self) -> Context {
        Context::from_inner(Arc::clone(&self.inner.context))
    }

    /// Registers `memory` with `rights`, as one [`Buffer`] (ibv_reg_mr(3), IBTA vol 1, 10.6).
    ///
    /// Its last piece deregisters and frees it; [`Buffer::into_memory`] returns it.
    ///
    /// # Errors
    /// When the memory is empty or longer than one message may be (see
    /// [`register_chunks`](Self::register_chunks)), or the device refuses; the most frequent cause
    /// is the limit on locked memory, which the error names.
    #[doc(alias = "ibv_reg_mr")]
    pub fn register<R: Rights>(&self, memory: impl Into<Memory>, rights: R) -> Result<Buffer<R>, MemoryError> {
        self.registration().register(memory, rights)
    }

    /// Registers any length as one region, in buffers of `chunk` bytes (the last may be shorter).
    ///
    /// # Errors
    /// As for [`register`](Self::register), but only `chunk` must fit a message.
    #[doc(alias = "ibv_reg_mr")]
    pub fn register_chunks<R: Rights>(
        &self,
        memory: impl Into<Memory>,
        chunk: usize,
        rights: R,
    ) -> Result<Chunks<R>, MemoryError> {
        self.registration().register_chunks(memory, chunk, rights)
    }

    /// Starts a registration with options: relaxed ordering, on-demand paging, huge pages.
    #[doc(alias("ibv_reg_mr", "ibv_access_flags"))]
    pub fn registration(&self) -> Registration<'_> {
        Registration::new(self)
    }

    /// Whether the device registers dma-bufs: memory of a GPU or another device.
    #[must_use]
    #[doc(alias = "ibv_reg_dmabuf_mr")]
    pub fn supports_dmabuf(&self) -> bool {
        self.check_dmabuf().is_ok()
    }

    /// The error of a device that does not register dma-bufs (`EOPNOTSUPP` or `EPROTONOSUPPORT`;
    /// without an errno, the library has no such call).
    ///
    /// # Errors
    /// When it does not.
    #[doc(alias = "ibv_reg_dmabuf_mr")]
    pub fn check_dmabuf(&self) -> io::Result<()> {
        registration::check_dmabuf(&self.inner)
    }

    /// Registers the `len` bytes at `offset` of the dma-buf `fd`, with addresses from `iova` on
    /// (ibv_reg_dmabuf_mr(3)). The descriptor is closed: the kernel holds the dma-buf.
    ///
    /// # Errors
    /// When the range is empty, too long for one message or beyond the address space, `offset` and
    /// `iova` differ in their page offset, or the device [refuses](Self::supports_dmabuf).
    #[doc(alias = "ibv_reg_dmabuf_mr")]
    pub fn register_dmabuf<R: Rights>(
        &self,
        fd: OwnedFd,
        offset: u64,
        len: usize,
        iova: u64,
        rights: R,
    ) -> Result<Buffer<Opaque<R>>, MemoryError> {
        registration::register_dmabuf(&self.inner, fd, offset, len, iova, rights)
    }

    /// Registers `len` bytes at `offset` of device memory, from address 0 on (ibv_alloc_dm(3)).
    ///
    /// # Errors
    /// When the range is empty or beyond it, the memory is another device's, or the device refuses.
    #[doc(alias = "ibv_reg_dm_mr")]
    pub fn register_device_memory<R: Rights>(
        &self,
        memory: &DeviceMemory,
        offset: u64,
        len: usize,
        rights: R,
    ) -> Result<Buffer<Opaque<R>>, MemoryError> {
        registration::register_device_memory(&self.inner, memory, offset, len, rights)
    }

    /// Allocates an unbound memory window of type 2 (ibv_alloc_mw(3)): see [`MemoryWindow`].
    ///
    /// # Errors
    /// When the device has no such windows (see
    /// [`DeviceAttr::windows`](crate::DeviceAttr::windows)), or no more of them.
    #[doc(alias = "ibv_alloc_mw")]
    pub fn memory_window(&self) -> Result<MemoryWindow, MemoryError> {
        MemoryWindow::new(&self.inner)
    }

    /// Allocates an unbound memory window of type 1: see [`MemoryWindow`].
    ///
    /// # Errors
    /// As for [`memory_window`](Self::memory_window).
    #[doc(alias("ibv_alloc_mw", "IBV_MW_TYPE_1"))]
    pub fn memory_window_type_1(&self) -> Result<MemoryWindow<WindowType1>, MemoryError> {
        MemoryWindow::new(&self.inner)
    }

    /// Builds an address handle (AH), to which queue pairs of this domain send datagrams.
    #[doc(alias = "ibv_create_ah")]
    pub fn address_handle(&self) -> AddressHandleBuilder<'_> {
        AddressHandleBuilder::new(self)
    }

    /// Builds a shared receive queue (SRQ) for `depth` receives. Its buffers are of this domain.
    #[doc(alias = "ibv_create_srq")]
    pub fn shared_receive_queue(&self, depth: u32) -> SharedReceiveQueueBuilder<'_> {
        SharedReceiveQueueBuilder::new(self, depth)
    }

    /// Builds a queue pair whose completions go to `cq` ([`QueuePairBuilder::recv_cq`]: or to two).
    #[doc(alias("ibv_create_qp", "ibv_create_qp_ex", "rdma_create_qp"))]
    pub fn queue_pair<'a, Q: CqKind>(&'a self, cq: &'a CompletionQueue<Q>) -> QueuePairBuilder<'a> {
        QueuePairBuilder::new(self, cq.inner())
    }
}

impl core::fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ProtectionDomain")
            .field("device", &self.inner.context.name)
            .finish_non_exhaustive()
    }
}

impl Drop for PdInner {
    fn drop(&mut self) {
        self.handles.close(&self.context);
        let result = match self.lender {
            Some(_) => Ok(()),
            // SAFETY: the last reference: its objects hold one until destroyed (or leak it).
            None => check(unsafe { (self.context.api.dealloc_pd)(self.raw) }),
        };
        match result {
            // SAFETY: dropped once, here; not used after.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.context) },
            Err(error) => {
                tracing::error!(device = %self.context.name, %error, "ibv_dealloc_pd failed; domain and context are leaked");
            }
        }
    }
}
