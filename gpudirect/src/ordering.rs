//! What has to be done so that a GPU sees what an adapter has written.
//!
//! A completion says that the bytes have left the adapter. Whether kernels that are launched after it find them depends on the GPU: newer ones promise it for themselves, others need a *flush*
//! first, by the driver or by a READ of the same memory, which pushes the writes before it out of the bus's bridges. Bytes that the GPU copied itself, or that came by a mirror, need none.

use core::fmt;
use core::ops::RangeBounds;

use doorbell_cuda::{Stream, WritesOrdering};
use doorbell_verbs::{Buffer, CompletionQueue, Local, Opaque, ProtectionDomain, QueuePair, Read, Remote, RemoteRead};

use crate::error::Error;
use crate::path::Path;
use crate::region::GpuRegion;
use crate::register::GpuRegistration;

/// Who is to see what has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The GPU whose memory it is.
    Owner,
    /// All GPUs of the machine.
    AllDevices,
}

impl Scope {
    fn ordering(self) -> WritesOrdering {
        match self {
            Self::Owner => WritesOrdering::Owner,
            Self::AllDevices => WritesOrdering::AllDevices,
        }
    }
}

/// How writes of an adapter are made visible to a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flush {
    /// They are: the GPU, or another that copied for it, has put them there itself, and the completion came after.
    Copied,
    /// They are: the GPU keeps the order, as its `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING` (118) says.
    InOrder,
    /// By `cuFlushGPUDirectRDMAWrites`.
    Driver,
    /// By an RDMA READ of a byte of the memory, over a queue pair that is connected to itself.
    Read,
}

impl Flush {
    /// What memory registered so needs.
    ///
    /// # Errors
    /// The driver's error of the GPU.
    pub fn needed(region: &GpuRegion, scope: Scope) -> Result<Self, doorbell_cuda::Error> {
        match region.path() {
            Path::DeviceCopy | Path::Staged => Ok(Self::Copied),
            Path::DmaBuf | Path::Peermem => Self::of(region.memory().context().device(), scope),
        }
    }

    /// What a GPU needs whose memory an adapter writes over the bus.
    ///
    /// # Errors
    /// The driver's error of the GPU.
    pub fn of(device: doorbell_cuda::Device, scope: Scope) -> Result<Self, doorbell_cuda::Error> {
        Ok(if device.writes_ordering()? >= scope.ordering() {
            Self::InOrder
        } else if device.flush_options()?.host {
            Self::Driver
        } else {
            Self::Read
        })
    }
}

impl fmt::Display for Flush {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Copied => "none: the completion comes after the copy",
            Self::InOrder => "none: the GPU keeps writes in order",
            Self::Driver => "by cuFlushGPUDirectRDMAWrites",
            Self::Read => "by an RDMA READ of the same memory",
        })
    }
}

/// Lets a GPU see what has arrived in a region, by whatever that needs.
pub struct Arrivals {
    region: GpuRegion,
    scope: Scope,
    by: By,
}

enum By {
    Nothing,
    Driver,
    Read(Box<Reader>),
}

/// A queue pair to itself, and a byte to read.
struct Reader {
    qp: QueuePair,
    cq: CompletionQueue,
    into: Option<Buffer<Local>>,
    from: Remote<Read>,
    _region: Buffer<Opaque<RemoteRead>>,
}

impl Arrivals {
    /// For what `scope` is to see of the memory of `region`, which was registered in `pd`.
    ///
    /// # Errors
    /// What the driver or the device says, where a flush by READ has to be set up.
    pub fn new(pd: &ProtectionDomain, region: &GpuRegion, scope: Scope) -> Result<Self, Error> {
        let flush = Flush::needed(region, scope)?;
        Self::by(pd, region, scope, flush)
    }

    /// By `flush`, needed or not: to measure it.
    ///
    /// # Errors
    /// As [`Arrivals::new`].
    pub fn by(pd: &ProtectionDomain, region: &GpuRegion, scope: Scope, flush: Flush) -> Result<Self, Error> {
        let by = match flush {
            Flush::Copied | Flush::InOrder => By::Nothing,
            Flush::Driver => By::Driver,
            Flush::Read => By::Read(Box::new(Reader::new(pd, region)?)),
        };
        Ok(Self {
            region: region.clone(),
            scope,
            by,
        })
    }

    /// How.
    #[must_use]
    pub fn flushes(&self) -> bool {
        !matches!(self.by, By::Nothing)
    }

    /// Has work put into `stream` from now on see in `range` what has arrived there, as completions that were polled before this have said. Returns at once where
    /// nothing is needed; a flush is waited for; the copy from a mirror is put into the stream.
    ///
    /// # Errors
    /// The CUDA driver's error, or the device of a READ.
    pub fn publish(&mut self, range: impl RangeBounds<usize>, stream: &Stream) -> Result<(), Error> {
        match &mut self.by {
            By::Nothing => {}
            By::Driver => {
                let context = self.region.memory().context();
                context.flush_gpu_direct_rdma_writes(self.scope.ordering())?;
            }
            By::Read(reader) => reader.flush()?,
        }
        if !self.region.path().is_direct() {
            // The stream keeps the order; whoever wants to know more pulls it themself.
            drop(self.region.pull(range, stream)?);
        }
        Ok(())
    }
}

impl Reader {
    fn new(pd: &ProtectionDomain, region: &GpuRegion) -> Result<Self, Error> {
        let memory = region.memory();
        let chunk = memory.len().min(1 << 30);
        // Registered once more, to be read: the region that is written may not let anybody read it.
        let (mut chunks, _) = GpuRegistration::new(pd)
            .path(region.path())
            .register_chunks(memory, chunk, RemoteRead)?;
        let Some(buffer) = chunks.next() else {
            return Err(Error::TooLong { len: memory.len() });
        };
        let cq = pd.context().completion_queue(2)?;
        let prepared = pd
            .queue_pair(&cq)
            .send_depth(1)
            .recv_depth(1)
            .rd_atomic(1)
            .allow_remote_read()
            .rc()?;
        let here = prepared.endpoint();
        let qp = prepared.connect(&here)?;
        let into = pd.register(vec![0u8; 1], Local)?;
        let whole = buffer.remote();
        let from = whole.slice(0, 1).unwrap_or(whole);
        Ok(Self {
            qp,
            cq,
            into: Some(into),
            from,
            _region: buffer,
        })
    }

    fn flush(&mut self) -> Result<(), Error> {
        let Some(into) = self.into.take() else {
            return Err(Error::FlushFailed("an earlier one has failed".to_owned()));
        };
        self.qp.post(|batch| {
            batch.read(into, self.from).signalled();
        })?;
        loop {
            if let Some(mut done) = self.cq.poll()?.next() {
                done.result()
                    .map_err(|failure| Error::FlushFailed(failure.to_string()))?;
                self.into = done.take::<Local>();
                return Ok(());
            }
            std::hint::spin_loop();
        }
    }
}

impl fmt::Debug for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arrivals")
            .field("region", &self.region)
            .field("flushes", &self.flushes())
            .finish_non_exhaustive()
    }
}
