//! Benchmarks, by bus bandwidth as in nccl-tests: bytes/time times 2(p-1)/p for all-reduce, (p-1)/p
//! for all-gather and reduce-scatter, 1 for broadcast. Each time is the median of samples of
//! several operations between two events on each rank's stream; the slowest rank counts.

use std::sync::Barrier;
use std::thread;

use anyhow::{Result, anyhow};
use doorbell_collectives::gpu::Sizes;
use doorbell_collectives::gpu::kernel::Plan;
use doorbell_collectives::gpu::program::{Function, LaunchShape};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::Case;
use doorbell_collectives::{Algorithm, DataType, Rank, ReduceOp};
use doorbell_cuda::{CaptureMode, Driver, GraphExec};
use doorbell_tests::gpu::collective::{Rig, Variant};

use crate::Options;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const SAMPLES: usize = 5;
const CAPTURED: usize = 20;

/// The measured collectives with their algorithms for long and short messages.
const MEASURED: [(Collective, Algorithm, Algorithm); 4] = [
    (Collective::AllReduce, Algorithm::FullMesh, Algorithm::OneShot),
    (Collective::AllGather, Algorithm::FullMesh, Algorithm::FullMesh),
    (Collective::ReduceScatter, Algorithm::FullMesh, Algorithm::FullMesh),
    (Collective::Broadcast, Algorithm::Ring, Algorithm::FullMesh),
];

fn case(collective: Collective, ranks: usize, bytes: usize, data: DataType) -> Case {
    let parts = match collective {
        Collective::AllGather | Collective::ReduceScatter => ranks,
        _ => 1,
    };
    Case {
        collective,
        ranks: ranks as u32,
        root: Rank(0),
        count: (bytes / parts / data.bytes()).max(1) as u64,
    }
}

fn bus(collective: Collective, ranks: usize, bytes: usize, seconds: f64) -> f64 {
    let p = ranks as f64;
    let factor = match collective {
        Collective::AllReduce => 2.0 * (p - 1.0) / p,
        Collective::AllGather | Collective::ReduceScatter => (p - 1.0) / p,
        _ => 1.0,
    };
    factor * bytes as f64 / seconds / 1e9
}

fn function(collective: Collective, data: DataType) -> Function {
    Function {
        data,
        op: collective.reduces().then_some(ReduceOp::Sum),
        scalar: 0,
    }
}

/// Seconds per operation; each rank's are enqueued by a thread of its own.
fn time(
    rig: &Rig,
    plans: &[Plan],
    case: &Case,
    variant: Variant,
    data: DataType,
    operations: usize,
    graph: bool,
) -> Result<f64> {
    let function = function(case.collective, data);
    time_of(
        rig,
        &|rank| rig.launch_one(rank, plans, case, variant, function),
        operations,
        graph,
    )
}

/// The same for a closure that enqueues a rank's part.
fn time_of(rig: &Rig, launch: &(dyn Fn(usize) -> Result<()> + Sync), operations: usize, graph: bool) -> Result<f64> {
    let ranks = rig.ranks.len();
    let barrier = Barrier::new(ranks);
    let one = |rank: usize| {
        let member = &rig.ranks[rank];
        let launch = || launch(rank);
        let captured: Option<GraphExec> = if graph {
            // Load the kernel, and run the operation once before it is captured.
            launch()?;
            member.stream.synchronize()?;
            let work = || {
                for _ in 0..CAPTURED {
                    launch().map_err(|error| {
                        eprintln!("{error:#}");
                        doorbell_cuda::Error::Empty
                    })?;
                }
                Ok(())
            };
            Some(
                member
                    .stream
                    .capture(CaptureMode::ThreadLocal, &[], work)?
                    .instantiate()?,
            )
        } else {
            None
        };
        let step = || match &captured {
            Some(graph) => Ok(graph.launch(&member.stream)?),
            None => launch(),
        };
        let mut samples = Vec::new();
        for sample in 0..=SAMPLES {
            barrier.wait();
            // The first operations synchronize the ranks.
            step()?;
            member.stream.record(&member.times.0)?;
            for _ in 0..operations {
                step()?;
            }
            member.stream.record(&member.times.1)?;
            member.stream.synchronize()?;
            if sample > 0 {
                samples.push(member.times.1.since(&member.times.0)?.as_secs_f64());
            }
        }
        Ok::<_, anyhow::Error>(samples)
    };
    let samples: Result<Vec<Vec<f64>>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                scope.spawn({
                    let one = &one;
                    move || one(rank)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a rank has panicked"))?)
            .collect()
    });
    let samples = samples?;
    let mut times: Vec<f64> = (0..SAMPLES)
        .map(|sample| samples.iter().map(|rank| rank[sample]).fold(0.0, f64::max))
        .collect();
    times.sort_by(f64::total_cmp);
    let each = if graph { operations * CAPTURED } else { operations };
    Ok(times[SAMPLES / 2] / each as f64)
}

fn rig(driver: Driver, options: &Options, ranks: usize, bytes: usize, blocks: u32) -> Result<Rig> {
    let sizes = Sizes {
        fifos: options.fifos * MIB,
        staging: MIB,
        ..Sizes::default()
    };
    Rig::new(driver, ranks, bytes, sizes, blocks, options.ptx.as_deref())
}

/// Seconds per operation with the kernel for short ones.
fn time_short(rig: &Rig, case: &Case, two_steps: bool, operations: usize, graph: bool) -> Result<Option<f64>> {
    let data = DataType::F32;
    let function = function(case.collective, data);
    let Some(shape) = rig.short(case, data, two_steps) else {
        return Ok(None);
    };
    let places = rig.places(case, false, (0, 0), data.bytes());
    let launch = |rank: usize| rig.launch_short(rank, case, places[rank], shape, function);
    time_of(rig, &launch, operations, graph).map(Some)
}

/// Short messages by their kernel, and by plans with LL and Simple; launched, and in a graph.
pub(crate) fn small(driver: Driver, options: &Options) -> Result<()> {
    let ranks = options.ranks.unwrap_or_else(|| driver.device_count().max(2));
    let rig = rig(driver, options, ranks, 4 * MIB, 32)?;
    println!("\nsmall, f32, {ranks} ranks: us eager / in a graph of {CAPTURED}");
    for (collective, whole, short) in MEASURED {
        for bytes in [8, 256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB] {
            let mut line = format!("{collective:>15} {bytes:>8} B");
            for two_steps in [false, true] {
                let case = case(collective, ranks, bytes, DataType::F32);
                let eager = time_short(&rig, &case, two_steps, 100, false)?;
                let graph = time_short(&rig, &case, two_steps, 10, true)?;
                if let (Some(eager), Some(graph)) = (eager, graph) {
                    let steps = if two_steps { 2 } else { 1 };
                    line += &format!(" | {steps} steps {:.2} / {:.2}", eager * 1e6, graph * 1e6);
                }
            }
            for (algorithm, ll, threads, blocks) in [
                (short, true, 512, (bytes / 8 / 512).clamp(1, 32)),
                (short, true, 128, (bytes / 8 / 128).clamp(1, 32)),
                (whole, true, 512, (bytes / 8 / 512).clamp(1, 32)),
                (whole, false, 512, (bytes / 4096).clamp(1, 32)),
            ] {
                let case = case(collective, ranks, bytes, DataType::F32);
                let shape = LaunchShape {
                    blocks: blocks as u32,
                    threads,
                    slice: 64 << 10,
                    ll,
                };
                let variant = Variant {
                    algorithm,
                    direct: true,
                    in_place: false,
                    shape,
                    skew: (0, 0),
                };
                let plans = rig.plans(&case, variant)?;
                let eager = time(&rig, &plans, &case, variant, DataType::F32, 100, false)?;
                let graph = time(&rig, &plans, &case, variant, DataType::F32, 10, true)?;
                let kind = if ll { "lines" } else { "whole" };
                line += &format!(
                    " | {algorithm} {kind} {blocks}x{threads} {:.2} / {:.2}",
                    eager * 1e6,
                    graph * 1e6
                );
            }
            println!("{line}");
        }
    }
    Ok(())
}

/// Long messages: by blocks, threads and slice.
pub(crate) fn large(driver: Driver, options: &Options) -> Result<()> {
    let ranks = options.ranks.unwrap_or_else(|| driver.device_count().max(2));
    let blocks = options.blocks.iter().copied().max().unwrap_or(1);
    let rig = rig(driver, options, ranks, options.max_mib * MIB, blocks)?;
    let sizes: &[usize] = if options.quick {
        &[512 * KIB, 8 * MIB, 128 * MIB]
    } else {
        &[512 * KIB, MIB, 8 * MIB, 32 * MIB, 128 * MIB, 512 * MIB, 1024 * MIB]
    };
    let max_slice_bytes = rig.ranks[0].executor.arena_layout().max_slice_bytes(false) >> 10;
    println!("\nlarge, {ranks} ranks: GB/s of the bus; slices of {max_slice_bytes} KiB at most");
    for data in [DataType::F32, DataType::Bf16] {
        for (collective, algorithm, _) in MEASURED {
            for &bytes in sizes.iter().filter(|bytes| **bytes <= options.max_mib * MIB) {
                let case = case(collective, ranks, bytes, data);
                let mut best = (0.0, String::new());
                let mut line = String::new();
                for &blocks in &options.blocks {
                    for &threads in &options.threads {
                        for &slice in options.slices.iter().filter(|slice| **slice <= max_slice_bytes.max(1)) {
                            let shape = LaunchShape {
                                blocks,
                                threads,
                                slice: slice << 10,
                                ll: false,
                            };
                            let variant = Variant {
                                algorithm,
                                direct: true,
                                in_place: false,
                                shape,
                                skew: (0, 0),
                            };
                            let plans = rig.plans(&case, variant)?;
                            let operations = if bytes < 32 * MIB { 30 } else { 6 };
                            let seconds = time(&rig, &plans, &case, variant, data, operations, false)?;
                            let found = bus(collective, ranks, bytes, seconds);
                            let name = format!("{blocks}x{threads}/{slice}");
                            line += &format!(" {name} {found:.0}");
                            if found > best.0 {
                                best = (found, format!("{name}, {:.1} us", seconds * 1e6));
                            }
                        }
                    }
                }
                println!(
                    "{collective:>15} {data:>5} {:>8} KiB: {:.0} ({}) |{line}",
                    bytes / KIB,
                    best.0,
                    best.1
                );
            }
        }
    }
    Ok(())
}
