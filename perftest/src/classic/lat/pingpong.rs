//! The ping-pong of `ib_write_lat` and `ib_send_lat`: one end sends first, and each answers every
//! message.
//!
//! Both ends know the number of messages or the duration, so neither reports its end. The
//! responder's round trip runs from its answer to the next message. A sample is recorded after the
//! next message is posted, outside the round trip.

use std::time::Duration;

use super::SizeRun;
use super::monitor::{LoopMonitor, LoopState};
use crate::engine::pingpong::PingPong;
use crate::engine::requester::MessageOp;
use crate::engine::transport::TestTransport;
use crate::failure::Failure;
use crate::stats::Clock;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    /// Sends first.
    Initiator,
    /// Answers each message.
    Responder,
}

/// The recorder and `count` (messages received) are valid even when it fails.
///
/// # Errors
/// [`Failure::Interrupted`]; else [`Failure::Test`] or [`Failure::Lost`]: the peer is gone, or the
/// device refuses.
pub(super) fn run<T: TestTransport>(
    role: Role,
    pingpong: &mut PingPong<'_, T, impl MessageOp<T>>,
    monitor: &mut LoopMonitor<'_>,
    size: SizeRun<'_>,
) -> Result<(), Failure> {
    match exchange(role, pingpong, monitor, size) {
        // In a timed test each end stops by itself and sends nothing about it: the end that started
        // first is gone while the other's last message is in flight.
        Err(failure) if !matches!(failure, Failure::Interrupted) && monitor.peer_ended_first() => Ok(()),
        outcome => outcome,
    }
}

fn exchange<T: TestTransport>(
    role: Role,
    pingpong: &mut PingPong<'_, T, impl MessageOp<T>>,
    monitor: &mut LoopMonitor<'_>,
    size: SizeRun<'_>,
) -> Result<(), Failure> {
    let SizeRun {
        clock,
        gap,
        recorder,
        count: come,
        ..
    } = size;
    let total = recorder.total();
    // The time starts with the first message: a C tool starts its clock up to 250 ms after the
    // barrier.
    monitor.start(u64::MAX);
    if role == Role::Responder {
        if await_message(pingpong, monitor, 0)? == LoopState::TimeUp {
            return Ok(());
        }
        *come = 1;
        recorder.start(clock.now());
        monitor.start(recorder.end());
    }
    let mut began = clock.now();
    let mut trip = None;
    for index in 0..total {
        if let Some(gap) = gap {
            began = pause(clock, monitor, gap)?;
        }
        while !pingpong.is_ready()? {
            if monitor.idle()? == LoopState::TimeUp {
                return Ok(());
            }
        }
        pingpong.send(index, index + 1 == total)?;
        if let Some((began, ended)) = trip.take() {
            recorder.record(began, ended);
        }
        if *come == total {
            // The last message arrived before it was answered.
            break;
        }
        if await_message(pingpong, monitor, *come)? == LoopState::TimeUp {
            return Ok(());
        }
        *come += 1;
        let now = clock.now();
        if index == 0 && role == Role::Initiator {
            recorder.start(now);
            monitor.start(recorder.end());
        } else {
            trip = Some((began, now));
        }
        if recorder.is_over(now) {
            break;
        }
        began = now;
    }
    if let Some((began, ended)) = trip {
        recorder.record(began, ended);
    }
    if total < u64::MAX {
        drain(pingpong, monitor)?;
    }
    Ok(())
}

#[inline]
fn await_message<T: TestTransport>(
    pingpong: &mut PingPong<'_, T, impl MessageOp<T>>,
    monitor: &mut LoopMonitor<'_>,
    index: u64,
) -> Result<LoopState, Failure> {
    while !pingpong.has_arrived(index)? {
        if monitor.idle()? == LoopState::TimeUp {
            return Ok(LoopState::TimeUp);
        }
    }
    monitor.busy()?;
    Ok(LoopState::Continue)
}

/// Drains the send queue, so that the peer has the last message. Not in a timed test, where the
/// ends stop anywhere.
fn drain<T: TestTransport>(
    pingpong: &mut PingPong<'_, T, impl MessageOp<T>>,
    monitor: &mut LoopMonitor<'_>,
) -> Result<(), Failure> {
    loop {
        match pingpong.is_drained() {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            // The peer may be gone before its device has acknowledged the last message.
            Err(_) if monitor.peer_closes() => return Ok(()),
            Err(failure) => return Err(failure),
        }
        match monitor.idle() {
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
pub(super) fn pause(clock: &Clock, monitor: &mut LoopMonitor<'_>, gap: Duration) -> Result<u64, Failure> {
    let until = clock.now().saturating_add(gap.as_nanos() as u64);
    loop {
        let now = clock.now();
        if now >= until || monitor.idle()? == LoopState::TimeUp {
            monitor.busy()?;
            return Ok(now);
        }
    }
}
