//! The client loop of `ib_read_lat` and `ib_atomic_lat`: one request, its completion, the next. The
//! server is passive.

use super::SizeRun;
use super::monitor::{LoopMonitor, LoopState};
use super::pingpong::pause;
use crate::engine::one_sided::OneSided;
use crate::engine::requester::Requester;
use crate::engine::transport::TestTransport;
use crate::failure::Failure;

/// The recorder and `count` (completed requests) are valid even when it fails.
///
/// # Errors
/// [`Failure::Interrupted`]; else [`Failure::Test`] or [`Failure::Lost`]: the peer is gone, or the
/// device refuses.
pub(super) fn run<T: TestTransport>(
    mut requests: OneSided<'_, T, impl Requester<T>>,
    monitor: &mut LoopMonitor<'_>,
    size: SizeRun<'_>,
) -> Result<(), Failure> {
    let SizeRun {
        clock,
        gap,
        recorder,
        warm_up,
        count: answered,
        ..
    } = size;
    for _ in 0..warm_up {
        requests.post()?;
        while !requests.is_complete()? {
            monitor.idle()?;
        }
        monitor.busy()?;
    }
    let total = recorder.total();
    recorder.start(clock.now());
    monitor.start(recorder.end());
    let mut began = clock.now();
    let mut trip = None;
    while *answered < total && !recorder.is_over(began) {
        if let Some(gap) = gap {
            began = pause(clock, monitor, gap)?;
        }
        requests.post()?;
        if let Some((began, ended)) = trip.take() {
            recorder.record(began, ended);
        }
        while !requests.is_complete()? {
            if monitor.idle()? == LoopState::TimeUp {
                return Ok(());
            }
        }
        monitor.busy()?;
        *answered += 1;
        let now = clock.now();
        trip = Some((began, now));
        began = now;
    }
    if let Some((began, ended)) = trip {
        recorder.record(began, ended);
    }
    Ok(())
}
