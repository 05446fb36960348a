//! A rank's tokens and routing on a GPU, its experts, and the comparison with the plain reference.

use doorbell_collectives::gpu::{GpuExpertParallel, GpuRouting, as_bytes, as_bytes_mut};
use doorbell_collectives::kernel::bf16;
use doorbell_collectives::moe::{Mode, MoeOptions, Payload, ReceivedRows, Routing, Shape, dequantise, reference};
use doorbell_collectives::{DataType, Rank};
use doorbell_cuda::{Context, DeviceMemory, HostMemory, Memory as _, Span, Stream};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % bound as u64) as usize
    }
}

/// One rank's tokens, and the indices and weights of its routing.
#[derive(Clone)]
pub(crate) struct Batch {
    pub(crate) tokens: Vec<bf16>,
    pub(crate) indices: Vec<i64>,
    pub(crate) weights: Vec<f32>,
}

impl Batch {
    /// Every rank makes those of all. The last rank has none, one has the most; of the skewed ones
    /// half of all choices are expert 1.
    pub(crate) fn all(shape: &Shape, seed: u64) -> Vec<Self> {
        let of = |rank: u32| {
            let mut random = Random(seed << 8 | u64::from(rank));
            let tokens = match rank {
                0 => shape.max_tokens() as usize,
                rank if rank + 1 == shape.ranks() => 0,
                _ => random.below(shape.max_tokens() as usize + 1),
            };
            let mut batch = Self {
                tokens: (0..tokens * shape.hidden() as usize)
                    .map(|_| bf16::from_f32((random.below(4001) as f32 - 2000.0) / 64.0))
                    .collect(),
                indices: Vec::new(),
                weights: Vec::new(),
            };
            for _ in 0..tokens {
                batch.choose(shape, &mut random, seed % 2 == 1);
            }
            batch
        };
        (0..shape.ranks()).map(of).collect()
    }

    fn choose(&mut self, shape: &Shape, random: &mut Random, skewed: bool) {
        let mut chosen = Vec::new();
        for k in 0..shape.top_k() {
            let mut expert = match skewed && k == 0 && random.below(2) == 0 {
                true => 1 % shape.experts() as i64,
                false => random.below(shape.experts() as usize) as i64,
            };
            if random.below(5) == 0 || chosen.contains(&expert) {
                expert = -1;
            }
            chosen.push(expert);
            self.weights.push(random.below(1000) as f32 / 999.0 - 0.25);
        }
        self.indices.extend(chosen);
    }

    pub(crate) fn routing(&self, shape: &Shape) -> Routing {
        Routing::new(shape, &self.indices, &self.weights).unwrap()
    }
}

/// A batch in device memory.
pub(crate) struct OnGpu {
    pub(crate) input: DeviceMemory,
    indices: DeviceMemory,
    weights: DeviceMemory,
    pub(crate) output: DeviceMemory,
    /// For the outputs of the local experts.
    outputs: DeviceMemory,
    /// For all copies: an allocation waits for work of the device, which may wait for this rank.
    host: HostMemory,
    index: DataType,
    pub(crate) tokens: usize,
}

impl OnGpu {
    pub(crate) fn new(shape: &Shape, context: &Context, index: DataType) -> Self {
        let (tokens, pairs) = (
            shape.max_tokens() as usize * shape.hidden() as usize * 2,
            shape.max_pairs(),
        );
        let rows = shape.ranks() as usize * shape.max_pairs_for_rank() * shape.hidden() as usize * 2;
        let alloc = |bytes| DeviceMemory::alloc(context, bytes).unwrap();
        Self {
            outputs: alloc(rows),
            host: HostMemory::alloc(context, rows.max(tokens).max(pairs * 8)).unwrap(),
            input: alloc(tokens),
            indices: alloc(pairs * index.bytes()),
            weights: alloc(pairs * 4),
            output: alloc(tokens),
            index,
            tokens: 0,
        }
    }

    pub(crate) fn set(&mut self, stream: &Stream, batch: &Batch, shape: &Shape) {
        self.tokens = batch.tokens.len() / shape.hidden() as usize;
        copy_in(stream, &self.host, self.input.all(), as_bytes(&batch.tokens));
        copy_in(stream, &self.host, self.weights.all(), as_bytes(&batch.weights));
        match self.index {
            DataType::I64 => copy_in(stream, &self.host, self.indices.all(), as_bytes(&batch.indices)),
            _ => {
                let narrow: Vec<i32> = batch.indices.iter().map(|index| *index as i32).collect();
                copy_in(stream, &self.host, self.indices.all(), as_bytes(&narrow));
            }
        }
    }

    pub(crate) fn read(&self, stream: &Stream, from: Span<'_>) -> Vec<u8> {
        if !from.is_empty() {
            stream.copy(self.host.span(..from.len()).unwrap(), from).unwrap();
        }
        stream.synchronize().unwrap();
        let mut bytes = vec![0; from.len()];
        self.host.copy_out(0, &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn routing(&self) -> GpuRouting<'_> {
        GpuRouting {
            indices: self.indices.all(),
            index: self.index,
            weights: self.weights.all(),
        }
    }
}

pub(crate) fn copy_in(stream: &Stream, host: &HostMemory, into: Span<'_>, bytes: &[u8]) {
    if bytes.is_empty() {
        return;
    }
    host.copy_in(0, bytes).unwrap();
    stream
        .copy(into.span(..bytes.len()).unwrap(), host.span(..bytes.len()).unwrap())
        .unwrap();
    stream.synchronize().unwrap();
}

/// What an expert makes of a row: it depends on both.
fn apply(expert: u32, row: &[f32]) -> Vec<bf16> {
    let factor = 1.0 + expert as f32 / 8.0;
    row.iter().map(|element| bf16::from_f32(element * factor)).collect()
}

/// The experts, on the host: compares the rows with the reference, and returns the outputs.
pub(crate) fn compute(
    shape: &Shape,
    (mode, payload): (Mode, Payload),
    rank: Rank,
    batches: &[Batch],
    received: &Received,
) -> Vec<u8> {
    let routings: Vec<_> = batches.iter().map(|batch| batch.routing(shape)).collect();
    let tokens: Vec<_> = batches.iter().map(|batch| batch.tokens.clone()).collect();
    let wanted = reference::dispatch(shape, payload, &tokens, &routings);
    let row_bytes = payload.row_bytes(shape.hidden());
    let mut outputs = vec![0xff; received.bytes.len() / row_bytes * shape.hidden() as usize * 2];
    let first = shape.first_expert(rank);
    let mut compared = 0;
    for local in 0..shape.local_experts() {
        let expert = first + local;
        let mut rows = wanted[expert as usize].iter();
        for source in (0..shape.ranks()).map(Rank) {
            for place in received.rows.range(local, source) {
                let row = rows.next().expect("no more rows than the reference has");
                assert_eq!(row.source, source, "{mode} {payload}: {expert}");
                let bytes = &received.bytes[place * row_bytes..][..row_bytes];
                assert!(
                    bytes == row.bytes,
                    "{mode} {payload}: rank {rank}, expert {expert}, row {place}"
                );
                let output = apply(expert, &dequantise(payload, shape.hidden(), bytes));
                let bytes = as_bytes(&output);
                outputs[place * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
                compared += 1;
            }
        }
        assert!(
            rows.next().is_none(),
            "{mode} {payload}: expert {expert} has too few rows"
        );
    }
    assert_eq!(compared, received.rows.len());
    outputs
}

pub(crate) struct Received {
    pub(crate) rows: ReceivedRows,
    pub(crate) bytes: Vec<u8>,
}

fn wanted(shape: &Shape, payload: Payload, batch: &Batch) -> Vec<bf16> {
    let hidden = shape.hidden() as usize;
    reference::combine(&batch.routing(shape), |expert, pair| {
        let token = pair as usize / shape.top_k() as usize;
        let mut row = vec![0; payload.row_bytes(shape.hidden())];
        reference::write_row(payload, &batch.tokens[token * hidden..][..hidden], &mut row);
        apply(expert, &dequantise(payload, shape.hidden(), &row))
    })
}

/// A dispatch and a combine in a stream, checked.
pub(crate) fn once(
    layer: &mut GpuExpertParallel<'_>,
    stream: &Stream,
    gpu: &mut OnGpu,
    how: (Mode, Payload),
    seed: u64,
    rank: Rank,
) {
    let shape = layer.options().shape;
    let batches = Batch::all(&shape, seed);
    let batch = &batches[rank.index()];
    gpu.set(stream, batch, &shape);
    let dispatch = layer
        .dispatch_send(gpu.input.all(), gpu.tokens, gpu.routing(), stream)
        .unwrap();
    let received = dispatch.receive(stream).unwrap();
    let found = Received {
        rows: received.received_rows(stream).unwrap(),
        bytes: gpu.read(stream, received.rows().unwrap()),
    };
    let outputs = compute(&shape, how, rank, &batches, &found);
    copy_in(stream, &gpu.host, gpu.outputs.all(), &outputs);
    let combine = received.combine_send(gpu.outputs.all(), stream).unwrap();
    combine.receive(gpu.output.all(), stream).unwrap();
    let mut combined = vec![bf16::ZERO; batch.tokens.len()];
    let bytes = gpu.read(stream, gpu.output.span(..batch.tokens.len() * 2).unwrap());
    as_bytes_mut(&mut combined).copy_from_slice(&bytes);
    assert!(
        combined == wanted(&shape, how.1, batch),
        "{how:?}: rank {rank}, seed {seed}"
    );
}

pub(crate) fn options_of(shape: Shape, (mode, payload): (Mode, Payload)) -> MoeOptions {
    MoeOptions {
        shape,
        payload,
        mode,
        capacity: None,
    }
}

/// All modes and payloads.
pub(crate) const ALL: [(Mode, Payload); 4] = [
    (Mode::LowLatency, Payload::Bf16),
    (Mode::LowLatency, Payload::Fp8),
    (Mode::HighThroughput, Payload::Bf16),
    (Mode::HighThroughput, Payload::Fp8),
];
