//! Latency tests: one message in flight.

pub(crate) mod pingpong;

use doorbell_verbs::ReliableConnection;

use super::bw::memory::BwMemory;
use super::monitor::LoopMonitor;
use super::test_end::{QpMemory, Test, TestEnd};
use crate::engine::lat::{self, LatParams, Trips};
use crate::engine::one_sided::OneSided;
use crate::engine::requester::Requester;
use crate::engine::samples::Samples;
use crate::failure::Failure;

/// The client: sends first and measures. The samples hold what was measured even when it fails.
/// Returns the messages sent.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when data was wrong or the peer is lost.
pub(crate) fn run(test: &Test<'_>, trips: &mut impl Trips, samples: &mut Samples<'_>) -> Result<Vec<u64>, Failure> {
    let warmup = test.plan.warmup(test.bytes);
    let params = LatParams {
        initiates: true,
        warmup,
        total: test
            .plan
            .iterations(test.bytes)
            .map_or(u64::MAX, |iterations| warmup.saturating_add(iterations)),
    };
    let mut count = 0;
    lat::run(trips, &mut LoopMonitor::new(test), samples, params, &mut count)?;
    Ok(vec![count])
}

/// The client of `lat read` and `lat atomic`. It posts through the requesters of `bw`, so
/// `--verify` checks the same.
///
/// # Errors
/// As [`run`].
pub(crate) fn one_sided<R, M>(
    test: &Test<'_>,
    test_end: &mut TestEnd<ReliableConnection, BwMemory<R, M>>,
    samples: &mut Samples<'_>,
) -> Result<Vec<u64>, Failure>
where
    R: QpMemory<Connected: Requester<ReliableConnection>>,
    M: QpMemory,
{
    let TestEnd { end, memory } = test_end;
    match memory.first_mut() {
        Some((Some(requester), _)) => run(test, &mut OneSided::new(end, requester, test.plan.events), samples),
        _ => Ok(Vec::new()),
    }
}
