//! Measures dispatch and combine at DeepSeek-V3's shapes (hidden 7168, top-8 of 256 experts):
//! batches of 128 tokens of each rank in the low-latency mode, of 4096 in the high-throughput mode.
//! Beside them are, of the same bytes to the same ranks: copies into the peers' memory (a bare
//! put), all-to-all into registered memory, and all-to-all-v.
//!
//! Each time is the median of samples of several operations between two events of a stream, of the
//! slowest rank; dispatch and combine are captured in a graph. Bytes per second are those that a
//! rank sends to all ranks, itself included.

use std::sync::{Barrier, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use doorbell_collectives::gpu::{GpuCommunicator, GpuExpertParallel, GpuRouting, as_bytes};
use doorbell_collectives::moe::{Mode, Payload, Shape};
use doorbell_collectives::{DataType, Rank};
use doorbell_cuda::{DeviceMemory, Event, HostMemory, Memory as _, OwnedSpan, Stream};
use doorbell_tests::gpu::Random;

use crate::Options;
use crate::rig::{copy_in, options_of};

const SAMPLES: usize = 7;
/// Operations of a graph, which is launched once for a sample.
const CAPTURED: u32 = 10;

/// What the ranks exchange.
#[derive(Default)]
pub(crate) struct Shared {
    times: Mutex<Vec<Vec<f64>>>,
    memories: Mutex<Vec<(Rank, OwnedSpan)>>,
}

/// What each rank measures with.
struct Meter<'a> {
    gpu: &'a GpuCommunicator,
    barrier: &'a Barrier,
    shared: &'a Shared,
    stream: Stream,
    events: (Event, Event),
}

#[derive(Clone, Copy)]
struct Batch {
    mode: Mode,
    payload: Payload,
    tokens: u32,
}

/// A rank's tokens and routing, and memory for what returns.
struct Memories {
    input: DeviceMemory,
    indices: DeviceMemory,
    weights: DeviceMemory,
    outputs: DeviceMemory,
    combined: DeviceMemory,
    /// Pairs for each rank.
    pairs: Vec<usize>,
}

pub(crate) fn run(gpu: &GpuCommunicator, options: &Options, barrier: &Barrier, shared: &Shared) -> Result<()> {
    let context = gpu.context();
    let meter = Meter {
        gpu,
        barrier,
        shared,
        stream: Stream::new(context)?,
        events: (Event::timed(context)?, Event::timed(context)?),
    };
    meter.say(|| {
        println!(
            "{:<16} {:<5} {:>6} {:<34} {:>9} {:>8} {:>12}",
            "mode", "type", "tokens", "operation", "us", "GB/s", "tokens/s"
        );
    });
    let (few, many, hidden) = if options.quick {
        (16, 64, 256)
    } else {
        (128, 4096, 7168)
    };
    for (mode, tokens) in [(Mode::LowLatency, few), (Mode::HighThroughput, many)] {
        for payload in [Payload::Bf16, Payload::Fp8] {
            let shape = Shape::new(gpu.size(), options.experts, 8, hidden, tokens)?;
            meter.batch(&shape, Batch { mode, payload, tokens })?;
        }
    }
    Ok(())
}

impl Meter<'_> {
    fn say(&self, print: impl FnOnce()) {
        if self.gpu.rank() == Rank(0) {
            print();
        }
    }

    fn batch(&self, shape: &Shape, batch: Batch) -> Result<()> {
        let memories = self.memories(shape, batch)?;
        let row_bytes = batch.payload.row_bytes(shape.hidden());
        let bytes: usize = memories.pairs.iter().sum::<usize>() * row_bytes;
        let put = self.put(&memories, row_bytes)?;
        self.row(batch, "put (copies to peers)", put, bytes);
        let even = self.all_to_all(bytes / shape.ranks() as usize)?;
        self.row(batch, "all-to-all, registered, even parts", even, bytes);
        let uneven = self.all_to_all_v(&memories, row_bytes)?;
        self.row(batch, "all-to-all-v", uneven, bytes);
        let mut layer = self
            .gpu
            .expert_parallel(options_of(*shape, (batch.mode, batch.payload)))?;
        let dispatch = self.layer(&mut layer, &memories, batch, false)?;
        self.row(batch, "dispatch", dispatch, bytes);
        let both = self.layer(&mut layer, &memories, batch, true)?;
        let returned = bytes / row_bytes * Payload::Bf16.row_bytes(shape.hidden());
        self.row(batch, "dispatch and combine", both, bytes + returned);
        self.say(|| {
            println!(
                "{:<16} {:<5} {:>6} dispatch / put {:.2}, dispatch / all-to-all-v {:.2}",
                batch.mode,
                batch.payload,
                batch.tokens,
                dispatch / put,
                dispatch / uneven
            );
        });
        Ok(())
    }

    fn row(&self, batch: Batch, name: &str, seconds: f64, bytes: usize) {
        let tokens = f64::from(batch.tokens * self.gpu.size()) / seconds;
        self.say(|| {
            println!(
                "{:<16} {:<5} {:>6} {name:<34} {:>9.1} {:>8.1} {tokens:>12.0}",
                batch.mode,
                batch.payload,
                batch.tokens,
                seconds * 1e6,
                bytes as f64 / seconds / 1e9
            );
        });
    }

    /// Random different experts for each token.
    fn memories(&self, shape: &Shape, batch: Batch) -> Result<Memories> {
        let (context, stream) = (self.gpu.context(), &self.stream);
        let mut random = Random::new(u64::from(self.gpu.rank().0) << 8 | 1);
        let mut indices: Vec<i64> = Vec::with_capacity(shape.max_pairs());
        let mut pairs = vec![0; shape.ranks() as usize];
        for token in 0..batch.tokens as usize {
            while indices.len() < (token + 1) * shape.top_k() as usize {
                let expert = random.below(shape.experts() as usize);
                if !indices[token * shape.top_k() as usize..].contains(&(expert as i64)) {
                    indices.push(expert as i64);
                    pairs[shape.rank_of(expert as u32).index()] += 1;
                }
            }
        }
        let token_bytes = Payload::Bf16.row_bytes(shape.hidden());
        let rows = shape.ranks() as usize * shape.max_pairs_for_rank();
        let memories = Memories {
            // As long as all pairs: what all-to-all sends begins there.
            input: DeviceMemory::alloc(context, shape.max_pairs() * token_bytes)?,
            indices: DeviceMemory::alloc(context, indices.len() * 8)?,
            weights: DeviceMemory::alloc(context, indices.len() * 4)?,
            outputs: DeviceMemory::alloc(context, rows * token_bytes)?,
            combined: DeviceMemory::alloc(context, batch.tokens as usize * token_bytes)?,
            pairs,
        };
        // Elements of 0x3c3c: 0.0115.
        stream.fill(memories.input.all(), 0x3c)?;
        stream.fill(memories.outputs.all(), 0x3c)?;
        let host = HostMemory::alloc(context, indices.len() * 8)?;
        let weights = vec![0.125_f32; indices.len()];
        copy_in(stream, &host, memories.indices.all(), as_bytes(&indices));
        copy_in(stream, &host, memories.weights.all(), as_bytes(&weights));
        Ok(memories)
    }

    /// Seconds of an operation, of which `work` enqueues `CAPTURED`.
    fn time(&self, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
        let mut samples = Vec::new();
        // What others allocate may wait for work of the device, which would wait for them.
        self.barrier.wait();
        for sample in 0..SAMPLES + 1 {
            self.gpu.barrier(&self.stream)?;
            self.stream.record(&self.events.0)?;
            work()?;
            self.stream.record(&self.events.1)?;
            self.events.1.synchronize()?;
            self.gpu.check()?;
            // The first warms up.
            if sample > 0 {
                samples.push(self.events.1.since(&self.events.0)?.as_secs_f64() / f64::from(CAPTURED));
            }
        }
        self.slowest(samples)
    }

    /// The median of the samples, each the slowest rank's.
    fn slowest(&self, samples: Vec<f64>) -> Result<f64> {
        let times = || self.shared.times.lock().unwrap_or_else(PoisonError::into_inner);
        self.barrier.wait();
        times().push(samples);
        self.barrier.wait();
        let mut slowest: Vec<f64> = {
            let all = times();
            (0..SAMPLES)
                .map(|sample| all.iter().map(|samples| samples[sample]).fold(0.0, f64::max))
                .collect()
        };
        if self.barrier.wait().is_leader() {
            times().clear();
        }
        self.barrier.wait();
        slowest.sort_by(f64::total_cmp);
        slowest.get(SAMPLES / 2).copied().context("no samples")
    }

    fn layer(
        &self,
        layer: &mut GpuExpertParallel<'_>,
        memories: &Memories,
        batch: Batch,
        combines: bool,
    ) -> Result<f64> {
        let stream = &self.stream;
        let graph = self.gpu.capture(stream, || {
            for _ in 0..CAPTURED {
                let routing = GpuRouting {
                    indices: memories.indices.all(),
                    index: DataType::I64,
                    weights: memories.weights.all(),
                };
                let input = memories.input.all();
                let dispatch = layer.dispatch_send(input, batch.tokens as usize, routing, stream)?;
                let received = dispatch.receive(stream)?;
                if combines {
                    received
                        .combine_send(memories.outputs.all(), stream)?
                        .receive(memories.combined.all(), stream)?;
                }
            }
            Ok(())
        })?;
        let exec = graph.instantiate()?;
        exec.upload(stream)?;
        self.time(|| Ok(exec.launch(stream)?))
    }

    /// Copies to each rank, into memory that it has for this one.
    fn put(&self, memories: &Memories, row_bytes: usize) -> Result<f64> {
        let (context, ranks) = (self.gpu.context(), memories.pairs.len());
        let driver = context.driver();
        let room = memories.input.len();
        let own = DeviceMemory::options(context)
            .peers(&driver.devices()?)
            .alloc(room * ranks)?;
        let all = || self.shared.memories.lock().unwrap_or_else(PoisonError::into_inner);
        all().push((self.gpu.rank(), own.all().keep()));
        self.barrier.wait();
        let mut peers = all()
            .iter()
            .map(|(rank, memory)| (*rank, memory.clone()))
            .collect::<Vec<_>>();
        peers.sort_by_key(|(rank, _)| (rank.0 + ranks as u32 - self.gpu.rank().0) % ranks as u32);
        let mut copies = Vec::new();
        for (rank, memory) in &peers {
            let bytes = memories.pairs[rank.index()] * row_bytes;
            let start = self.gpu.rank().index() * room;
            copies.push((memory.span(start..start + bytes)?, memories.input.span(..bytes)?));
        }
        let seconds = self.time(|| {
            for _ in 0..CAPTURED {
                self.stream.copy_batch(&copies)?;
            }
            Ok(())
        })?;
        if self.barrier.wait().is_leader() {
            all().clear();
        }
        self.barrier.wait();
        Ok(seconds)
    }

    fn all_to_all(&self, bytes: usize) -> Result<f64> {
        let (context, ranks) = (self.gpu.context(), self.gpu.size() as usize);
        // The same on all ranks.
        let part = bytes / 4096 * 4096;
        let memory = DeviceMemory::alloc(context, 2 * part * ranks)?;
        let (input, output) = (memory.span(..part * ranks)?, memory.span(part * ranks..)?);
        self.gpu.register(&memory)?;
        let seconds = self.time(|| {
            for _ in 0..CAPTURED {
                self.gpu.all_to_all(input, output, part, DataType::U8, &self.stream)?;
            }
            Ok(())
        })?;
        self.gpu.deregister(&memory);
        Ok(seconds)
    }

    fn all_to_all_v(&self, memories: &Memories, row_bytes: usize) -> Result<f64> {
        let send: Vec<usize> = memories.pairs.iter().map(|pairs| pairs * row_bytes).collect();
        let receive = self.lengths(&send)?;
        let output = DeviceMemory::alloc(self.gpu.context(), receive.iter().sum::<usize>().max(1))?;
        self.time(|| {
            for _ in 0..CAPTURED {
                let input = (memories.input.all(), &send[..]);
                self.gpu
                    .all_to_all_v(input, (output.all(), &receive), DataType::U8, &self.stream)?;
            }
            Ok(())
        })
    }

    /// What each rank sends to this one.
    fn lengths(&self, send: &[usize]) -> Result<Vec<usize>> {
        let own: Vec<u64> = send.iter().map(|bytes| *bytes as u64).collect();
        let mut received = vec![0_u64; own.len()];
        self.gpu.host().all_to_all(&own[..], &mut received[..]).wait()?;
        Ok(received.into_iter().map(|bytes| bytes as usize).collect())
    }
}
