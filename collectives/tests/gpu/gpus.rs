//! A stand-in GPU for a rank, its memory, and operations on it.

use doorbell_collectives::gpu::{GpuCall, GpuCommunicator, GpuOptions, Sizes, as_bytes, as_bytes_mut};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::{Case, Number, input_element};
use doorbell_collectives::{PreMulSum, Rank, ReduceOp};
use doorbell_cuda::{Context, DeviceMemory, Driver, HostMemory, Memory, Shareable, Span, Stream};

pub(crate) fn gpu(driver: Driver, rank: Rank) -> Context {
    driver
        .device(rank.index() % driver.device_count())
        .unwrap()
        .context()
        .unwrap()
}

/// Little memory, so that operations are sliced.
pub(crate) fn small() -> GpuOptions {
    GpuOptions {
        sizes: Some(Sizes {
            slots: 1 << 20,
            fifos: 2 << 20,
            staging: 1 << 20,
            ..Sizes::default()
        }),
        slice: Some(64 << 10),
        ..GpuOptions::default()
    }
}

#[derive(Debug)]
pub(crate) struct Buffers<M = DeviceMemory> {
    pub(crate) memory: M,
    /// Offset and length of input and output, in bytes.
    places: [(usize, usize); 2],
    unit: usize,
}

impl Buffers {
    pub(crate) fn new<T: Number>(context: &Context, case: &Case, rank: Rank, in_place: bool) -> Self {
        let memory = DeviceMemory::alloc(context, bytes::<T>(case)).unwrap();
        Self::of::<T>(memory, case, rank, in_place)
    }
}

/// Bytes of the buffers' memory: the same on all ranks, so that it can be registered.
pub(crate) fn bytes<T: Number>(case: &Case) -> usize {
    // The parts of all-to-all-v have up to half more than the count.
    ((case.count + 1) as usize * T::TYPE.bytes() * 3 * case.ranks as usize).max(8)
}

impl<M: Shareable> Buffers<M> {
    pub(crate) fn of<T: Number>(memory: M, case: &Case, rank: Rank, in_place: bool) -> Self {
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
        Self { memory, places, unit }
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

    pub(crate) fn fill<T: Number>(&self, rank: Rank, seed: u64, stream: &Stream) {
        stream.fill(self.memory.all(), 0x5a).unwrap();
        let Some(span) = self.input() else { return };
        let elements = span.len() / self.unit;
        let values: Vec<T> = (0..elements as u64)
            .map(|index| input_element(seed, rank, index))
            .collect();
        let bytes = as_bytes(&values);
        let host = HostMemory::alloc(stream.context(), bytes.len()).unwrap();
        host.copy_in(0, bytes).unwrap();
        stream.copy(span, host.all()).unwrap();
    }

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

pub(crate) fn once<T: Number>(
    gpu: &GpuCommunicator,
    stream: &Stream,
    case: &Case,
    op: ReduceOp,
    in_place: bool,
    registered: bool,
) {
    let buffers = Buffers::new::<T>(gpu.context(), case, gpu.rank(), in_place);
    once_in::<T, _>(gpu, stream, case, op, &buffers, registered);
}

pub(crate) fn once_in<T: Number, M: Shareable>(
    gpu: &GpuCommunicator,
    stream: &Stream,
    case: &Case,
    op: ReduceOp,
    buffers: &Buffers<M>,
    registered: bool,
) {
    let rank = gpu.rank();
    if registered {
        gpu.register(&buffers.memory).unwrap();
    }
    for seed in 0..2 {
        buffers.fill::<T>(rank, seed, stream);
        enqueue::<T, _>(gpu, stream, case, op, buffers);
        let output = buffers.read::<T>(stream);
        let wrong = case.count_wrong(op, rank, seed, &output);
        assert_eq!(
            wrong,
            0,
            "rank {rank}: {case:?} {op} of {}, {buffers:?}, registered: {registered}",
            T::TYPE
        );
    }
    if registered {
        gpu.deregister(&buffers.memory);
    }
}

pub(crate) fn enqueue<T: Number, M: Shareable>(
    gpu: &GpuCommunicator,
    stream: &Stream,
    case: &Case,
    op: ReduceOp,
    buffers: &Buffers<M>,
) {
    let rank = gpu.rank();
    let enqueued = match (case.collective, buffers.input(), buffers.output()) {
        (Collective::AllToAllV, Some(input), Some(output)) => {
            let counts = |part: &dyn Fn(Rank) -> u64| -> Vec<usize> {
                (0..case.ranks).map(|peer| part(Rank(peer)) as usize).collect()
            };
            let send = counts(&|to| case.part(rank, to));
            let receive = counts(&|from| case.part(from, rank));
            gpu.all_to_all_v((input, &send), (output, &receive), T::TYPE, stream)
        }
        _ => gpu.enqueue(&call::<T, _>(buffers, case, op, rank), stream),
    };
    enqueued.unwrap();
}

pub(crate) fn call<'a, T: Number, M: Shareable>(
    buffers: &'a Buffers<M>,
    case: &Case,
    op: ReduceOp,
    rank: Rank,
) -> GpuCall<'a> {
    GpuCall {
        collective: case.collective,
        root: case.root,
        data: T::TYPE,
        count: case.count as usize,
        reduction: match op {
            ReduceOp::PreMulSum => PreMulSum(T::scalar(rank)).into(),
            op => op.into(),
        },
        input: buffers.input(),
        output: buffers.output(),
    }
}
