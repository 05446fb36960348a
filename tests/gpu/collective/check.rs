//! Every case on the GPUs.

use std::time::Instant;

use anyhow::Result;
use doorbell_collectives::gpu::Sizes;
use doorbell_cuda::Driver;
use doorbell_tests::gpu::collective::{Rig, Sample, cases, cuts, every_type};

use crate::Options;

const MIB: usize = 1 << 20;

/// Whether all results are right.
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
        match every_type(&rig, &case, &cuts(options.quick), &mut sample) {
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
    println!("check: {done} right; {:.1} s", started.elapsed().as_secs_f64());
    Ok(right)
}
