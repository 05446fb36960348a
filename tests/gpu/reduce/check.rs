//! Every case of the sweep on a GPU, and one reduction of memories longer than 2³² bytes.

use std::time::Instant;

use anyhow::Result;
use doorbell_cuda::reduce::{DataType, OperandKind, Operator, Source};
use doorbell_cuda::{Context, DeviceMemory, Memory as _};
use doorbell_tests::gpu::driven::Gpu;
use doorbell_tests::gpu::sweep::{self, Extent};

use crate::free_bytes;

/// Bytes of each memory of the large reduction: more than 32 bits, and unaligned.
const LARGE: usize = (1 << 32) + (1 << 20) + 13;

pub(crate) fn run(context: &Context, extent: Extent) -> Result<bool> {
    let mut gpu = Gpu::new(context)?;
    let started = Instant::now();
    match sweep::run(&mut gpu, extent) {
        Ok(cases) => println!(
            "check: {cases} cases, each the collectives' bits and within its bounds of f64; {:.1} s",
            started.elapsed().as_secs_f64()
        ),
        Err(error) => {
            println!("check: WRONG: {error:#}");
            return Ok(false);
        }
    }
    if extent == Extent::Quick {
        return Ok(true);
    }
    if free_bytes(context)? < 3 * LARGE + (1 << 30) {
        println!("check: the GPU has too little free memory for {LARGE} bytes three times: left out");
        return Ok(true);
    }
    large(context, &mut gpu)
}

/// The sum is checked at both ends, in the middle and around 2³².
fn large(context: &Context, gpu: &mut Gpu) -> Result<bool> {
    let memories: Vec<DeviceMemory> = (0..3)
        .map(|_| DeviceMemory::alloc(context, LARGE))
        .collect::<Result<_, _>>()?;
    for (memory, value) in memories.iter().zip([100, 57, 0]) {
        gpu.stream.fill(memory.all(), value)?;
    }
    let sources = [Source::elements(memories[0].all()), Source::elements(memories[1].all())];
    let into = (OperandKind::Element, memories[2].all());
    gpu.reducer
        .reduce(&gpu.stream, DataType::U8, Operator::Sum, &sources, into)?;
    let mut window = vec![0; 1 << 20];
    for start in [0, LARGE / 2, (1 << 32) - (1 << 19), LARGE - window.len()] {
        let host = gpu.host.span(..window.len())?;
        gpu.stream.copy(host, memories[2].span(start..start + window.len())?)?;
        gpu.stream.synchronize()?;
        gpu.host.copy_out(0, &mut window)?;
        if let Some(at) = window.iter().position(|byte| *byte != 157) {
            println!(
                "check: WRONG: byte {} of {LARGE} is {}, must be 157",
                start + at,
                window[at]
            );
            return Ok(false);
        }
    }
    println!("check: two memories of {LARGE} bytes: right at both ends, in the middle and around 2^32");
    Ok(true)
}
