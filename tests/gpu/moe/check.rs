//! Verifies both modes and payloads, with random routings.

use std::time::Instant;

use anyhow::Result;
use doorbell_collectives::gpu::GpuCommunicator;
use doorbell_collectives::moe::Shape;
use doorbell_collectives::{DataType, Rank};
use doorbell_cuda::Stream;

use crate::Options;
use crate::rig::{ALL, OnGpu, once, options_of};

pub(crate) fn run(gpu: &GpuCommunicator, options: &Options) -> Result<()> {
    let started = Instant::now();
    let stream = Stream::new(gpu.context())?;
    let ranks = gpu.size();
    // Top-k, hidden, tokens, and experts: of decoding at the end.
    let shapes: &[(u32, u32, u32, u32)] = match options.quick {
        true => &[(3, 256, 9, 2 * ranks)],
        false => &[
            (3, 256, 9, 2 * ranks),
            (8, 1280, 300, 24 * ranks),
            (8, 7168, 128, options.experts),
        ],
    };
    for &(top_k, hidden, tokens, experts) in shapes {
        let shape = Shape::new(ranks, experts, top_k.min(experts), hidden, tokens)?;
        for (number, how) in ALL.into_iter().enumerate() {
            let name = format!(
                "{} {}: {tokens} tokens, hidden {hidden}, top-{top_k} of {experts}",
                how.0, how.1
            );
            say(gpu, || println!("check: {name}"));
            let index = if number % 2 == 0 { DataType::I64 } else { DataType::I32 };
            // Before the ranks meet: an allocation waits for kernels, which wait for this rank.
            let mut memory = OnGpu::new(&shape, gpu.context(), index);
            let mut layer = gpu.expert_parallel(options_of(shape, how))?;
            let turns = if hidden > 2000 { 1 } else { 6 };
            for seed in 0..turns {
                once(&mut layer, &stream, &mut memory, how, seed, gpu.rank());
            }
            let seconds = started.elapsed().as_secs_f64();
            say(gpu, || println!("check: PASS {name}: {turns} times, {seconds:.1} s"));
        }
    }
    Ok(())
}

fn say(gpu: &GpuCommunicator, print: impl FnOnce()) {
    if gpu.rank() == Rank(0) {
        print();
    }
}
