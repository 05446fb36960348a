//! The client of `lat read` and `lat atomic`: one request, its completion, the next.
//!
//! It posts through the same flows as `bw` does, so what `--verify` looks at is the same.

use std::time::Instant;

use super::super::bw::stream::Flow;
use super::super::station::{Station, Test, refused};
use super::super::watch::{Deadline, Watch};
use crate::failure::Failure;
use crate::stats::Latency;

/// Runs the test at one size. What was measured is in `latency` even when it fails.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when data was wrong or the peer is lost.
pub(crate) fn run<F: Flow>(
    test: &Test<'_>,
    station: &mut Station<F>,
    latency: &mut Latency,
) -> Result<Vec<u64>, Failure> {
    let Station { cq, lanes } = station;
    let Some(lane) = lanes.first_mut() else {
        return Ok(Vec::new());
    };
    lane.own.attach(test, &lane.theirs)?;
    let warmup = test.plan.warmup(test.bytes);
    let total = test
        .plan
        .iterations(test.bytes)
        .map_or(u64::MAX, |iterations| warmup.saturating_add(iterations));
    let mut watch = Watch::of_client(test.control);
    let mut deadline = Deadline::after(test.plan.duration());
    let mut index = 0;
    let mut began = Instant::now();
    while index < total && !deadline.is_over() {
        if index == warmup {
            began = Instant::now();
            deadline.start(began);
        }
        let own = &mut lane.own;
        lane.qp
            .post(|batch| own.stage(batch, index, None, true))
            .map_err(|e| lane.theirs.refused(&e))?;
        let mut completed = false;
        while !completed {
            for done in cq.poll().map_err(refused)? {
                if let Err(failure) = done.result() {
                    return Err(lane.theirs.failed(&failure));
                }
                completed = true;
                lane.own
                    .retire(done)
                    .map_err(|wrong| Failure::test(format!("{}: {wrong}", lane.theirs)))?;
            }
            if !completed {
                watch.idle()?;
            }
        }
        let now = Instant::now();
        if index >= warmup {
            latency.record(nanoseconds(began, now));
        }
        began = now;
        index += 1;
        watch.turn()?;
    }
    Ok(vec![index])
}

/// The time between two moments, in ns.
#[inline]
pub(super) fn nanoseconds(from: Instant, to: Instant) -> u64 {
    u64::try_from((to - from).as_nanos()).unwrap_or(u64::MAX)
}
