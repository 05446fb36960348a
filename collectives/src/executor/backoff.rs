//! The wait policy of a thread that drives an engine: busy-poll, then yield the CPU, then sleep.

use std::thread;
use std::time::Duration;

use super::error::Failed;
use super::{Engine, Ticket};

/// Idle steps before the CPU is yielded, where each rank has a processor: about a millisecond. On a
/// busy machine a thread that yields runs again milliseconds later.
const SPIN_TURNS: u32 = 20_000;
/// The same where ranks outnumber processors: the awaited rank is likely to wait for this one.
const SPIN_OVERSUBSCRIBED: u32 = 2;
const YIELD_TURNS: u32 = 2_000;
const MAX_SLEEP: Duration = Duration::from_micros(200);

/// The backoff of one wait: the delay grows with consecutive idle steps.
#[derive(Debug, Clone)]
pub struct Backoff {
    turns: u32,
    spin: u32,
}

impl Backoff {
    /// For `ranks` threads that all run on this host.
    #[must_use]
    pub fn for_ranks(ranks: u32) -> Self {
        let processors = thread::available_parallelism().map_or(1, |processors| processors.get());
        Self::for_processors(ranks as usize, processors)
    }

    /// For `ranks` threads of a host that share so many processors.
    #[must_use]
    pub fn for_processors(ranks: usize, processors: usize) -> Self {
        let spin = if ranks <= processors {
            SPIN_TURNS
        } else {
            SPIN_OVERSUBSCRIBED
        };
        Self { turns: 0, spin }
    }

    /// Idle steps before the CPU is yielded.
    pub(super) fn spin_turns(&self) -> u32 {
        self.spin
    }

    #[inline]
    pub(super) fn is_oversubscribed(&self) -> bool {
        self.spin == SPIN_OVERSUBSCRIBED
    }

    /// Resets the backoff after progress.
    #[inline]
    pub fn reset(&mut self) {
        self.turns = 0;
    }

    /// Whether the next idle step only spins. If not, release locks before [`idle`](Self::idle).
    #[inline]
    #[must_use]
    pub fn is_spinning(&self) -> bool {
        self.turns < self.spin
    }

    /// After an idle step: spins, yields the CPU, or sleeps, the longer the more idle steps.
    #[inline]
    pub fn idle(&mut self) {
        self.turns = self.turns.saturating_add(1);
        if self.turns < self.spin {
            core::hint::spin_loop();
        } else {
            self.yield_or_sleep();
        }
    }

    #[cold]
    fn yield_or_sleep(&self) {
        match self.turns.checked_sub(self.spin + YIELD_TURNS) {
            None => thread::yield_now(),
            Some(sleeps) => thread::sleep(MAX_SLEEP.min(Duration::from_micros(u64::from(sleeps) / 16 + 1))),
        }
    }
}

impl Engine {
    /// Sets the wait policy; by default all ranks run on this host and this thread's processors.
    pub fn set_backoff(&mut self, backoff: Backoff) {
        self.backoff = backoff;
    }

    /// The wait policy.
    #[must_use]
    pub fn backoff(&self) -> &Backoff {
        &self.backoff
    }

    /// Whether ranks outnumber processors, if all are on this host.
    pub(crate) fn is_oversubscribed(&self) -> bool {
        self.backoff.is_oversubscribed()
    }

    /// Drives the engine until the operation is done, and returns its result.
    ///
    /// # Errors
    /// When it has failed. A ticket that was taken before counts as done.
    pub fn wait(&mut self, ticket: Ticket) -> Result<(), Failed> {
        let mut backoff = self.backoff.clone();
        loop {
            if let Some(result) = self.take(ticket) {
                return result;
            }
            if !self.has(ticket) {
                return Ok(());
            }
            if self.progress() {
                backoff.reset();
            } else {
                backoff.idle();
            }
        }
    }
}
