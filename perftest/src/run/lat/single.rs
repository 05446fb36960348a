//! The client of `lat read` and `lat atomic`: one request, its completion, the next.
//!
//! It posts through the requesters of `bw`, so `--verify` checks the same.

use super::super::bw::bw_loop::BwRequester;
use super::super::meter::{LatencyMeter, Meter};
use super::super::monitor::{Deadline, LoopMonitor};
use super::super::test_end::{Test, TestEnd};
use crate::failure::{Failure, refused};
use crate::stats::Latency;

/// Runs the test at one size. The meter holds what was measured even when it fails.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when data was wrong or the peer is lost.
pub(crate) fn run<F: BwRequester>(
    test: &Test<'_>,
    test_end: &mut TestEnd<F>,
    meter: &mut Meter<'_, Latency>,
) -> Result<Vec<u64>, Failure> {
    let TestEnd { cq, qps } = test_end;
    let Some(test_qp) = qps.first_mut() else {
        return Ok(Vec::new());
    };
    test_qp.memory.attach(test, &test_qp.peer)?;
    let warmup = test.plan.warmup(test.bytes);
    let total = test
        .plan
        .iterations(test.bytes)
        .map_or(u64::MAX, |iterations| warmup.saturating_add(iterations));
    let mut monitor = LoopMonitor::of_client(test);
    let mut deadline = Deadline::after(test.plan.duration());
    let mut latency_meter = LatencyMeter::new(meter, test.plan.rate_per_s);
    let (mut index, mut over) = (0, false);
    while index < total && !over {
        if index == warmup {
            deadline.start(latency_meter.start());
        }
        if !latency_meter.is_due() {
            while !latency_meter.is_due() {
                monitor.idle()?;
            }
            // Resets the idle count; otherwise the wait for the answer would yield the CPU at once.
            monitor.busy()?;
        }
        let memory = &mut test_qp.memory;
        test_qp
            .qp
            .post(|batch| memory.stage(batch, index, None, true))
            .map_err(|e| test_qp.peer.refused(&e))?;
        let mut completed = false;
        while !completed {
            for done in cq.poll().map_err(refused)? {
                if let Err(failure) = done.result() {
                    return Err(test_qp.peer.failed(&failure));
                }
                completed = true;
                test_qp
                    .memory
                    .retire(done)
                    .map_err(|wrong| Failure::test(format!("{}: {wrong}", test_qp.peer)))?;
            }
            if !completed {
                monitor.idle()?;
            }
        }
        over = deadline.is_over_at(latency_meter.end());
        index += 1;
        monitor.busy()?;
    }
    Ok(vec![index])
}
