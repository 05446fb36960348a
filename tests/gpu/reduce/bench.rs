//! Benchmarks: reductions against the GPU's own copies, by size, type and launch configuration.
//!
//! Bytes are those read and written: a copy of n bytes moves 2n, a reduction of s sources (s + 1)n.
//! Each value is the median of samples, each of several launches between two events.

use std::fs;

use anyhow::{Context as _, Result};
use doorbell_cuda::reduce::{
    DataType, LaunchConfig, MAX_SOURCES, OperandKind, Operator, Reducer, Reduction, SourceOperand,
};
use doorbell_cuda::{Attribute, Context, DeviceMemory, Event, HostMemory, Memory as _, Stream};
use doorbell_tests::gpu::Random;
use serde_json::{Value, json};

use crate::{Options, free_bytes};

const MIB: usize = 1 << 20;
/// The memory size at which kernels are compared.
const JUDGED: usize = 256 * MIB;
/// A target, and the maximum number of sources.
const MEMORIES: usize = MAX_SOURCES + 1;
const COMMITTED: &str = "committed";
const SAMPLES: usize = 9;
/// The minimum duration of a sample in seconds.
const SAMPLE: f64 = 4e-3;

struct Kernels {
    name: String,
    reducer: Reducer,
    unroll: u32,
}

struct Bench {
    stream: Stream,
    start: Event,
    stop: Event,
    memories: Vec<DeviceMemory>,
    multiprocessors: u32,
    records: Vec<Value>,
}

#[derive(Clone, Copy)]
struct Time {
    median: f64,
    least: f64,
    most: f64,
}

pub(crate) fn run(context: &Context, options: &Options) -> Result<()> {
    let mut kernels = vec![Kernels {
        name: COMMITTED.to_owned(),
        reducer: Reducer::new(context),
        unroll: LaunchConfig::default().unroll,
    }];
    for (path, unroll) in &options.ptx {
        let ptx = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let shape = LaunchConfig {
            unroll: *unroll,
            ..LaunchConfig::default()
        };
        kernels.push(Kernels {
            name,
            reducer: Reducer::with_ptx(context, ptx, shape),
            unroll: *unroll,
        });
    }
    // Three memories for the largest reductions of two, or nine for those of eight.
    let largest = [1024 * MIB, JUDGED]
        .into_iter()
        .find(|bytes| free_bytes(context).is_ok_and(|free| free > 3 * bytes + 7 * JUDGED))
        .unwrap_or(64 * MIB);
    let sizes: &[usize] = if options.quick {
        &[256, 1024]
    } else {
        &[16, 64, 256, 1024]
    };
    let sizes: Vec<usize> = sizes
        .iter()
        .map(|size| size * MIB)
        .filter(|size| *size <= largest)
        .collect();
    let judged = JUDGED.min(largest);
    let memories = (0..MEMORIES)
        .map(|index| DeviceMemory::alloc(context, if index < 3 { largest } else { judged } + 4096))
        .collect::<Result<Vec<_>, _>>()?;
    let mut bench = Bench {
        stream: Stream::new(context)?,
        start: Event::timed(context)?,
        stop: Event::timed(context)?,
        memories,
        multiprocessors: u32::try_from(context.device().attribute(Attribute::MultiprocessorCount)?)?.max(1),
        records: Vec::new(),
    };
    bench.fill(context)?;
    bench.two_sources(&kernels, &sizes)?;
    bench.eight_sources(&kernels, judged)?;
    if !options.quick {
        bench.everything_else(&kernels[0], judged)?;
    }
    if let Some(path) = &options.json {
        let device = context.device();
        let report =
            json!({ "device": device.name()?, "multiprocessors": bench.multiprocessors, "records": bench.records });
        fs::write(path, serde_json::to_vec_pretty(&report)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

impl Bench {
    /// Random bits, as memory and links take more power to move them than to move constant bytes.
    fn fill(&self, context: &Context) -> Result<()> {
        let mut random = Random::new(6);
        let bits: Vec<u8> = (0..2 * MIB).flat_map(|_| random.bits().to_ne_bytes()).collect();
        let host = HostMemory::alloc(context, bits.len())?;
        host.copy_in(0, &bits)?;
        for (index, memory) in self.memories.iter().enumerate() {
            // Each memory starts at another offset in them, so that no two are equal.
            let mut from = index * MIB + 4096;
            let mut at = 0;
            while at < memory.len() {
                let count = (bits.len() - from).min(memory.len() - at);
                self.stream
                    .copy(memory.span(at..at + count)?, host.span(from..from + count)?)?;
                at += count;
                from = 0;
            }
        }
        Ok(self.stream.synchronize()?)
    }

    fn two_sources(&mut self, kernels: &[Kernels], sizes: &[usize]) -> Result<()> {
        println!(
            "\nsum of 2 sources beside a copy on the device, TB/s read and written (the slowest and the fastest sample)"
        );
        println!(
            "{:>8} {:>5}  {:<16} {:>7} {:>9}  {:>6}  {:>6}",
            "MiB", "type", "kernels", "threads", "blocks", "TB/s", "ratio"
        );
        for &bytes in sizes {
            let copy = self.copy(bytes)?;
            let ceiling = rate(2 * bytes, copy.median);
            println!(
                "{:>8} {:>5}  {:<16} {:>7} {:>9}  {}",
                bytes / MIB,
                "-",
                "copy",
                "-",
                "-",
                spread(2 * bytes, copy)
            );
            self.record("copy", "-", bytes, "driver", None, 2 * bytes, copy);
            for data in [DataType::F32, DataType::Bf16, DataType::F16] {
                let mut usual = 0.0;
                let mut best = (0.0, String::new());
                for these in kernels {
                    for shape in self.shapes(these.unroll) {
                        let reduction = self.reduction(data, Operator::Sum, &[1, 2], 0, bytes, shape)?;
                        let time = self.launch(these, &reduction)?;
                        let ratio = rate(3 * bytes, time.median) / ceiling;
                        let blocks = shown(shape.blocks);
                        println!(
                            "{:>8} {:>5}  {:<16} {:>7} {:>9}  {}  {ratio:>6.3}",
                            bytes / MIB,
                            data.name(),
                            these.name,
                            shape.threads,
                            blocks,
                            spread(3 * bytes, time)
                        );
                        self.record(
                            "sum of 2",
                            data.name(),
                            bytes,
                            &these.name,
                            Some(shape),
                            3 * bytes,
                            time,
                        );
                        if these.name == COMMITTED && shape == LaunchConfig::default() {
                            usual = ratio;
                        }
                        if ratio > best.0 {
                            best = (
                                ratio,
                                format!("{}, {} threads, {blocks} blocks", these.name, shape.threads),
                            );
                        }
                    }
                }
                if bytes >= JUDGED {
                    let verdict = if usual >= 0.95 { "met" } else { "NOT MET" };
                    println!(
                        "{:>8} {:>5}  as committed {usual:.3} of the copy: 0.95 {verdict}; best {:.3} ({})",
                        bytes / MIB,
                        data.name(),
                        best.0,
                        best.1
                    );
                }
            }
        }
        Ok(())
    }

    /// Eight sources in one pass and in seven.
    fn eight_sources(&mut self, kernels: &[Kernels], bytes: usize) -> Result<()> {
        println!(
            "\nsum of 8 sources of {} MiB: in one pass, and in seven of two",
            bytes / MIB
        );
        for data in [DataType::F32, DataType::Bf16, DataType::F16] {
            for these in kernels {
                let shape = LaunchConfig {
                    unroll: these.unroll,
                    ..LaunchConfig::default()
                };
                let fused = self.reduction(data, Operator::Sum, &[1, 2, 3, 4, 5, 6, 7, 8], 0, bytes, shape)?;
                let first = self.reduction(data, Operator::Sum, &[1, 2], 0, bytes, shape)?;
                let mut passes = vec![first];
                for source in 3..=8 {
                    passes.push(self.reduction(data, Operator::Sum, &[0, source], 0, bytes, shape)?);
                }
                let fused = self.launch(these, &fused)?;
                let pairwise = self.time(|bench| passes.iter().try_for_each(|pass| bench.put(these, pass)))?;
                let speedup = pairwise.median / fused.median;
                let verdict = if speedup >= 2.0 { "met" } else { "NOT MET" };
                println!(
                    "{:>5}  {:<16} one pass {:.0} µs ({} TB/s), seven {:.0} µs ({} TB/s): {speedup:.2} times as fast: 2 {verdict}",
                    data.name(),
                    these.name,
                    fused.median * 1e6,
                    spread(9 * bytes, fused),
                    pairwise.median * 1e6,
                    spread(21 * bytes, pairwise)
                );
                self.record(
                    "sum of 8, one pass",
                    data.name(),
                    bytes,
                    &these.name,
                    Some(shape),
                    9 * bytes,
                    fused,
                );
                self.record(
                    "sum of 8, seven passes",
                    data.name(),
                    bytes,
                    &these.name,
                    Some(shape),
                    21 * bytes,
                    pairwise,
                );
            }
        }
        Ok(())
    }

    fn everything_else(&mut self, these: &Kernels, bytes: usize) -> Result<()> {
        let shape = LaunchConfig::default();
        println!("\nall else at {} MiB", bytes / MIB);
        let show = |what: &str, moved: usize, time: Time| {
            println!("{what:<40} {:>8.0} µs  {} TB/s", time.median * 1e6, spread(moved, time));
        };
        for data in DataType::ALL {
            for operator in [
                Operator::Sum,
                Operator::Prod,
                Operator::Min,
                Operator::Max,
                Operator::Avg { ranks: 2 },
            ] {
                let reduction = self.reduction(data, operator, &[1, 2], 0, bytes, shape)?;
                let time = self.launch(these, &reduction)?;
                show(&format!("{data} {} of 2", operator.name()), 3 * bytes, time);
                self.record(
                    &format!("{} of 2", operator.name()),
                    data.name(),
                    bytes,
                    &these.name,
                    Some(shape),
                    3 * bytes,
                    time,
                );
            }
        }
        for count in 1..=8 {
            let sources: Vec<usize> = (1..=count).collect();
            let reduction = self.reduction(DataType::Bf16, Operator::Sum, &sources, 0, bytes, shape)?;
            let time = self.launch(these, &reduction)?;
            show(&format!("bf16 sum of {count}"), (count + 1) * bytes, time);
            self.record(
                &format!("sum of {count}"),
                "bf16",
                bytes,
                &these.name,
                Some(shape),
                (count + 1) * bytes,
                time,
            );
        }
        // The same number of elements, of which partial results take twice the bytes.
        let half = bytes / 2;
        for (what, forms, into, moved) in [
            (
                "bf16 elements and partials to partials",
                [OperandKind::Element, OperandKind::Partial],
                OperandKind::Partial,
                5 * half,
            ),
            (
                "bf16 elements and partials to elements",
                [OperandKind::Element, OperandKind::Partial],
                OperandKind::Element,
                4 * half,
            ),
        ] {
            let sources = [self.at(1, forms[0], 0), self.at(2, forms[1], 0)];
            let into = (into, self.at(0, into, 0).address);
            let reduction = Reduction::new(DataType::Bf16, Operator::Sum, &sources, into, (half / 2) as u64, shape)?;
            let time = self.launch(these, &reduction)?;
            show(what, moved, time);
            self.record(what, "bf16", half, &these.name, Some(shape), moved, time);
        }
        for (what, shifts) in [
            ("f32 sum of 2, all begin 4 bytes later", [4, 4, 4]),
            ("f32 sum of 2, one begins 4 bytes later", [0, 4, 0]),
        ] {
            let sources = [
                self.at(1, OperandKind::Element, shifts[0]),
                self.at(2, OperandKind::Element, shifts[1]),
            ];
            let into = (
                OperandKind::Element,
                self.at(0, OperandKind::Element, shifts[2]).address,
            );
            let reduction = Reduction::new(DataType::F32, Operator::Sum, &sources, into, (bytes / 4) as u64, shape)?;
            let time = self.launch(these, &reduction)?;
            show(what, 3 * bytes, time);
            self.record(what, "f32", bytes, &these.name, Some(shape), 3 * bytes, time);
        }
        Ok(())
    }

    /// One block per tile, as many as are resident, and fewer.
    fn shapes(&self, unroll: u32) -> Vec<LaunchConfig> {
        let resident = self.multiprocessors;
        let mut shapes = Vec::new();
        for threads in [256, 512] {
            let each = 512 / threads;
            for blocks in [
                i32::MAX as u32,
                4 * resident * each,
                2 * resident * each,
                resident * each,
                resident / 4 * each,
            ] {
                shapes.push(LaunchConfig {
                    threads,
                    blocks,
                    unroll,
                });
            }
        }
        shapes
    }

    fn at(&self, memory: usize, kind: OperandKind, shift: u64) -> SourceOperand {
        SourceOperand {
            address: self.memories[memory].device_ptr().0 + shift,
            kind,
            scalar: None,
        }
    }

    fn reduction(
        &self,
        data: DataType,
        operator: Operator,
        sources: &[usize],
        into: usize,
        bytes: usize,
        shape: LaunchConfig,
    ) -> Result<Reduction> {
        let sources: Vec<SourceOperand> = sources
            .iter()
            .map(|&source| self.at(source, OperandKind::Element, 0))
            .collect();
        let into = (OperandKind::Element, self.at(into, OperandKind::Element, 0).address);
        Ok(Reduction::new(
            data,
            operator,
            &sources,
            into,
            (bytes / data.bytes()) as u64,
            shape,
        )?)
    }

    fn put(&self, these: &Kernels, reduction: &Reduction) -> Result<()> {
        let uses = core::array::from_fn::<_, MEMORIES, _>(|index| self.memories[index].all());
        // SAFETY: made for these memories and their lengths, which nothing else uses.
        unsafe { these.reducer.launch(&self.stream, reduction, &uses)? };
        Ok(())
    }

    fn launch(&mut self, these: &Kernels, reduction: &Reduction) -> Result<Time> {
        self.time(|bench| bench.put(these, reduction))
    }

    fn copy(&mut self, bytes: usize) -> Result<Time> {
        self.time(|bench| {
            let (into, from) = (bench.memories[0].span(..bytes)?, bench.memories[1].span(..bytes)?);
            Ok(bench.stream.copy(into, from)?)
        })
    }

    fn time(&self, work: impl Fn(&Self) -> Result<()>) -> Result<Time> {
        let sample = |launches: u32| -> Result<f64> {
            self.stream.record(&self.start)?;
            for _ in 0..launches {
                work(self)?;
            }
            self.stream.record(&self.stop)?;
            self.stream.synchronize()?;
            Ok(self.stop.since(&self.start)?.as_secs_f64() / f64::from(launches))
        };
        sample(3)?;
        let launches = (SAMPLE / sample(3)?.max(1e-7)).clamp(3.0, 200.0) as u32;
        let mut samples = (0..SAMPLES).map(|_| sample(launches)).collect::<Result<Vec<_>>>()?;
        samples.sort_by(f64::total_cmp);
        Ok(Time {
            median: samples[SAMPLES / 2],
            least: samples[0],
            most: samples[SAMPLES - 1],
        })
    }

    #[expect(clippy::too_many_arguments, reason = "the columns of a table")]
    fn record(
        &mut self,
        what: &str,
        data: &str,
        bytes: usize,
        kernels: &str,
        shape: Option<LaunchConfig>,
        moved: usize,
        time: Time,
    ) {
        self.records.push(json!({
            "what": what,
            "type": data,
            "bytes": bytes,
            "kernels": kernels,
            "threads": shape.map(|shape| shape.threads),
            "blocks": shape.map(|shape| shape.blocks),
            "moved_bytes": moved,
            "median_s": time.median,
            "least_s": time.least,
            "most_s": time.most,
            "tb_per_s": rate(moved, time.median),
        }));
    }
}

fn rate(bytes: usize, seconds: f64) -> f64 {
    bytes as f64 / seconds / 1e12
}

/// The rates of the median, the slowest and the fastest sample.
fn spread(bytes: usize, time: Time) -> String {
    format!(
        "{:>6.3} ({:.3}–{:.3})",
        rate(bytes, time.median),
        rate(bytes, time.most),
        rate(bytes, time.least)
    )
}

fn shown(blocks: u32) -> String {
    if blocks == i32::MAX as u32 {
        "per tile".to_owned()
    } else {
        blocks.to_string()
    }
}
