//! Polling by a hot loop beside its work: now and then, whether the peer has sent a control
//! message, is lost, or the user wants to stop.

use std::time::{Duration, Instant};

use crate::engine::lat::{LoopState, Monitor};
use crate::exchange::{Control, Message, Outcome};
use crate::failure::Failure;
use crate::report::LinkKind;
use crate::run::test_end::Test;
use crate::stats::{Clock, nanoseconds};

/// A loop polls once in so many iterations, a power of two; one that sleeps, every time.
const CHECK_INTERVAL: u32 = 256;
/// Idle iterations before each further one yields the CPU: on an idle core the yield returns at
/// once, and where threads outnumber cores it lets the peer's thread run.
const YIELD_AFTER: u32 = 200;
/// The same where a progress thread may wait for the core.
const YIELD_AFTER_FEW: u32 = 16;
/// The same between processes of this host, where the answer takes longer than those, less than
/// these, and needs no progress thread.
const YIELD_AFTER_FEW_LOCAL: u32 = 64;

/// How long after the last arrival, on a transport that loses messages, the missing ones are lost.
const LAST_ARRIVALS: Duration = Duration::from_millis(500);
/// The same for a message without which a test cannot go on.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct LoopMonitor<'a> {
    control: &'a Control,
    iterations: u32,
    check_mask: u32,
    serving: bool,
    finish: Option<Vec<u64>>,
    outcome: Option<Outcome>,
    idle: u32,
    yield_after: u32,
    /// Where messages may be lost: how long nothing arrives before they are taken to be.
    quiet_after: Option<Duration>,
    quiet_since: Option<Instant>,
}

impl<'a> LoopMonitor<'a> {
    /// An end that serves learns from its peer when that has finished; otherwise the peer sends
    /// nothing that was not requested.
    pub(crate) fn new(test: &Test<'a>) -> LoopMonitor<'a> {
        let yield_after = match test.device.link {
            _ if !is_oversubscribed() => YIELD_AFTER,
            LinkKind::SoftLocal => YIELD_AFTER_FEW_LOCAL,
            _ => YIELD_AFTER_FEW,
        };
        LoopMonitor {
            control: test.control,
            iterations: 0,
            check_mask: if test.plan.events { 0 } else { CHECK_INTERVAL - 1 },
            serving: test.serves(),
            finish: None,
            outcome: None,
            idle: 0,
            yield_after,
            quiet_after: match test.plan.mode.is_reliable() {
                true => None,
                false if test.counts_arrivals() => Some(LAST_ARRIVALS),
                false => Some(ANSWER_TIMEOUT),
            },
            quiet_since: None,
        }
    }

    #[inline]
    fn count(&mut self) -> Result<LoopState, Failure> {
        self.iterations = self.iterations.wrapping_add(1);
        if self.iterations & self.check_mask != 0 {
            return Ok(LoopState::Continue);
        }
        self.poll_control()
    }

    #[inline(never)]
    fn poll_control(&mut self) -> Result<LoopState, Failure> {
        if self.control.attention() {
            self.check()?;
        }
        let is_quiet = self.quiet_after.is_some_and(|limit| {
            let since = self.quiet_since.get_or_insert_with(Instant::now);
            since.elapsed() > limit
        });
        if is_quiet {
            self.quiet_since = None;
            return Ok(LoopState::Quiet);
        }
        Ok(LoopState::Continue)
    }

    #[cold]
    fn check(&mut self) -> Result<(), Failure> {
        while let Some(message) = self.control.poll()? {
            match message {
                Message::Finish(finish) if self.serving && self.finish.is_none() => self.finish = Some(finish.messages),
                // The peer may be done before this end has taken its last messages.
                Message::Outcome(outcome) if self.finish.is_some() && self.outcome.is_none() => {
                    self.outcome = Some(outcome);
                }
                other => return Err(self.control.unexpected(&other, "silence")),
            }
        }
        Ok(())
    }

    /// The peer's outcome, if it has come already.
    pub(crate) fn take_outcome(&mut self) -> Option<Outcome> {
        self.outcome.take()
    }

    /// The messages that the peer has sent on each queue pair, once it has reported them.
    #[inline]
    pub(crate) fn finished(&self) -> Option<&[u64]> {
        self.finish.as_deref()
    }
}

impl Monitor for LoopMonitor<'_> {
    #[inline]
    fn busy(&mut self) -> Result<(), Failure> {
        self.idle = 0;
        self.quiet_since = None;
        self.count().map(drop)
    }

    #[inline]
    fn idle(&mut self) -> Result<LoopState, Failure> {
        if self.idle < self.yield_after {
            self.idle += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
        self.count()
    }
}

/// Whether the busy-polling threads of both ends may outnumber the cores (oversubscribed), so that
/// they must yield.
fn is_oversubscribed() -> bool {
    std::thread::available_parallelism().is_ok_and(|cores| cores.get() < 4)
}

#[derive(Debug)]
pub(crate) struct Deadline {
    duration: Option<Duration>,
    at_ns: Option<u64>,
}

impl Deadline {
    /// Begins when it is started; without a duration it never passes.
    pub(crate) fn after(duration: Option<Duration>) -> Deadline {
        Deadline { duration, at_ns: None }
    }

    pub(crate) fn start(&mut self, now_ns: u64) {
        let after = self.duration.map(nanoseconds);
        self.at_ns = after.map(|after| now_ns.saturating_add(after));
    }

    /// Whether it has passed; reads the clock only if there is a deadline.
    #[inline]
    pub(crate) fn is_over(&self, clock: &Clock) -> bool {
        self.at_ns.is_some_and(|at| clock.now() >= at)
    }
}
