//! Registering GPU memory by the best path that works.
//!
//! What can be known beforehand is asked first, so that a refusal says what is missing and not what the kernel makes of it: the GPU's attributes, the kernel's modules, and whether the
//! provider takes dma-bufs at all. The rest is tried.

use std::any::Any;
use std::path::Path as FilePath;
use std::sync::Arc;

use doorbell_cuda::{Attribute, HostMemory, Memory};
use doorbell_verbs::{Buffer, Chunks, Context, Opaque, ProtectionDomain, Registration, Rights};

use crate::error::Error;
use crate::memory::GpuMemory;
use crate::path::{NoPath, Path, Refusal, Refused};
use crate::region::{GpuBuffer, GpuRegion};

/// The longest buffer: that of the longest message (IBTA vol 1, 9.7.7).
const LONGEST: usize = 1 << 31;

/// Where the kernel shows its modules.
const MODULES: &str = "/sys/module";
/// Under which names the module goes that gives adapters the addresses of GPUs: NVIDIA's driver's, and its forerunner's.
const PEERMEM: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];

/// Registers all of `memory` as one buffer, by the best path that works or the one that `DOORBELL_GPU_PATH` forces.
///
/// # Errors
/// [`Error::NoPath`] with what was tried; [`Error::TooLong`] beyond 2 GiB; [`Error::BadPath`].
pub fn register<R: Rights>(pd: &ProtectionDomain, memory: &GpuMemory, rights: R) -> Result<GpuBuffer<R>, Error> {
    GpuRegistration::from_environment(pd)?.register(memory, rights)
}

/// As [`register`], memory of any length, cut into buffers of `chunk` bytes; the last may be shorter.
///
/// # Errors
/// As [`register`], of which only `chunk` must be within 2 GiB.
pub fn register_chunks<R: Rights>(
    pd: &ProtectionDomain,
    memory: &GpuMemory,
    chunk: usize,
    rights: R,
) -> Result<(Chunks<Opaque<R>>, GpuRegion), Error> {
    GpuRegistration::from_environment(pd)?.register_chunks(memory, chunk, rights)
}

/// How GPU memory is to be registered.
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
    /// [`Error::BadPath`] when it names none.
    pub fn from_environment(pd: &'a ProtectionDomain) -> Result<Self, Error> {
        let forced = Path::from_environment()?;
        Ok(Self {
            forced,
            ..Self::new(pd)
        })
    }

    /// By this path, or not at all.
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
    /// [`Error::NoPath`] with what was tried; [`Error::TooLong`] beyond 2 GiB.
    pub fn register<R: Rights>(self, memory: &GpuMemory, rights: R) -> Result<GpuBuffer<R>, Error> {
        let too_long = || Error::TooLong { len: memory.len() };
        if memory.len() > LONGEST {
            return Err(too_long());
        }
        let (mut chunks, region) = self.register_chunks(memory, memory.len(), rights)?;
        let buffer: Buffer<Opaque<R>> = chunks.next().ok_or_else(too_long)?;
        Ok(GpuBuffer::new(buffer, region))
    }

    /// Registers all of `memory`, which may be of any length, cut into buffers of `chunk` bytes; the last may be shorter.
    ///
    /// # Errors
    /// [`Error::NoPath`] with what was tried; [`Error::TooLong`] of a chunk beyond 2 GiB.
    pub fn register_chunks<R: Rights>(
        self,
        memory: &GpuMemory,
        chunk: usize,
        rights: R,
    ) -> Result<(Chunks<Opaque<R>>, GpuRegion), Error> {
        if chunk > LONGEST {
            return Err(Error::TooLong { len: chunk });
        }
        let mut refused = Vec::new();
        for path in Path::ALL {
            match self.try_path(path, memory, chunk, rights) {
                Ok((chunks, mirror)) => {
                    let region = GpuRegion::new(memory.clone(), path, refused, mirror);
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

    /// Registers by this path, or says why that is not possible.
    pub(crate) fn try_path<R: Rights>(
        self,
        path: Path,
        memory: &GpuMemory,
        chunk: usize,
        rights: R,
    ) -> Result<(Chunks<Opaque<R>>, Option<HostMemory>), Refusal> {
        if let Some(forced) = self.forced.filter(|forced| *forced != path) {
            return Err(Refusal::NotAsked { forced });
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
        if is_software(&context) {
            return Err(software(&context));
        }
        let device = memory.context().device();
        asks(
            device,
            Attribute::DmaBufSupported,
            "CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED",
        )?;
        self.pd.check_dmabuf().map_err(|error| match error.raw_os_error() {
            None => Refusal::NoCall { call: CALL },
            Some(_) => Refusal::Provider {
                call: CALL,
                device: context.name().to_owned(),
                error,
            },
        })?;
        if memory.allocated().is_some_and(|memory| !memory.is_gpu_direct()) {
            return Err(Refusal::NotMadeForIt);
        }
        let exported = memory.all().dma_buf()?;
        let keeper = self.kept(memory);
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
        if is_software(&context) {
            return Err(software(&context));
        }
        let device = memory.context().device();
        asks(
            device,
            Attribute::GpuDirectRdmaSupported,
            "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED",
        )?;
        if !PEERMEM.iter().any(|module| is_loaded(module)) {
            return Err(Refusal::NoModule { module: PEERMEM[0] });
        }
        self.by_address(memory, chunk, rights)
    }

    fn device_copy<R: Rights>(self, memory: &GpuMemory, chunk: usize, rights: R) -> Result<Chunks<Opaque<R>>, Refusal> {
        let context = self.pd.context();
        if !is_software(&context) {
            return Err(Refusal::NotSoftware {
                device: context.name().to_owned(),
            });
        }
        self.by_address(memory, chunk, rights)
    }

    /// Registers the GPU's own addresses: whoever is below knows them, or refuses.
    #[expect(unsafe_code, reason = "the address is one that verbs cannot check")]
    fn by_address<R: Rights>(self, memory: &GpuMemory, chunk: usize, rights: R) -> Result<Chunks<Opaque<R>>, Refusal> {
        let keeper = self.kept(memory);
        // SAFETY: the bytes are memory of a GPU as long as the keeper lives, and nobody has references to them: they are reached by copies and kernels.
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
        let mirror = HostMemory::alloc(memory.context(), memory.len())?;
        let keeper: Arc<dyn Any + Send + Sync> = Arc::new(mirror.clone());
        let start = mirror.as_ptr().expose_provenance() as u64;
        // SAFETY: the bytes are pinned memory as long as the keeper lives. Whoever has a handle to it reaches them by atomics; a slice is given only to the last handle,
        // which nobody has while the region keeps one.
        let chunks = unsafe {
            self.verbs()
                .register_opaque(start, mirror.len(), chunk, keeper, rights)?
        };
        Ok((chunks, Some(mirror)))
    }

    fn verbs(self) -> Registration<'a> {
        let registration = self.pd.registration();
        if self.relaxed {
            registration.relaxed_ordering()
        } else {
            registration
        }
    }

    /// What keeps the memory while it is registered. Copies of CUDA's that are waited for by their own call are made to be over when it returns: without, an adapter might send what they
    /// are still writing.
    fn kept(self, memory: &GpuMemory) -> Arc<dyn Any + Send + Sync> {
        let span = memory.all();
        if let Err(error) = span.set_sync_memops().or_else(|_| memory.context().set_sync_memops()) {
            tracing::debug!(
                "SYNC_MEMOPS cannot be set: copies by cuMemcpy must be waited for by a stream or event before they are sent: {error}"
            );
        }
        Arc::new(memory.clone())
    }
}

/// That the device says other than 0 of it.
fn asks(device: doorbell_cuda::Device, attribute: Attribute, name: &'static str) -> Result<(), Refusal> {
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

/// Whether the device is the userspace one: adapters, and the kernel's devices in software, give a vendor.
pub(crate) fn is_software(context: &Context) -> bool {
    context.attr().vendor_id == 0
}

fn software(context: &Context) -> Refusal {
    Refusal::Software {
        device: context.name().to_owned(),
    }
}
