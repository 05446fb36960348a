//! The ping-pong of `ib_write_lat` and `ib_send_lat`: one end sends first, and each answers what has come.
//!
//! Both ends know how many messages there are, or for how long: neither says that it has finished. A round trip is the time from a message to the answer; at the end that answers, to the other's
//! next message. It is entered into the record after the next message has left, so that keeping records does not make the trips longer.

use std::time::Duration;

use super::Size;
use super::watch::{Turn, Watch};
use crate::failure::Failure;
use crate::stats::Clock;

/// A queue pair and its memory, as one end of a ping-pong.
pub(super) trait Racket {
    /// Sends messages of so many bytes from now on, more than any so far.
    fn resize(&mut self, bytes: usize);

    /// Whether there is room for another message; looks for completions that make some.
    ///
    /// # Errors
    /// [`Failure::Test`] when a request has failed.
    fn is_ready(&mut self) -> Result<bool, Failure>;

    /// Sends message `index`, the first of which is 1. The last of a size asks for a completion.
    ///
    /// # Errors
    /// [`Failure::Test`] when it is refused.
    fn hit(&mut self, index: u64, last: bool) -> Result<(), Failure>;

    /// Looks whether the other end's message `index` has come.
    ///
    /// # Errors
    /// As [`is_ready`](Self::is_ready).
    fn has_come(&mut self, index: u64) -> Result<bool, Failure>;

    /// Looks whether all that was sent has left, or on a reliable transport arrived.
    ///
    /// # Errors
    /// As [`is_ready`](Self::is_ready).
    fn is_settled(&mut self) -> Result<bool, Failure>;
}

/// Which end this is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// Sends first.
    Begins,
    /// Sends when something has come.
    Answers,
}

/// One size. What was measured is in its tally even when it fails, and in its count how many messages came.
///
/// # Errors
/// [`Failure::Interrupted`]; else [`Failure::Test`] or [`Failure::Lost`]: the peer is gone, or the device refuses.
pub(super) fn play(end: End, racket: &mut impl Racket, watch: &mut Watch<'_>, size: Size<'_>) -> Result<(), Failure> {
    match exchange(end, racket, watch, size) {
        // By the clock each end stops by itself, and neither says so: the one that began sooner is gone while the other's last message is under way.
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
    // The time begins with the first message: a C tool may take a quarter of a second from the barrier to its loop, and starts its own clock there. Who has started sooner ends sooner, and leaves it waiting.
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
            // The last has come before it was answered.
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

/// Waits until the other end has the last message; only a test of a number of messages has one, by the clock the ends stop wherever they are.
fn settle(racket: &mut impl Racket, watch: &mut Watch<'_>) -> Result<(), Failure> {
    loop {
        match racket.is_settled() {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            // The other end may have seen the last message, and be gone before its device has acknowledged it.
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

/// Waits so long, or until the time is up. Returns the time.
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
