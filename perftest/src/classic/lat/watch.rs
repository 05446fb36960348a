//! What a loop does while it waits: make way for others, and look now and then whether the time is up, the user wants to stop, or the other end is gone.
//!
//! None of the C tools says on the connection that it has finished a latency test; some close it as soon as they have. So a connection that is closed while messages are still coming is no failure;
//! one that is closed while nothing comes is.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use crate::classic::settings::{Settings, Transport};
use crate::classic::spin::Spin;
use crate::classic::wire::{self, Conversation};
use crate::failure::Failure;
use crate::stats::Clock;

/// A waiting loop looks at the clock once in so many turns.
const TURNS: u32 = 256;
/// How often the connection is looked at.
const LOOK_NS: u64 = 50_000_000;
/// How long the two ends of a test may be apart: messages may still come for so long from an end that has closed the connection, and one that has ended may be as much in closing it.
const GRACE_NS: u64 = 500_000_000;
/// How long a wait for the connection's end sleeps.
const NAP: Duration = Duration::from_millis(1);
/// How long the next message may take where one can get lost, besides the gaps between messages.
const LOST: Duration = Duration::from_secs(10);
/// How long it may take elsewhere.
const SILENT: Duration = wire::ANSWER;

/// Whether to go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Turn {
    /// Go on.
    On,
    /// The time is up.
    Over,
}

/// The looking.
#[derive(Debug)]
pub(super) struct Watch<'a> {
    peer: wire::Watch<'a>,
    address: SocketAddr,
    clock: &'a Clock,
    /// When the time is up.
    end_ns: u64,
    /// How long to wait for one message.
    longest: Duration,
    /// Whether messages get lost.
    loses: bool,
    /// Whether each turn takes long, as one does that sleeps.
    sleeps: bool,
    turns: u32,
    spin: Spin,
    next_look_ns: u64,
    /// Since when nothing has come, as far as looked.
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

    /// A size begins, and ends by itself or when this time has come.
    pub(super) fn start(&mut self, end_ns: u64) {
        self.end_ns = end_ns;
        self.quiet_since_ns = None;
    }

    /// A turn that found something.
    ///
    /// # Errors
    /// As [`idle`](Self::idle).
    #[inline]
    pub(super) fn busy(&mut self) -> Result<(), Failure> {
        self.spin.found();
        self.quiet_since_ns = None;
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(TURNS) {
            // Where each message is there at the first look nothing else would notice Ctrl-C. Whether the time is up the loop sees by itself.
            self.look()?;
        }
        Ok(())
    }

    /// A turn that found nothing.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; [`Failure::Lost`] when the peer is gone; [`Failure::Test`] when a message is.
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

    /// Whether the other end closes the connection, at once or as soon as it has printed what it measured.
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

    /// Whether the time was nearly up, and the other end closes the connection: it has ended first.
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

    /// What it means that nothing has come for so long.
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
