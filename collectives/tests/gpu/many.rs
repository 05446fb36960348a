//! Ranks as threads of this process, each with a stand-in GPU.

use doorbell_collectives::Options;
use doorbell_collectives::gpu::{GpuCommunicator, GpuOptions};
use doorbell_cuda::Driver;

use crate::gpus::gpu;
use crate::world;

/// Runs `rank` on a thread per rank with a GPU, and returns the results.
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
