//! The client loop of `ib_read_lat` and `ib_atomic_lat`: one request, its completion, the next. The
//! server is passive.

use super::Size;
use super::rally::pause;
use super::watch::{Turn, Watch};
use crate::failure::Failure;

/// A queue pair whose requests the peer's device completes by itself (READ, atomics).
pub(super) trait Asker {
    /// Posts a request.
    ///
    /// # Errors
    /// [`Failure::Test`] when it is refused.
    fn ask(&mut self) -> Result<(), Failure>;

    /// Polls for the completion of the request.
    ///
    /// # Errors
    /// [`Failure::Test`] when it has failed.
    fn is_answered(&mut self) -> Result<bool, Failure>;
}

/// Runs one size. The recorder holds what was measured and `count` the completed requests, even
/// when it fails.
///
/// # Errors
/// [`Failure::Interrupted`]; else [`Failure::Test`] or [`Failure::Lost`]: the peer is gone, or the
/// device refuses.
pub(super) fn run(asker: &mut impl Asker, watch: &mut Watch<'_>, size: Size<'_>) -> Result<(), Failure> {
    let Size {
        clock,
        gap,
        tally,
        warm_up,
        count: answered,
        ..
    } = size;
    for _ in 0..warm_up {
        asker.ask()?;
        while !asker.is_answered()? {
            watch.idle()?;
        }
        watch.busy()?;
    }
    let total = tally.total();
    tally.start(clock.now());
    watch.start(tally.end());
    let mut began = clock.now();
    let mut trip = None;
    while *answered < total && !tally.is_over(began) {
        if let Some(gap) = gap {
            began = pause(clock, watch, gap)?;
        }
        asker.ask()?;
        if let Some((began, ended)) = trip.take() {
            tally.record(began, ended);
        }
        while !asker.is_answered()? {
            if watch.idle()? == Turn::Over {
                return Ok(());
            }
        }
        watch.busy()?;
        *answered += 1;
        let now = clock.now();
        trip = Some((began, now));
        began = now;
    }
    if let Some((began, ended)) = trip {
        tally.record(began, ended);
    }
    Ok(())
}
