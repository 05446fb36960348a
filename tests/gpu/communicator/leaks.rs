//! Many communicators, one after another: leaks of GPU memory, descriptors and mappings.

use std::fs;
use std::time::Instant;

use anyhow::{Result, ensure};
use doorbell_collectives::gpu::{Executor, GpuCommunicator, GpuOptions};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::Case;
use doorbell_collectives::{Communicator, Rank, ReduceOp};
use doorbell_cuda::{Context, Stream};

use crate::{Options, gpus};

/// Communicators before the first sample, by which one-time allocations are done.
const BEFORE: u32 = 20;
/// Tolerated differences caused by the driver: less than a page of GPU memory, or one descriptor or
/// mapping, per this many communicators.
const SLACK: u32 = 5;
/// Bytes of a page of GPU memory.
const PAGE: usize = 2 << 20;

#[derive(Debug, Clone, Copy)]
struct Resources {
    free: usize,
    descriptors: usize,
    mappings: usize,
}

pub(crate) fn run(options: &Options, comm: &Communicator, context: &Context) -> Result<()> {
    make(options, comm, context, BEFORE)?;
    let before = sample(comm, context)?;
    let started = Instant::now();
    make(options, comm, context, options.communicators)?;
    let took = started.elapsed().as_secs_f64();
    let after = sample(comm, context)?;
    let slack = (options.communicators / SLACK) as usize;
    println!(
        "leaks: rank {}: {} communicators in {took:.1} s; free memory {:+} KiB, descriptors {:+}, mappings {:+}",
        comm.rank(),
        options.communicators,
        (after.free as i64 - before.free as i64) >> 10,
        after.descriptors as i64 - before.descriptors as i64,
        after.mappings as i64 - before.mappings as i64
    );
    ensure!(
        after.free + slack * PAGE >= before.free
            && after.descriptors <= before.descriptors + slack
            && after.mappings <= before.mappings + slack,
        "rank {}: {before:?} before, {after:?} behind {} communicators",
        comm.rank(),
        options.communicators
    );
    Ok(())
}

fn make(options: &Options, comm: &Communicator, context: &Context, times: u32) -> Result<()> {
    let case = Case {
        collective: Collective::AllReduce,
        ranks: comm.size(),
        root: Rank(0),
        count: 300,
    };
    for turn in 0..times {
        let executor = [Executor::Kernel, Executor::Copies][turn as usize / options.use_every as usize % 2];
        let how = GpuOptions {
            executor: Some(executor),
            ..gpus::small()
        };
        let gpu = GpuCommunicator::new(comm.duplicate()?, context, how)?;
        if turn % options.use_every == 0 {
            let stream = Stream::new(context)?;
            gpus::once::<f32>(&gpu, &stream, &case, ReduceOp::Sum, false, true);
        }
        gpu.destroy()?;
    }
    Ok(())
}

/// Sampled when all ranks are here, and none has continued.
fn sample(comm: &Communicator, context: &Context) -> Result<Resources> {
    context.synchronize()?;
    context.reap();
    comm.barrier().wait()?;
    let resources = Resources {
        free: context.memory_info()?.0,
        descriptors: fs::read_dir("/proc/self/fd")?.count(),
        mappings: fs::read_to_string("/proc/self/maps")?.lines().count(),
    };
    comm.barrier().wait()?;
    Ok(resources)
}
