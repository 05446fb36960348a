//! Many communicators, one after another: what they leave behind of the GPU's memory, descriptors and mappings.

use std::fs;
use std::time::Instant;

use anyhow::{Result, ensure};
use doorbell_collectives::gpu::{Executor, GpuCommunicator, GpuOptions};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::Case;
use doorbell_collectives::{Communicator, Rank, ReduceOp};
use doorbell_cuda::{Context, Stream};

use crate::{Options, gpus};

/// Communicators before the first look: whatever is made once is made by then.
const BEFORE: u32 = 20;
/// What may differ between two looks, whose reasons are the driver's: less than a page of a GPU's memory, or one descriptor or mapping, for every so many communicators.
const SLACK: u32 = 5;
/// Bytes of a page of a GPU's memory.
const PAGE: usize = 2 << 20;

/// What this process has.
#[derive(Debug, Clone, Copy)]
struct Seen {
    free: usize,
    descriptors: usize,
    mappings: usize,
}

/// Makes them, and looks before and after.
pub(crate) fn run(options: &Options, comm: &Communicator, context: &Context) -> Result<()> {
    make(options, comm, context, BEFORE)?;
    let before = look(comm, context)?;
    let started = Instant::now();
    make(options, comm, context, options.communicators)?;
    let took = started.elapsed().as_secs_f64();
    let after = look(comm, context)?;
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

/// When all ranks are here, and none has gone on.
fn look(comm: &Communicator, context: &Context) -> Result<Seen> {
    context.synchronize()?;
    context.reap();
    comm.barrier().wait()?;
    let seen = Seen {
        free: context.memory_info()?.0,
        descriptors: fs::read_dir("/proc/self/fd")?.count(),
        mappings: fs::read_to_string("/proc/self/maps")?.lines().count(),
    };
    comm.barrier().wait()?;
    Ok(seen)
}
