//! Waiting for an operation: at first as eagerly as can be, then giving others the processor.

use std::thread;
use std::time::Duration;

use super::error::Failed;
use super::{Engine, Ticket};

/// Turns without reset until the processor is offered to others, where each rank has a processor of its own: a millisecond or so. Who offers it on a busy machine gets it slices_back milliseconds later, and by then the others have
/// offered theirs.
const SPIN_TURNS: u32 = 20_000;
/// The same where there are more ranks than processors: what a rank waits for may be waiting for its processor.
const SPIN_OVERSUBSCRIBED: u32 = 500;
/// Turns between that and sleeping.
const YIELD_TURNS: u32 = 2_000;
/// The longest sleep.
const MAX_SLEEP: Duration = Duration::from_micros(200);

/// How long to wait before the next turn, by the turns that have brought nothing.
#[derive(Debug, Clone)]
pub struct Backoff {
    turns: u32,
    spin: u32,
}

impl Backoff {
    /// For a thread that waits with so many others, if all `ranks` are on this host.
    #[must_use]
    pub fn for_ranks(ranks: u32) -> Self {
        let processors = thread::available_parallelism().map_or(1, |processors| processors.get());
        Self::for_processors(ranks as usize, processors)
    }

    /// For a thread that waits with so many others on a host, where they have so many processors together.
    #[must_use]
    pub fn for_processors(ranks: usize, processors: usize) -> Self {
        let spin = if ranks <= processors {
            SPIN_TURNS
        } else {
            SPIN_OVERSUBSCRIBED
        };
        Self { turns: 0, spin }
    }

    /// Whether there are more ranks than processors.
    fn is_oversubscribed(&self) -> bool {
        self.spin == SPIN_OVERSUBSCRIBED
    }

    /// A turn has brought something.
    #[inline]
    pub fn reset(&mut self) {
        self.turns = 0;
    }

    /// Whether the next turn that brings nothing is followed by another at once. Else one who holds a lock lets go of it before [`idle`](Self::idle).
    #[inline]
    #[must_use]
    pub fn is_spinning(&self) -> bool {
        self.turns < self.spin
    }

    /// A turn has brought nothing: spins, offers the processor to others, or sleeps a little, the longer the longer there has been nothing.
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
    /// How it waits from here on; at first as if all ranks were on this host, and could run where this thread can.
    pub fn set_backoff(&mut self, backoff: Backoff) {
        self.backoff = backoff;
    }

    /// How it waits.
    #[must_use]
    pub fn backoff(&self) -> &Backoff {
        &self.backoff
    }

    /// Whether the ranks, if all are of this host, have to take turns at its processors.
    pub(crate) fn is_oversubscribed(&self) -> bool {
        self.backoff.is_oversubscribed()
    }

    /// Drives the engine until the operation is done, and gives its result.
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
