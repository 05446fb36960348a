//! A rank: its GPU, its heap, and the kernels that put.

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use doorbell_cuda::{Argument, Context, Driver, HostMemory, KernelFile, Launch, Memory as _, Module, Span, Stream};
use doorbell_gpudirect::heap::{Secret, SymmetricHeap, SymmetricRange, TcpExchange};
use doorbell_gpudirect::proxy::KernelQueue;
use doorbell_tests::gpu::ranks::soft_device;

use crate::{Options, bench, check};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeapLocation {
    Host,
    Gpu,
}

/// A rank's GPU: stream, kernels, and their result words.
pub(crate) struct Gpu {
    pub(crate) context: Context,
    pub(crate) stream: Stream,
    module: Module,
    results: HostMemory,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Results {
    pub(crate) failures: u64,
    pub(crate) wrong: u64,
    pub(crate) right: u64,
}

pub(crate) fn run(options: &Options, rank: u32, address: SocketAddr) -> Result<bool> {
    let driver = Driver::load()?;
    let gpu = Gpu::new(driver, rank as usize)?;
    let device = soft_device()?;
    let secret = Secret::from_env(&["gpu-puts", &address.to_string()])?;
    let mut exchange = if rank == 0 {
        TcpExchange::host(TcpListener::bind(address)?, secret, options.ranks, TIMEOUT)?
    } else {
        TcpExchange::join(address, secret, rank, options.ranks, TIMEOUT)?
    };
    if rank == 0 {
        let name = gpu.context.device().name()?;
        println!("{} ranks, {} GPUs, {name}", options.ranks, driver.device_count());
    }
    for location in [HeapLocation::Host, HeapLocation::Gpu] {
        let bytes = if options.quick { 4 << 20 } else { 160 << 20 };
        let builder = SymmetricHeap::builder(&device).bytes(bytes);
        let builder = match location {
            HeapLocation::Host => builder.pinned(&gpu.context),
            HeapLocation::Gpu => builder.gpu(&gpu.context),
        };
        let mut heap = builder
            .connect(&mut exchange)
            .with_context(|| format!("a heap in {location:?}"))?;
        if options.check {
            check::run(options, location, &gpu, &mut heap)?;
        }
        if options.bench {
            bench::run(options, location, &gpu, &mut heap)?;
        }
        heap.barrier(TIMEOUT)?;
    }
    if rank == 0 && options.bench {
        bench::posts(options, &gpu, &device)?;
    }
    Ok(true)
}

impl Gpu {
    fn new(driver: Driver, rank: usize) -> Result<Self> {
        let context = driver.device(rank % driver.device_count())?.context()?;
        let module = Module::from_ptx(&context, KernelFile::Put.ptx())?;
        // Load all kernels before any of them waits for another rank.
        for name in ["put_fill", "put_check", "put_get", "put_pingpong", "put_many"] {
            module.kernel(name)?.load()?;
        }
        Ok(Self {
            stream: Stream::new(&context)?,
            module,
            results: HostMemory::alloc(&context, 24)?,
            context,
        })
    }

    /// Launches a kernel of `put.cu` with these arguments between the queue and the results.
    pub(crate) fn launch(
        &self,
        (name, blocks, threads): (&str, u32, u32),
        (heap, queue): (&SymmetricHeap, &KernelQueue),
        arguments: &[&dyn Argument],
    ) -> Result<()> {
        let (queued, results) = (queue.device(), self.results.device_ptr());
        let mut all: Vec<&dyn Argument> = vec![&queued];
        all.extend_from_slice(arguments);
        all.push(&results);
        let uses: Vec<Span<'_>> = heap.uses().chain(queue.uses()).chain([self.results.all()]).collect();
        let kernel = self.module.kernel(name)?;
        // SAFETY: the callers pass the arguments of put.cu; all memory is listed as used.
        unsafe { kernel.launch(&self.stream, Launch::linear(blocks, threads), &all, &uses) }?;
        Ok(())
    }

    /// The counts since the last call, after synchronizing.
    pub(crate) fn results(&self, queue: &KernelQueue) -> Result<Results> {
        self.stream.synchronize()?;
        let take = |at| -> Result<u64> { Ok(self.results.atomic_u64(at)?.swap(0, Ordering::SeqCst)) };
        let results = Results {
            failures: take(0)?,
            wrong: take(8)?,
            right: take(16)?,
        };
        ensure!(
            results.failures == 0 && results.wrong == 0,
            "{results:?}, {:?}",
            queue.failure()
        );
        Ok(results)
    }

    pub(crate) fn write(&self, heap: &SymmetricHeap, range: SymmetricRange, bytes: &[u8]) -> Result<()> {
        let staged = HostMemory::alloc(&self.context, bytes.len())?;
        staged.copy_in(0, bytes)?;
        let into = heap.span(range).context("a heap that the GPU reaches")?;
        self.stream.copy(into, staged.all())?;
        Ok(self.stream.synchronize()?)
    }

    pub(crate) fn read(&self, heap: &SymmetricHeap, range: SymmetricRange) -> Result<Vec<u8>> {
        let staged = HostMemory::alloc(&self.context, range.len() as usize)?;
        let from = heap.span(range).context("a heap that the GPU reaches")?;
        self.stream.copy(staged.all(), from)?;
        self.stream.synchronize()?;
        let mut bytes = vec![0; range.len() as usize];
        staged.copy_out(0, &mut bytes)?;
        Ok(bytes)
    }
}
