//! Waiting for an operation: at first as eagerly as can be, then giving others the processor.

use std::thread;
use std::time::Duration;

use super::error::Failed;
use super::{Engine, Ticket};

/// Turns without news until the processor is offered to others; with as many ranks as processors that is what lets them run.
const SPIN: u32 = 2_000;
/// Turns until it sleeps between turns.
const YIELD: u32 = 4_000;
/// The longest sleep.
const SLEEP: Duration = Duration::from_micros(200);

/// How long to wait before the next turn, by the turns that have brought nothing.
#[derive(Debug, Default)]
pub struct Patience {
    turns: u32,
}

impl Patience {
    /// A turn has brought something.
    #[inline]
    pub fn news(&mut self) {
        self.turns = 0;
    }

    /// A turn has brought nothing: spins, offers the processor to others, or sleeps a little, the longer the longer there has been nothing.
    #[inline]
    pub fn nothing(&mut self) {
        self.turns = self.turns.saturating_add(1);
        if self.turns < SPIN {
            core::hint::spin_loop();
        } else {
            Self::step_aside(self.turns);
        }
    }

    #[cold]
    fn step_aside(turns: u32) {
        match turns.checked_sub(YIELD) {
            None => thread::yield_now(),
            Some(sleeps) => thread::sleep(SLEEP.min(Duration::from_micros(u64::from(sleeps) / 16 + 1))),
        }
    }
}

impl Engine {
    /// Drives the engine until the operation is done, and gives its result.
    ///
    /// # Errors
    /// When it has failed. A ticket that was taken before counts as done.
    pub fn wait(&mut self, ticket: Ticket) -> Result<(), Failed> {
        let mut patience = Patience::default();
        loop {
            if let Some(result) = self.take(ticket) {
                return result;
            }
            if self.began(ticket).is_none() {
                return Ok(());
            }
            if self.progress() {
                patience.news();
            } else {
                patience.nothing();
            }
        }
    }
}
