//! The loop of every latency test: one message at a time, each timed.
//!
//! A sample is recorded after the next message is sent, outside the round trip.

use super::samples::Samples;
use crate::failure::Failure;

/// Messages that are sent and answered one at a time.
pub(crate) trait Trips {
    /// Whether the next message can be sent; polls for completions that free its place.
    ///
    /// # Errors
    /// [`Failure::Test`] when a request has failed or data was wrong.
    fn is_ready(&mut self) -> Result<bool, Failure>;

    /// Sends message `index`, counted from 0; the last of a size is signaled. It must be ready.
    ///
    /// # Errors
    /// [`Failure::Test`] when it is refused.
    fn send(&mut self, index: u64, last: bool) -> Result<(), Failure>;

    /// What to report when the answer to message `index` is lost.
    fn lost(&self, index: u64) -> Failure;

    /// Polls whether answer `index`, counted from 0, has arrived.
    ///
    /// # Errors
    /// [`Failure::Test`] when a request has failed or data was wrong.
    fn has_arrived(&mut self, index: u64) -> Result<bool, Failure>;
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LoopState {
    Continue,
    TimeUp,
    /// Nothing arrives any more, on a transport that loses messages.
    Quiet,
}

/// What a loop does beside its work: yields the CPU, polls for Ctrl-C and a lost peer.
pub(crate) trait Monitor {
    /// Something has arrived.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; [`Failure::Test`] or [`Failure::Lost`] when the peer is gone.
    fn busy(&mut self) -> Result<(), Failure>;

    /// # Errors
    /// As [`Monitor::busy`].
    fn idle(&mut self) -> Result<LoopState, Failure>;

    /// The measurement starts; it ends at `end_ns` of the test's clock.
    fn start(&mut self, _end_ns: u64) {}
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct LatParams {
    /// Whether this end sends first; otherwise it waits for a message, which starts the time.
    pub(crate) initiates: bool,
    /// Messages before the measurement, where this end sends first.
    pub(crate) warmup: u64,
    /// Messages in all.
    pub(crate) total: u64,
}

/// The samples and `count` (messages arrived) are valid even when it fails.
///
/// # Errors
/// [`Failure::Interrupted`]; else [`Failure::Test`] or [`Failure::Lost`]: the peer is gone, the
/// device refuses, or data was wrong.
pub(crate) fn run(
    trips: &mut impl Trips,
    monitor: &mut impl Monitor,
    samples: &mut Samples<'_>,
    params: LatParams,
    count: &mut u64,
) -> Result<(), Failure> {
    let result = exchange(trips, monitor, samples, params, count);
    samples.finish();
    result
}

fn exchange(
    trips: &mut impl Trips,
    monitor: &mut impl Monitor,
    samples: &mut Samples<'_>,
    params: LatParams,
    count: &mut u64,
) -> Result<(), Failure> {
    if !params.initiates {
        while !trips.has_arrived(0)? {
            if monitor.idle()? == LoopState::TimeUp {
                return Ok(());
            }
        }
        *count = 1;
        monitor.start(samples.start());
    }
    for index in 0..params.total {
        if params.initiates && index == params.warmup {
            monitor.start(samples.start());
        }
        samples.await_due(monitor)?;
        while !trips.is_ready()? {
            if monitor.idle()? == LoopState::TimeUp {
                return Ok(());
            }
        }
        trips.send(index, index + 1 == params.total)?;
        samples.record();
        if *count == params.total {
            // The last message arrived before it was answered.
            break;
        }
        while !trips.has_arrived(*count)? {
            match monitor.idle()? {
                LoopState::Continue => {}
                LoopState::TimeUp => return Ok(()),
                LoopState::Quiet => return Err(trips.lost(*count)),
            }
        }
        let over = samples.end();
        *count += 1;
        // Resets the idle count; otherwise the loop would soon yield the CPU at every poll, which
        // costs more than the message.
        monitor.busy()?;
        if over {
            break;
        }
    }
    Ok(())
}
