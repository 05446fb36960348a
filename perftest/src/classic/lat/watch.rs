//! What a waiting loop does: yields the CPU, and polls now and then for time-up, Ctrl-C and a lost
//! peer.
//!
//! None of the C tools reports on the control connection that it has finished a latency test; some
//! close it at once. So a connection that closes while messages still arrive is no failure; one
//! that closes while nothing arrives is.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use crate::classic::settings::{Settings, Transport};
use crate::classic::spin::Spin;
use crate::classic::wire::{self, Conversation};
use crate::failure::Failure;
use crate::stats::Clock;

/// A waiting loop reads the clock once in so many iterations.
const TURNS: u32 = 256;
/// How often the control connection is polled.
const LOOK_NS: u64 = 50_000_000;
/// How far apart the two ends may be: messages may still arrive for so long from an end that has
/// closed the connection, and an end that is done may be as late in closing it.
const GRACE_NS: u64 = 500_000_000;
/// Sleep between two polls while waiting for the connection to close.
const NAP: Duration = Duration::from_millis(1);
/// How long the next message may take on a transport that can lose it, besides the gaps between
/// messages.
const LOST: Duration = Duration::from_secs(10);
/// How long the next message may take on a reliable transport.
const SILENT: Duration = wire::ANSWER;

/// Whether to continue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Turn {
    On,
    /// The test time is over.
    Over,
}

/// Polls for the events that end a loop.
#[derive(Debug)]
pub(super) struct Watch<'a> {
    peer: wire::Watch<'a>,
    address: SocketAddr,
    clock: &'a Clock,
    /// When the time is up.
    end_ns: u64,
    /// How long to wait for one message.
    longest: Duration,
    /// Whether the transport can lose messages.
    loses: bool,
    /// Whether each iteration sleeps, so that every one may poll.
    sleeps: bool,
    turns: u32,
    spin: Spin,
    next_look_ns: u64,
    /// Since when nothing has arrived, as far as polled.
    quiet_since_ns: Option<u64>,
}

impl<'a> Watch<'a> {
    /// For one size of a test.
    pub(super) fn new(conversation: &'a Conversation, clock: &'a Clock, settings: &Settings) -> Watch<'a> {
        let loses = settings.transport != Transport::Rc;
        Watch {
            peer: conversation.watch(),
            address: conversation.peer(),
            clock,
            end_ns: u64::MAX,
            longest: if loses { LOST } else { SILENT } + 2 * settings.gap.unwrap_or_default(),
            loses,
            sleeps: settings.events,
            turns: 0,
            spin: Spin::default(),
            next_look_ns: 0,
            quiet_since_ns: None,
        }
    }

    /// Starts a size, which ends by itself or at `end_ns`.
    pub(super) fn start(&mut self, end_ns: u64) {
        self.end_ns = end_ns;
        self.quiet_since_ns = None;
    }

    /// An iteration that made progress.
    ///
    /// # Errors
    /// As [`idle`](Self::idle).
    #[inline]
    pub(super) fn busy(&mut self) -> Result<(), Failure> {
        self.spin.found();
        self.quiet_since_ns = None;
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(TURNS) {
            // Where every message is there at the first poll, only this notices Ctrl-C. The loop
            // itself checks for time-up.
            self.look()?;
        }
        Ok(())
    }

    /// An iteration that found nothing.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; [`Failure::Lost`] when the peer is gone; [`Failure::Test`] when a
    /// message is lost.
    #[inline]
    pub(super) fn idle(&mut self) -> Result<Turn, Failure> {
        if self.sleeps {
            return self.look();
        }
        self.spin.nothing();
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(TURNS) {
            return self.look();
        }
        Ok(Turn::On)
    }

    /// Whether the peer closes the connection, at once or after printing its results.
    #[cold]
    pub(super) fn closes(&self) -> bool {
        let until = self.clock.now().saturating_add(GRACE_NS);
        loop {
            if matches!(self.peer.ask(), Err(Failure::Lost { .. })) {
                return true;
            }
            if self.clock.now() >= until {
                return false;
            }
            thread::sleep(NAP);
        }
    }

    /// Whether the time was nearly up and the peer closes the connection: it has ended first.
    #[cold]
    pub(super) fn ends_with_peer(&self) -> bool {
        self.end_ns < u64::MAX && self.clock.now().saturating_add(GRACE_NS) >= self.end_ns && self.closes()
    }

    #[cold]
    fn look(&mut self) -> Result<Turn, Failure> {
        let now = self.clock.now();
        if now >= self.end_ns {
            return Ok(Turn::Over);
        }
        let quiet_for = now - *self.quiet_since_ns.get_or_insert(now);
        if now < self.next_look_ns {
            return Ok(Turn::On);
        }
        self.next_look_ns = now + LOOK_NS;
        match self.peer.ask() {
            Ok(_) if u128::from(quiet_for) >= self.longest.as_nanos() => Err(self.silent()),
            Ok(_) => Ok(Turn::On),
            Err(Failure::Lost { .. }) if quiet_for < GRACE_NS => Ok(Turn::On),
            Err(failure) => Err(failure),
        }
    }

    /// The failure when no message has arrived for `longest`.
    #[cold]
    fn silent(&self) -> Failure {
        let seconds = self.longest.as_secs();
        if self.loses {
            Failure::test(format!(
                "peer {}: no message has come for {seconds} s: one was lost, which this transport does not repair (-c)",
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
