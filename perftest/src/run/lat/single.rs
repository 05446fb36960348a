//! The client of `lat read` and `lat atomic`: one request, its completion, the next.
//!
//! It posts through the requesters of `bw`, so `--verify` checks the same.

use doorbell_verbs::ReliableConnection;

use super::super::meter::{LatencyMeter, Meter};
use super::super::monitor::{Deadline, LoopMonitor};
use super::super::test_end::{QpMemory, Test, TestEnd};
use crate::engine::one_sided::OneSided;
use crate::engine::requester::Requester;
use crate::failure::Failure;
use crate::stats::Latency;

/// Runs the test at one size. The meter holds what was measured even when it fails.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when data was wrong or the peer is lost.
pub(crate) fn run<O>(
    test: &Test<'_>,
    test_end: &mut TestEnd<O>,
    meter: &mut Meter<'_, Latency>,
) -> Result<Vec<u64>, Failure>
where
    O: QpMemory<Connected: Requester<ReliableConnection>>,
{
    let TestEnd { end, memory } = test_end;
    let Some(requester) = memory.first_mut() else {
        return Ok(Vec::new());
    };
    let mut requests = OneSided::new(end, requester, false);
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
        monitor.await_due(&mut latency_meter)?;
        requests.post()?;
        while !requests.is_complete()? {
            monitor.idle()?;
        }
        over = deadline.is_over_at(latency_meter.end());
        index += 1;
        monitor.busy()?;
    }
    Ok(vec![index])
}
