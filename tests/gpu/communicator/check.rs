//! Every collective on memory allocated elsewhere (by `cuMemAlloc`, like PyTorch's) and registered
//! with the other ranks.

use std::sync::Arc;

use anyhow::{Result, ensure};
use doorbell_collectives::gpu::{Executor, GpuCommunicator, GpuOptions};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::Case;
use doorbell_collectives::{Communicator, Rank, ReduceOp};
use doorbell_cuda::{Context, DeviceMemory, DevicePtr, Foreign, Memory as _, Shareable, Stream};
use doorbell_tests::gpu::foreign;

use crate::gpus::{Buffers, bytes, once_in};
use crate::{Options, gpu_options};

pub(crate) fn run(options: &Options, comm: Communicator, context: &Context) -> Result<()> {
    let quick = options.quick;
    for executor in [Executor::Kernel, Executor::Copies] {
        let how = GpuOptions {
            executor: Some(executor),
            ..gpu_options(options)
        };
        let gpu = GpuCommunicator::new(comm.duplicate()?, context, how)?;
        if let Some(reason) = gpu.staged_reason() {
            ensure!(gpu.rank() != Rank(0), "the GPUs do not reach each other: {reason}");
            return Ok(());
        }
        let counts: &[u64] = if quick {
            &[7, 50_000]
        } else {
            &[1, 7, 3001, 50_000, 400_003]
        };
        every_collective(&gpu, counts)?;
        parts_of_one_allocation(&gpu)?;
        unlike(&gpu)?;
        if gpu.rank() == Rank(0) {
            println!("PASS {} on memory of others", executor.name());
        }
        gpu.destroy()?;
    }
    comm.destroy()?;
    Ok(())
}

fn cases(ranks: u32, counts: &[u64]) -> impl Iterator<Item = Case> {
    Collective::ALL
        .iter()
        .filter(|collective| **collective != Collective::Barrier)
        .flat_map(move |&collective| {
            counts.iter().map(move |&count| Case {
                collective,
                ranks,
                root: Rank(count as u32 % ranks),
                count,
            })
        })
}

fn once<M: Shareable>(gpu: &GpuCommunicator, stream: &Stream, case: &Case, memory: M, in_place: bool) {
    let buffers = Buffers::of::<f32>(memory, case, gpu.rank(), in_place);
    once_in::<f32, _>(gpu, stream, case, ReduceOp::Sum, &buffers, true);
}

/// Memory allocated elsewhere on all ranks; and on every second one, with own memory on others.
fn every_collective(gpu: &GpuCommunicator, counts: &[u64]) -> Result<()> {
    let stream = Stream::new(gpu.context())?;
    for case in cases(gpu.size(), counts) {
        for in_place in [false, true] {
            if in_place && !case.collective.runs_in_place() {
                continue;
            }
            let len = bytes::<f32>(&case);
            let theirs = || foreign::alloc(gpu.context(), len, 256);
            once(gpu, &stream, &case, theirs()?, in_place);
            if gpu.rank().0.is_multiple_of(2) {
                once(gpu, &stream, &case, theirs()?, in_place);
            } else {
                once(gpu, &stream, &case, DeviceMemory::alloc(gpu.context(), len)?, in_place);
            }
        }
    }
    Ok(())
}

/// As in a caching allocator: several in one allocation, which a process can open only once.
fn parts_of_one_allocation(gpu: &GpuCommunicator) -> Result<()> {
    let stream = Stream::new(gpu.context())?;
    let case = Case {
        collective: Collective::AllReduce,
        ranks: gpu.size(),
        root: Rank(0),
        count: 5000,
    };
    let len = bytes::<f32>(&case).next_multiple_of(256);
    let whole = Arc::new(foreign::alloc(gpu.context(), 3 * len, 0)?);
    let part = |at: usize| {
        let address = DevicePtr(whole.device_ptr().0 + (at * len) as u64);
        // SAFETY: the owner is an allocation that contains these bytes.
        unsafe { Foreign::wrap(gpu.context(), address, len, whole.clone()) }
    };
    let parts = [part(0)?, part(1)?, part(2)?];
    for part in &parts {
        gpu.register(part)?;
    }
    for part in &parts {
        let buffers = Buffers::of::<f32>(part.clone(), &case, gpu.rank(), true);
        once_in::<f32, _>(gpu, &stream, &case, ReduceOp::Sum, &buffers, false);
    }
    gpu.deregister(&parts[1]);
    let buffers = Buffers::of::<f32>(parts[2].clone(), &case, gpu.rank(), true);
    once_in::<f32, _>(gpu, &stream, &case, ReduceOp::Sum, &buffers, false);
    // The first and the last are released with the communicator.
    Ok(())
}

/// Different lengths are refused on all ranks alike, without effect on later operations.
fn unlike(gpu: &GpuCommunicator) -> Result<()> {
    let len = 4096 + usize::from(gpu.rank() == Rank(1));
    let memory = foreign::alloc(gpu.context(), len, 0)?;
    let refused = gpu.register(&memory).err().map(|error| error.to_string());
    ensure!(
        refused.as_ref().is_some_and(|error| error.contains("not equally long")),
        "{refused:?}"
    );
    ensure!(memory.len() == len, "a length has changed");
    gpu.check()?;
    Ok(())
}
