//! The ping-pong of `ib_write_lat` and `ib_send_lat`: one end sends first, and each answers every
//! message.
//!
//! Both ends know the number of messages, or the duration, so neither reports that it has finished.
//! A round trip is the time from a message to its answer; at the responder, from its answer to the
//! peer's next message. A sample is recorded after the next message is posted, so that recording
//! does not lengthen round trips.

use std::time::Duration;

use super::Size;
use super::watch::{Turn, Watch};
use crate::failure::Failure;
use crate::stats::Clock;

/// A queue pair and its memory, as one end of a ping-pong.
pub(super) trait Racket {
    /// Sets the message size, which only grows.
    fn resize(&mut self, bytes: usize);

    /// Whether a send queue slot and a buffer are free; polls for completions that free them.
    ///
    /// # Errors
    /// [`Failure::Test`] when a request has failed.
    fn is_ready(&mut self) -> Result<bool, Failure>;

    /// Sends message `index`, counted from 1. The last of a size is signaled.
    ///
    /// # Errors
    /// [`Failure::Test`] when it is refused.
    fn hit(&mut self, index: u64, last: bool) -> Result<(), Failure>;

    /// Polls whether the peer's message `index` has arrived.
    ///
    /// # Errors
    /// As [`is_ready`](Self::is_ready).
    fn has_come(&mut self, index: u64) -> Result<bool, Failure>;

    /// Polls whether all sends have completed: sent, or on a reliable transport acknowledged.
    ///
    /// # Errors
    /// As [`is_ready`](Self::is_ready).
    fn is_settled(&mut self) -> Result<bool, Failure>;
}

/// Which end of the ping-pong this is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// Sends first.
    Begins,
    /// Answers each message.
    Answers,
}

/// Runs one size. The recorder holds what was measured and `count` the messages received, even when
/// it fails.
///
/// # Errors
/// [`Failure::Interrupted`]; else [`Failure::Test`] or [`Failure::Lost`]: the peer is gone, or the
/// device refuses.
pub(super) fn play(end: End, racket: &mut impl Racket, watch: &mut Watch<'_>, size: Size<'_>) -> Result<(), Failure> {
    match exchange(end, racket, watch, size) {
        // In a timed test each end stops by itself and sends nothing about it: the end that started
        // first is gone while the other's last message is in flight.
        Err(failure) if !matches!(failure, Failure::Interrupted) && watch.ends_with_peer() => Ok(()),
        outcome => outcome,
    }
}

fn exchange(end: End, racket: &mut impl Racket, watch: &mut Watch<'_>, size: Size<'_>) -> Result<(), Failure> {
    let Size {
        bytes,
        clock,
        gap,
        tally,
        count: come,
        warm_up: _,
    } = size;
    racket.resize(bytes);
    let total = tally.total();
    // The time starts with the first message: a C tool may take 250 ms from the barrier to its
    // loop, and starts its clock there. The end that starts first ends first, and leaves the other
    // waiting.
    watch.start(u64::MAX);
    if end == End::Answers {
        if await_message(racket, watch, 1)? == Turn::Over {
            return Ok(());
        }
        *come = 1;
        tally.start(clock.now());
        watch.start(tally.end());
    }
    let mut began = clock.now();
    let mut trip = None;
    for index in 1..=total {
        if let Some(gap) = gap {
            began = pause(clock, watch, gap)?;
        }
        while !racket.is_ready()? {
            if watch.idle()? == Turn::Over {
                return Ok(());
            }
        }
        racket.hit(index, index == total)?;
        if let Some((began, ended)) = trip.take() {
            tally.record(began, ended);
        }
        if *come == total {
            // The last message arrived before it was answered.
            break;
        }
        if await_message(racket, watch, *come + 1)? == Turn::Over {
            return Ok(());
        }
        *come += 1;
        let now = clock.now();
        if index == 1 && end == End::Begins {
            tally.start(now);
            watch.start(tally.end());
        } else {
            trip = Some((began, now));
        }
        if tally.is_over(now) {
            break;
        }
        began = now;
    }
    if let Some((began, ended)) = trip {
        tally.record(began, ended);
    }
    if total < u64::MAX {
        settle(racket, watch)?;
    }
    Ok(())
}

#[inline]
fn await_message(racket: &mut impl Racket, watch: &mut Watch<'_>, index: u64) -> Result<Turn, Failure> {
    while !racket.has_come(index)? {
        if watch.idle()? == Turn::Over {
            return Ok(Turn::Over);
        }
    }
    watch.busy()?;
    Ok(Turn::On)
}

/// Drains the send queue, so that the peer has the last message. Not in a timed test, where the
/// ends stop anywhere.
fn settle(racket: &mut impl Racket, watch: &mut Watch<'_>) -> Result<(), Failure> {
    loop {
        match racket.is_settled() {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            // The peer may have seen the last message and be gone before its device acknowledged
            // it.
            Err(_) if watch.closes() => return Ok(()),
            Err(failure) => return Err(failure),
        }
        match watch.idle() {
            Ok(_) => {}
            Err(Failure::Lost { .. }) => return Ok(()),
            Err(failure) => return Err(failure),
        }
    }
}

/// Waits for `gap`, or until the time is up. Returns the time.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Lost`] when the peer is gone.
pub(super) fn pause(clock: &Clock, watch: &mut Watch<'_>, gap: Duration) -> Result<u64, Failure> {
    let until = clock.now().saturating_add(gap.as_nanos() as u64);
    loop {
        let now = clock.now();
        if now >= until || watch.idle()? == Turn::Over {
            watch.busy()?;
            return Ok(now);
        }
    }
}
