//! Kernels that put, and their arguments.

use doorbell_cuda::{Context, Driver, HostMemory, Kernel, KernelFile, Launch, Memory as _, Module, Span, Stream};
use doorbell_gpudirect::heap::SymmetricHeap;
use doorbell_gpudirect::proxy::KernelQueue;

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

impl Gpu {
    pub(crate) fn new(driver: Driver, device: usize) -> Self {
        let context = driver
            .device(device % driver.device_count())
            .unwrap()
            .context()
            .unwrap();
        let module = Module::from_ptx(&context, KernelFile::Put.ptx()).unwrap();
        module.kernel("put_pingpong").unwrap().load().unwrap();
        Self {
            stream: Stream::new(&context).unwrap(),
            module,
            results: HostMemory::alloc(&context, 24).unwrap(),
            context,
        }
    }

    fn kernel(&self, name: &str) -> Kernel {
        self.module.kernel(name).unwrap()
    }

    fn uses<'a>(&'a self, heap: &'a SymmetricHeap, queue: &'a KernelQueue) -> Vec<Span<'a>> {
        heap.uses().chain(queue.uses()).chain([self.results.all()]).collect()
    }

    /// Launches a kernel of `put.cu` with these arguments between the queue and the results.
    pub(crate) fn launch(
        &self,
        (name, blocks, threads): (&str, u32, u32),
        (heap, queue): (&SymmetricHeap, &KernelQueue),
        arguments: &[&dyn doorbell_cuda::Argument],
    ) {
        let (queued, results) = (queue.device(), self.results.device_ptr());
        let mut all: Vec<&dyn doorbell_cuda::Argument> = vec![&queued];
        all.extend_from_slice(arguments);
        if name != "put_raw" {
            all.push(&results);
        }
        // SAFETY: the callers pass the arguments of put.cu; all memory is listed as used.
        unsafe {
            self.kernel(name).launch(
                &self.stream,
                Launch::linear(blocks, threads),
                &all,
                &self.uses(heap, queue),
            )
        }
        .unwrap();
    }

    /// The counts since the last call, after synchronizing.
    pub(crate) fn results(&self) -> Results {
        self.stream.synchronize().unwrap();
        let take = |at| {
            self.results
                .atomic_u64(at)
                .unwrap()
                .swap(0, std::sync::atomic::Ordering::SeqCst)
        };
        Results {
            failures: take(0),
            wrong: take(8),
            right: take(16),
        }
    }
}
