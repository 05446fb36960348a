//! The client loop of `ib_read_lat` and `ib_atomic_lat`: one request, its completion, the next. The
//! server is passive.

use super::SizeRun;
use super::monitor::{LoopMonitor, LoopState};
use super::pingpong::pause;
use crate::failure::Failure;

/// A queue pair whose requests the peer's device completes by itself (READ, atomics).
pub(super) trait LatRequester {
    /// # Errors
    /// [`Failure::Test`] when it is refused.
    fn post(&mut self) -> Result<(), Failure>;

    /// # Errors
    /// [`Failure::Test`] when it has failed.
    fn is_complete(&mut self) -> Result<bool, Failure>;
}

/// The recorder and `count` (completed requests) are valid even when it fails.
///
/// # Errors
/// [`Failure::Interrupted`]; else [`Failure::Test`] or [`Failure::Lost`]: the peer is gone, or the
/// device refuses.
pub(super) fn run(
    requester: &mut impl LatRequester,
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
        requester.post()?;
        while !requester.is_complete()? {
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
        requester.post()?;
        if let Some((began, ended)) = trip.take() {
            recorder.record(began, ended);
        }
        while !requester.is_complete()? {
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
