//! Ordering of GPUDirect RDMA writes: making an adapter's writes visible to a GPU.
//!
//! Some GPUs show a completion's bytes to all kernels launched after it; others need a *flush*
//! first, by the driver or by an RDMA READ of the same memory, which pushes earlier writes out of
//! the PCIe bridges. Bytes copied by the GPU itself, or through a staging buffer, need none.

use core::fmt;
use core::ops::RangeBounds;

use doorbell_cuda::{Stream, WritesOrdering};
use doorbell_verbs::{
    Buffer, CompletionQueue, Local, Opaque, PeerRead, ProtectionDomain, QueuePair, ReadAccess, Remote,
};

use crate::error::Error;
use crate::path::Path;
use crate::region::GpuRegion;
use crate::register::GpuRegistration;

/// The observers of arrived data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The GPU that owns the memory.
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

/// How an adapter's writes become visible to a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flush {
    /// Already visible: the GPU, or another that copied for it, wrote them before the completion.
    Copied,
    /// Already visible: `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING` (118) promises it.
    InOrder,
    /// By `cuFlushGPUDirectRDMAWrites`.
    Driver,
    /// By an RDMA READ of a byte of the memory, over a loopback queue pair.
    Read,
}

impl Flush {
    /// The flush that a registered region needs.
    pub fn needed(region: &GpuRegion, scope: Scope) -> Result<Self, doorbell_cuda::Error> {
        match region.path() {
            Path::DeviceCopy | Path::Staged => Ok(Self::Copied),
            Path::DmaBuf | Path::Peermem => Self::of(region.memory().context().device(), scope),
        }
    }

    /// The flush that a GPU needs for writes of an adapter over the bus.
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

/// Makes data that arrived in a region visible to a GPU, flushing if necessary.
pub struct Arrivals {
    region: GpuRegion,
    scope: Scope,
    by: FlushMethod,
}

enum FlushMethod {
    Nothing,
    Driver,
    Read(Box<FlushReader>),
}

struct FlushReader {
    qp: QueuePair,
    cq: CompletionQueue,
    into: Option<Buffer<Local>>,
    from: Remote<ReadAccess>,
    _region: Buffer<Opaque<PeerRead>>,
}

impl Arrivals {
    /// For the observers `scope` of the memory of `region`, registered in `pd`.
    pub fn new(pd: &ProtectionDomain, region: &GpuRegion, scope: Scope) -> Result<Self, Error> {
        let flush = Flush::needed(region, scope)?;
        Self::by(pd, region, scope, flush)
    }

    /// With this flush, needed or not, for measurement.
    pub fn by(pd: &ProtectionDomain, region: &GpuRegion, scope: Scope, flush: Flush) -> Result<Self, Error> {
        let by = match flush {
            Flush::Copied | Flush::InOrder => FlushMethod::Nothing,
            Flush::Driver => FlushMethod::Driver,
            Flush::Read => FlushMethod::Read(Box::new(FlushReader::new(pd, region)?)),
        };
        Ok(Self {
            region: region.clone(),
            scope,
            by,
        })
    }

    /// Whether publishing flushes.
    #[must_use]
    pub fn needs_flush(&self) -> bool {
        !matches!(self.by, FlushMethod::Nothing)
    }

    /// Makes data in `range`, whose completions have been polled, visible to later work of
    /// `stream`: waits for a flush, or enqueues the copy from a staging buffer.
    ///
    /// # Errors
    /// Errors of the CUDA driver, or of the device for a READ.
    pub fn publish(&mut self, range: impl RangeBounds<usize>, stream: &Stream) -> Result<(), Error> {
        match &mut self.by {
            FlushMethod::Nothing => {}
            FlushMethod::Driver => {
                let context = self.region.memory().context();
                context.flush_gpu_direct_rdma_writes(self.scope.ordering())?;
            }
            FlushMethod::Read(reader) => reader.flush()?,
        }
        if !self.region.path().is_direct() {
            // Stream order suffices; callers that need to wait call `pull` themselves.
            drop(self.region.pull(range, stream)?);
        }
        Ok(())
    }
}

impl FlushReader {
    fn new(pd: &ProtectionDomain, region: &GpuRegion) -> Result<Self, Error> {
        let memory = region.memory();
        let chunk = memory.len().min(1 << 30);
        // Registered again for reading: the region may not grant remote reads.
        let (mut chunks, _) = GpuRegistration::new(pd)
            .path(region.path())
            .register_chunks(memory, chunk, PeerRead)?;
        let Some(buffer) = chunks.next() else {
            return Err(Error::TooLong { len: memory.len() });
        };
        let cq = pd.context().completion_queue(2).map_err(Error::CompletionQueue)?;
        let prepared = pd
            .queue_pair(&cq)
            .max_send_wr(1)
            .max_recv_wr(1)
            .max_rd_atomic(1)
            .allow_remote_read()
            .rc()
            .map_err(Error::QueuePair)?;
        let here = prepared.endpoint();
        let qp = prepared.connect(&here).map_err(Error::QueuePair)?;
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
        let posted = self.qp.post(|batch| {
            batch.read(into, self.from).signaled();
        });
        posted.map_err(Error::FlushRefused)?;
        loop {
            if let Some(mut done) = self.cq.poll().map_err(Error::CompletionQueue)?.next() {
                done.result()
                    .map_err(|failure| Error::FlushFailed(failure.to_string()))?;
                self.into = done.take::<Local>();
                return Ok(());
            }
            std::hint::spin_loop();
        }
    }
}

debug_fields!(Arrivals, self, region = self.region, flushes = self.needs_flush());
