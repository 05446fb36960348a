//! Ranks as threads of this process, each with a GPU of the stand-in, and memory of it.

use doorbell_collectives::gpu::{GpuCommunicator, GpuOptions, Sizes, as_bytes, as_bytes_mut};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::{Case, Number, given};
use doorbell_collectives::{Options, Rank};
use doorbell_cuda::{Context, DeviceMemory, Driver, HostMemory, Memory, Span, Stream};

use crate::world;

/// The GPU of a rank.
pub(crate) fn gpu(driver: Driver, rank: Rank) -> Context {
    driver
        .device(rank.index() % driver.device_count())
        .unwrap()
        .context()
        .unwrap()
}

/// Little memory, so that operations are cut.
pub(crate) fn small() -> GpuOptions {
    GpuOptions {
        sizes: Some(Sizes {
            flags: 4096,
            slots: 4096,
            fifos: 4096,
            staging: 1 << 20,
        }),
        slice: Some(64 << 10),
        ..GpuOptions::default()
    }
}

/// Runs `rank` as each of so many ranks with GPUs, each in a thread of its own, and gives what they returned.
pub(crate) fn ranks<R: Send>(
    driver: Driver,
    ranks: u32,
    options: &GpuOptions,
    rank: impl Fn(GpuCommunicator) -> R + Sync,
) -> Vec<R> {
    ranks_with(driver, ranks, &world::options(), options, rank)
}

/// The same, with options of the communicator.
pub(crate) fn ranks_with<R: Send>(
    driver: Driver,
    ranks: u32,
    host: &Options,
    options: &GpuOptions,
    rank: impl Fn(GpuCommunicator) -> R + Sync,
) -> Vec<R> {
    world::ranks(ranks, host, |comm| {
        let context = gpu(driver, comm.rank());
        rank(GpuCommunicator::new(comm, &context, options.clone()).unwrap())
    })
}

/// Input and output of a rank, in device memory: in place, one of them.
pub(crate) struct Buffers {
    pub(crate) memory: DeviceMemory,
    /// Where input and output are in it, in bytes.
    places: [(usize, usize); 2],
    unit: usize,
}

impl Buffers {
    pub(crate) fn new<T: Number>(context: &Context, case: &Case, rank: Rank, in_place: bool) -> Self {
        let unit = T::TYPE.bytes();
        let bytes = |elements: u64| elements as usize * unit;
        let (gives, gets, own) = (
            bytes(case.input(rank)),
            bytes(case.output(rank)),
            rank.index() * bytes(case.count),
        );
        let is_root = rank == case.root;
        let places = match case.collective {
            _ if !in_place => [(gives.max(gets), gives), (0, gets)],
            Collective::AllGather => [(own, gives), (0, gets)],
            Collective::Gather if is_root => [(own, gives), (0, gets)],
            Collective::ReduceScatter => [(0, gives), (own, gets)],
            Collective::Scatter if is_root => [(0, gives), (own, gets)],
            _ => [(0, gives), (0, gets)],
        };
        // As long on all ranks, so that it can be registered.
        let all = bytes(case.count) * 2 * case.ranks as usize;
        Self {
            memory: DeviceMemory::alloc(context, all.max(8)).unwrap(),
            places,
            unit,
        }
    }

    fn place(&self, at: usize) -> Option<Span<'_>> {
        let (start, len) = self.places[at];
        (len > 0).then(|| self.memory.span(start..start + len).unwrap())
    }

    pub(crate) fn input(&self) -> Option<Span<'_>> {
        self.place(0)
    }

    pub(crate) fn output(&self) -> Option<Span<'_>> {
        self.place(1)
    }

    /// Puts what the rank gives into the stream, and spoils the rest.
    pub(crate) fn fill<T: Number>(&self, rank: Rank, seed: u64, stream: &Stream) {
        stream.fill(self.memory.all(), 0x5a).unwrap();
        let Some(span) = self.input() else { return };
        let elements = span.len() / self.unit;
        let values: Vec<T> = (0..elements as u64).map(|index| given(seed, rank, index)).collect();
        let bytes = as_bytes(&values);
        let host = HostMemory::alloc(stream.context(), bytes.len()).unwrap();
        host.copy_in(0, bytes).unwrap();
        stream.copy(span, host.all()).unwrap();
    }

    /// What is in the output, when all that is in the stream is done.
    pub(crate) fn read<T: Number>(&self, stream: &Stream) -> Vec<T> {
        let Some(span) = self.output() else {
            stream.synchronize().unwrap();
            return Vec::new();
        };
        let host = HostMemory::alloc(stream.context(), span.len()).unwrap();
        stream.copy(host.all(), span).unwrap();
        stream.synchronize().unwrap();
        let mut values = vec![T::ZERO; span.len() / self.unit];
        host.copy_out(0, as_bytes_mut(&mut values)).unwrap();
        values
    }
}
