//! Checks and times one row, by turns with the all-to-all-v and the put of the same bytes.

use std::time::Duration;

use doorbell_collectives::{CollectiveError, Communicator};

use super::CollArgs;
use super::job::Job;
use super::table::MoeRow;
use crate::coll::gpu::Stop;
use crate::coll::measure::{TRIAL_OPERATIONS, all_values, iterations};

/// Turns of each, one after the other: the machine changes while they run.
const TURNS: u32 = 5;
/// At least: each area of memory has been used then.
const WARMUPS: u32 = 3;

/// What a rank measures. All ranks call the same functions in the same order.
pub(super) trait Bench {
    /// Runs the operation so many times. Returns its time: of combines, without the dispatches
    /// before them.
    fn operations(&mut self, times: u32) -> Result<Duration, Stop>;

    /// Exchanges the same bytes so many times by all-to-all-v.
    fn all_to_all_v(&mut self, times: u32) -> Result<Duration, Stop>;

    /// Puts the same bytes so many times; `None` where the memory has no put.
    fn put(&mut self, times: u32) -> Result<Option<Duration>, Stop>;

    /// Runs the operation once and returns the number of wrong rows or elements.
    fn check(&mut self) -> Result<u64, Stop>;
}

pub(super) fn row(args: &CollArgs, job: Job<'_>, comm: &Communicator, bench: &mut dyn Bench) -> Result<MoeRow, Stop> {
    let mut wrong = 0;
    for _ in 0..args.check {
        wrong += bench.check()?;
    }
    let wrong = all_values(comm, wrong as f64)?.iter().sum::<f64>() as u64;
    let warmups = WARMUPS.max(args.warmup.unwrap_or(0));
    bench.operations(warmups)?;
    bench.all_to_all_v(warmups)?;
    bench.put(warmups)?;
    let iterations = iterations::<Stop>(args, comm, || Ok(bench.operations(TRIAL_OPERATIONS)?.as_secs_f64()))?;
    let (mut time, mut beside, mut put) = (Duration::ZERO, Duration::ZERO, None);
    let turn = iterations.div_ceil(TURNS);
    for _ in 0..TURNS {
        comm.barrier().wait()?;
        time += bench.operations(turn)?;
        comm.barrier().wait()?;
        beside += bench.all_to_all_v(turn)?;
        comm.barrier().wait()?;
        put = bench.put(turn)?.map(|time| time + put.unwrap_or_default());
    }
    let mean = |time: Duration| -> Result<f64, CollectiveError> {
        let mine = time.as_secs_f64() / f64::from(turn * TURNS);
        let seconds = all_values(comm, mine)?.iter().sum::<f64>() / f64::from(comm.size());
        Ok(seconds.max(1e-9))
    };
    let (seconds, beside) = (mean(time)?, mean(beside)?);
    let put = put.map(mean).transpose()?;
    let bytes = job.row_bytes() as u64 * job.routings.all() as u64 / u64::from(comm.size());
    let (layer, shape) = (job.layer, &job.layer.shape);
    Ok(MoeRow {
        tokens: shape.max_tokens(),
        hidden: shape.hidden(),
        top_k: shape.top_k(),
        experts: shape.experts(),
        mode: layer.mode.name(),
        dtype: layer.payload.name(),
        skew: layer.skew.name(),
        ranks: shape.ranks(),
        iterations: turn * TURNS,
        bytes,
        time_us: seconds * 1e6,
        tokens_per_s: f64::from(shape.max_tokens()) * f64::from(shape.ranks()) / seconds,
        bytes_per_s: bytes as f64 / seconds,
        alltoallv_time_us: beside * 1e6,
        alltoallv_bytes_per_s: bytes as f64 / beside,
        of_alltoallv: beside / seconds,
        put_time_us: put.map(|put| put * 1e6),
        put_bytes_per_s: put.map(|put| bytes as f64 / put),
        times_put: put.map(|put| seconds / put),
        wrong: (args.check > 0).then_some(wrong),
    })
}
