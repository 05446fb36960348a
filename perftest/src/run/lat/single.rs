//! The client of `lat read` and `lat atomic`: one request, its completion, the next.
//!
//! It posts through the same flows as `bw` does, so what `--verify` looks at is the same.

use super::super::bw::stream::Flow;
use super::super::meter::{Meter, Turns};
use super::super::station::{Station, Test, refused};
use super::super::watch::{Deadline, Watch};
use crate::failure::Failure;
use crate::stats::Latency;

/// Runs the test at one size. What was measured is in the meter even when it fails.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when data was wrong or the peer is lost.
pub(crate) fn run<F: Flow>(
    test: &Test<'_>,
    station: &mut Station<F>,
    meter: &mut Meter<'_, Latency>,
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
    let mut turns = Turns::new(meter, test.plan.rate_per_s);
    let (mut index, mut over) = (0, false);
    while index < total && !over {
        if index == warmup {
            deadline.start(turns.start());
        }
        if !turns.is_due() {
            while !turns.is_due() {
                watch.idle()?;
            }
            // Or the waiting for the answer would begin with giving the core away.
            watch.turn()?;
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
        over = deadline.is_over_at(turns.end());
        index += 1;
        watch.turn()?;
    }
    Ok(vec![index])
}
