//! Verifies every case on GPUs.

use std::time::Instant;

use anyhow::Result;
use doorbell_collectives::gpu::Sizes;
use doorbell_cuda::Driver;
use doorbell_tests::gpu::collective::{Rig, Sample, cases, every_type, launch_shapes};
use doorbell_tests::gpu::short;

use crate::Options;

const MIB: usize = 1 << 20;

pub(crate) fn run(driver: Driver, options: &Options) -> Result<bool> {
    let ranks = options.ranks.unwrap_or_else(|| driver.device_count().max(2));
    let sizes = Sizes {
        fifos: options.fifos * MIB,
        staging: MIB,
        ..Sizes::default()
    };
    let rig = Rig::new(driver, ranks, 64 * MIB, sizes, 64, options.ptx.as_deref())?;
    let started = Instant::now();
    let mut done = 0;
    let mut right = true;
    let mut sample = Sample::one_of(if options.quick { 13 } else { 3 });
    for case in cases(ranks as u32, options.quick) {
        match every_type(&rig, &case, &launch_shapes(options.quick), &mut sample) {
            Ok(count) => {
                done += count;
                println!(
                    "check: PASS {} of {} among {ranks}: {count} ways, {:.1} s",
                    case.collective,
                    case.count,
                    started.elapsed().as_secs_f64()
                );
            }
            Err(error) => {
                println!("check: FAIL {error:#}");
                right = false;
                break;
            }
        }
    }
    if right {
        match short(&rig, ranks as u32, options.quick) {
            Ok(count) => {
                done += count;
                println!(
                    "check: PASS short operations among {ranks}: {count} ways, {:.1} s",
                    started.elapsed().as_secs_f64()
                );
            }
            Err(error) => {
                println!("check: FAIL {error:#}");
                right = false;
            }
        }
    }
    println!("check: {done} right; {:.1} s", started.elapsed().as_secs_f64());
    Ok(right)
}

fn short(rig: &Rig, ranks: u32, quick: bool) -> Result<usize> {
    let counts: &[u64] = if quick {
        &[1, 1031]
    } else {
        &[1, 3, 61, 1031, 16_384, 32_771]
    };
    let mut sample = Sample::one_of(if quick { 13 } else { 3 });
    let mut done = 0;
    for case in short::cases(ranks, counts) {
        done += short::every_type(rig, &case, &mut sample)?;
    }
    for (turns, count, two_steps) in [(100, 2, false), (100, 5000, false), (100, 50_000, true)] {
        rig.check_ahead(turns, count, two_steps)?;
    }
    Ok(done)
}
