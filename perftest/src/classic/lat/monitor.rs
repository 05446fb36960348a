//! What a waiting loop does: yields the CPU, and polls now and then for time-up, Ctrl-C and a lost
//! peer.
//!
//! None of the C tools reports the end of a latency test on the control connection; some close it
//! at once. So a close is a failure only when no messages arrive.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use crate::classic::settings::{Settings, Transport};
use crate::classic::spin_wait::SpinWait;
use crate::classic::wire::{self, ControlConnection};
use crate::engine::lat::{LoopState, Monitor};
use crate::failure::Failure;
use crate::stats::Clock;

/// A timed test whose peer was silent for so long before its end has lost it.
const QUIET_END_NS: u64 = 5_000_000_000;

/// A waiting loop reads the clock once in so many iterations.
const CHECK_INTERVAL: u32 = 256;
const POLL_INTERVAL_NS: u64 = 50_000_000;
/// How far apart the two ends may be: messages may still arrive for so long from an end that has
/// closed the connection, and an end that is done may be as late in closing it.
const GRACE_NS: u64 = 500_000_000;
/// Sleep between two polls while waiting for the connection to close.
const SLEEP: Duration = Duration::from_millis(1);
/// How long the next message may take on a transport that can lose it, besides the gaps between
/// messages.
const LOSS_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the next message may take on a reliable transport.
const MESSAGE_TIMEOUT: Duration = wire::REPLY_TIMEOUT;

#[derive(Debug)]
pub(super) struct LoopMonitor<'a> {
    peer: wire::PeerMonitor<'a>,
    address: SocketAddr,
    clock: &'a Clock,
    end_ns: u64,
    /// How long to wait for one message.
    longest: Duration,
    lossy: bool,
    /// Whether each iteration sleeps, so that every one may poll.
    sleeps: bool,
    iterations: u32,
    spin: SpinWait,
    next_poll_ns: u64,
    /// Since when nothing has arrived, as far as polled.
    quiet_since_ns: Option<u64>,
}

impl<'a> LoopMonitor<'a> {
    pub(super) fn new(control: &'a ControlConnection, clock: &'a Clock, settings: &Settings) -> LoopMonitor<'a> {
        let lossy = settings.transport != Transport::Rc;
        LoopMonitor {
            peer: control.monitor(),
            address: control.peer(),
            clock,
            end_ns: u64::MAX,
            longest: if lossy { LOSS_TIMEOUT } else { MESSAGE_TIMEOUT } + 2 * settings.gap.unwrap_or_default(),
            lossy,
            sleeps: settings.events,
            iterations: 0,
            spin: SpinWait::default(),
            next_poll_ns: 0,
            quiet_since_ns: None,
        }
    }

    /// Whether the peer closes the connection, at once or after printing its results.
    #[cold]
    pub(super) fn peer_closes(&self) -> bool {
        let until = self.clock.now().saturating_add(GRACE_NS);
        loop {
            if matches!(self.peer.poll_now(), Err(Failure::Lost { .. })) {
                return true;
            }
            if self.clock.now() >= until {
                return false;
            }
            thread::sleep(SLEEP);
        }
    }

    /// Whether the time was nearly up and the peer closes the connection: it has ended first.
    #[cold]
    pub(super) fn peer_ended_first(&self) -> bool {
        self.end_ns < u64::MAX && self.clock.now().saturating_add(GRACE_NS) >= self.end_ns && self.peer_closes()
    }

    #[cold]
    fn check(&mut self) -> Result<LoopState, Failure> {
        let now = self.clock.now();
        if now >= self.end_ns {
            // A peer that ended first was silent for a moment only. One that was killed after it
            // acknowledged the last message leaves no other trace.
            let quiet_for = self.quiet_since_ns.map_or(0, |since| now - since);
            if !self.lossy && quiet_for >= QUIET_END_NS {
                return Err(self.no_message(Duration::from_nanos(quiet_for)));
            }
            return Ok(LoopState::TimeUp);
        }
        let quiet_for = now - *self.quiet_since_ns.get_or_insert(now);
        if now < self.next_poll_ns {
            return Ok(LoopState::Continue);
        }
        self.next_poll_ns = now + POLL_INTERVAL_NS;
        match self.peer.poll_now() {
            Ok(_) if u128::from(quiet_for) >= self.longest.as_nanos() => Err(self.no_message(self.longest)),
            Ok(_) => Ok(LoopState::Continue),
            Err(Failure::Lost { .. }) if quiet_for < GRACE_NS => Ok(LoopState::Continue),
            Err(failure) => Err(failure),
        }
    }

    /// The failure when no message has arrived for so long.
    #[cold]
    fn no_message(&self, quiet_for: Duration) -> Failure {
        let seconds = quiet_for.as_secs();
        if self.lossy {
            Failure::test(format!(
                "peer {}: no message has arrived for {seconds} s: one was lost, and this transport does not retransmit (-c)",
                self.address
            ))
        } else {
            Failure::Lost {
                control: self.address,
                reason: format!("it has sent no message for {seconds} s"),
            }
        }
    }
}

impl Monitor for LoopMonitor<'_> {
    fn start(&mut self, end_ns: u64) {
        self.end_ns = end_ns;
        self.quiet_since_ns = None;
    }

    #[inline]
    fn busy(&mut self) -> Result<(), Failure> {
        self.spin.progress();
        self.quiet_since_ns = None;
        self.iterations = self.iterations.wrapping_add(1);
        if self.iterations.is_multiple_of(CHECK_INTERVAL) {
            // Where every message is there at the first poll, only this notices Ctrl-C. The loop
            // itself checks for time-up.
            self.check()?;
        }
        Ok(())
    }

    #[inline]
    fn idle(&mut self) -> Result<LoopState, Failure> {
        if self.sleeps {
            return self.check();
        }
        self.spin.idle();
        self.iterations = self.iterations.wrapping_add(1);
        if self.iterations.is_multiple_of(CHECK_INTERVAL) {
            return self.check();
        }
        Ok(LoopState::Continue)
    }
}
