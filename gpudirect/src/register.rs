//! Registration of GPU memory by the best path that works. Known prerequisites are checked first,
//! so that a refusal names what is missing rather than an errno.

use std::any::Any;
use std::path::Path as FilePath;
use std::sync::Arc;

use doorbell_cuda::{Attribute, HostMemory, Memory};
use doorbell_verbs::{Buffer, Chunks, Context, Opaque, ProtectionDomain, Registration, Rights};

use crate::error::Error;
use crate::memory::GpuMemory;
use crate::path::{NoPath, Path, Refusal, Refused};
use crate::region::{GpuBuffer, GpuRegion};

/// The maximum buffer length: that of a message (IBTA vol 1, 9.7.7).
const MAX_LEN: usize = 1 << 31;

const MODULES: &str = "/sys/module";
/// Names of the peer memory module: the current one, and its predecessor.
const PEERMEM: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];

/// Registers all of `memory` as one buffer, by the best path or that of `DOORBELL_GPU_PATH`.
///
/// # Errors
/// [`Error::NoPath`] with the paths tried; [`Error::TooLong`] beyond 2 GiB; [`Error::InvalidPath`].
#[doc(alias = "ibv_reg_dmabuf_mr")]
pub fn register<R: Rights>(pd: &ProtectionDomain, memory: &GpuMemory, rights: R) -> Result<GpuBuffer<R>, Error> {
    GpuRegistration::from_environment(pd)?.register(memory, rights)
}

/// As [`register`], but split into buffers of `chunk` bytes; the last may be shorter.
///
/// # Errors
/// As [`register`]; only `chunk` is limited to 2 GiB.
pub fn register_chunks<R: Rights>(
    pd: &ProtectionDomain,
    memory: &GpuMemory,
    chunk: usize,
    rights: R,
) -> Result<(Chunks<Opaque<R>>, GpuRegion), Error> {
    GpuRegistration::from_environment(pd)?.register_chunks(memory, chunk, rights)
}

/// Options for registering GPU memory.
#[derive(Debug, Clone, Copy)]
#[must_use = "nothing is registered until register() is called"]
pub struct GpuRegistration<'a> {
    pd: &'a ProtectionDomain,
    forced: Option<Path>,
    relaxed: bool,
}

impl<'a> GpuRegistration<'a> {
    /// By the best path that works.
    pub fn new(pd: &'a ProtectionDomain) -> Self {
        Self {
            pd,
            forced: None,
            relaxed: false,
        }
    }

    /// By the path that `DOORBELL_GPU_PATH` names, or the best that works.
    ///
    /// # Errors
    /// [`Error::InvalidPath`] for an unknown name.
    pub fn from_environment(pd: &'a ProtectionDomain) -> Result<Self, Error> {
        let forced = Path::from_environment()?;
        Ok(Self {
            forced,
            ..Self::new(pd)
        })
    }

    /// By this path only.
    pub fn path(mut self, path: Path) -> Self {
        self.forced = Some(path);
        self
    }

    /// As [`Registration::relaxed_ordering`].
    pub fn relaxed_ordering(mut self) -> Self {
        self.relaxed = true;
        self
    }

    /// Registers all of `memory` as one buffer.
    ///
    /// # Errors
    /// [`Error::NoPath`] with the paths tried; [`Error::TooLong`] beyond 2 GiB.
    pub fn register<R: Rights>(self, memory: &GpuMemory, rights: R) -> Result<GpuBuffer<R>, Error> {
        let too_long = || Error::TooLong { len: memory.len() };
        if memory.len() > MAX_LEN {
            return Err(too_long());
        }
        let (mut chunks, region) = self.register_chunks(memory, memory.len(), rights)?;
        let buffer: Buffer<Opaque<R>> = chunks.next().ok_or_else(too_long)?;
        Ok(GpuBuffer::new(buffer, region))
    }

    /// As [`register`](Self::register), but split into buffers of `chunk` bytes, the last fewer.
    ///
    /// # Errors
    /// [`Error::NoPath`] with the paths tried; [`Error::TooLong`] for a chunk beyond 2 GiB.
    pub fn register_chunks<R: Rights>(
        self,
        memory: &GpuMemory,
        chunk: usize,
        rights: R,
    ) -> Result<(Chunks<Opaque<R>>, GpuRegion), Error> {
        if chunk > MAX_LEN {
            return Err(Error::TooLong { len: chunk });
        }
        let mut refused = Vec::new();
        for path in Path::ALL {
            match self.try_path(path, memory, chunk, rights) {
                Ok((chunks, staging)) => {
                    let region = GpuRegion::new(memory.clone(), path, refused, staging);
                    return Ok((chunks, region));
                }
                Err(why) => refused.push(Refused { path, why }),
            }
        }
        Err(Error::NoPath(NoPath {
            device: self.pd.context().name().to_owned(),
            gpu: memory.context().device().ordinal(),
            refused,
        }))
    }

    pub(crate) fn try_path<R: Rights>(
        self,
        path: Path,
        memory: &GpuMemory,
        chunk: usize,
        rights: R,
    ) -> Result<(Chunks<Opaque<R>>, Option<HostMemory>), Refusal> {
        if let Some(forced) = self.forced.filter(|forced| *forced != path) {
            return Err(Refusal::NotForced { forced });
        }
        match path {
            Path::DmaBuf => self.dma_buf(memory, chunk, rights).map(|chunks| (chunks, None)),
            Path::Peermem => self.peermem(memory, chunk, rights).map(|chunks| (chunks, None)),
            Path::DeviceCopy => self.device_copy(memory, chunk, rights).map(|chunks| (chunks, None)),
            Path::Staged => self.staged(memory, chunk, rights),
        }
    }

    fn dma_buf<R: Rights>(self, memory: &GpuMemory, chunk: usize, rights: R) -> Result<Chunks<Opaque<R>>, Refusal> {
        const CALL: &str = "ibv_reg_dmabuf_mr";
        let context = self.pd.context();
        if context.attr().is_userspace() {
            return Err(software(&context));
        }
        let device = memory.context().device();
        require_attribute(
            device,
            Attribute::DmaBufSupported,
            "CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED",
        )?;
        self.pd.check_dmabuf().map_err(|error| match error.raw_os_error() {
            None => Refusal::MissingFunction { call: CALL },
            Some(_) => Refusal::Provider {
                call: CALL,
                device: context.name().to_owned(),
                error,
            },
        })?;
        if memory.allocated().is_some_and(|memory| !memory.is_gpu_direct()) {
            return Err(Refusal::NotGpuDirectCapable);
        }
        let exported = memory.all().dma_buf()?;
        let keeper = self.keeper_of(memory);
        let chunks = self.verbs().register_dmabuf(
            exported.fd,
            exported.offset as u64,
            memory.len(),
            memory.device_ptr().0,
            chunk,
            keeper,
            rights,
        )?;
        Ok(chunks)
    }

    fn peermem<R: Rights>(self, memory: &GpuMemory, chunk: usize, rights: R) -> Result<Chunks<Opaque<R>>, Refusal> {
        let context = self.pd.context();
        if context.attr().is_userspace() {
            return Err(software(&context));
        }
        let device = memory.context().device();
        require_attribute(
            device,
            Attribute::GpuDirectRdmaSupported,
            "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED",
        )?;
        if !PEERMEM.iter().any(|module| is_loaded(module)) {
            return Err(Refusal::ModuleNotLoaded { module: PEERMEM[0] });
        }
        self.register_address(memory, chunk, rights)
    }

    fn device_copy<R: Rights>(self, memory: &GpuMemory, chunk: usize, rights: R) -> Result<Chunks<Opaque<R>>, Refusal> {
        let context = self.pd.context();
        if !context.attr().is_userspace() {
            return Err(Refusal::NotSoftware {
                device: context.name().to_owned(),
            });
        }
        self.register_address(memory, chunk, rights)
    }

    /// Registers the GPU's addresses, which nvidia_peermem or the software device resolves.
    #[expect(unsafe_code, reason = "the address is one that verbs cannot check")]
    fn register_address<R: Rights>(
        self,
        memory: &GpuMemory,
        chunk: usize,
        rights: R,
    ) -> Result<Chunks<Opaque<R>>, Refusal> {
        let keeper = self.keeper_of(memory);
        // SAFETY: the bytes are GPU memory as long as the keeper lives, and are never referenced:
        // only copies and kernels access them.
        let chunks = unsafe {
            self.verbs()
                .register_opaque(memory.device_ptr().0, memory.len(), chunk, keeper, rights)?
        };
        Ok(chunks)
    }

    #[expect(unsafe_code, reason = "the address is one that verbs cannot check")]
    fn staged<R: Rights>(
        self,
        memory: &GpuMemory,
        chunk: usize,
        rights: R,
    ) -> Result<(Chunks<Opaque<R>>, Option<HostMemory>), Refusal> {
        let staging = HostMemory::alloc(memory.context(), memory.len())?;
        let keeper: Arc<dyn Any + Send + Sync> = Arc::new(staging.clone());
        let start = staging.as_ptr().expose_provenance() as u64;
        // SAFETY: the bytes are pinned memory as long as the keeper lives. Handles access them by
        // atomics; a slice is given only to the last handle, which no caller has while the region
        // keeps one.
        let chunks = unsafe {
            self.verbs()
                .register_opaque(start, staging.len(), chunk, keeper, rights)?
        };
        Ok((chunks, Some(staging)))
    }

    fn verbs(self) -> Registration<'a> {
        let registration = self.pd.registration();
        if self.relaxed {
            registration.relaxed_ordering()
        } else {
            registration
        }
    }

    /// Keeps the memory while it is registered, with SYNC_MEMOPS: synchronous copies could
    /// otherwise return early, and an adapter send bytes that are still being written.
    fn keeper_of(self, memory: &GpuMemory) -> Arc<dyn Any + Send + Sync> {
        let span = memory.all();
        if let Err(error) = span.set_sync_memops().or_else(|_| memory.context().set_sync_memops()) {
            tracing::debug!(
                "SYNC_MEMOPS cannot be set: copies by cuMemcpy must be waited for by a stream or event before they are sent: {error}"
            );
        }
        Arc::new(memory.clone())
    }
}

fn require_attribute(device: doorbell_cuda::Device, attribute: Attribute, name: &'static str) -> Result<(), Refusal> {
    match device.attribute(attribute)? {
        0 => Err(Refusal::Attribute {
            gpu: device.ordinal(),
            name,
            number: attribute as i32,
            value: 0,
        }),
        _ => Ok(()),
    }
}

fn is_loaded(module: &str) -> bool {
    FilePath::new(MODULES).join(module).exists()
}

fn software(context: &Context) -> Refusal {
    Refusal::Software {
        device: context.name().to_owned(),
    }
}
