//! What a hot loop does beside its work: look, now and then, whether the peer or the user has something to say.

use std::time::Duration;

use crate::exchange::{Control, Message};
use crate::failure::Failure;
use crate::stats::Clock;

/// A loop looks once in so many turns.
const TURNS: u32 = 256;
/// A loop that has found nothing to do for so many turns offers its core to others each turn: where there is nobody it gets it back at once,
/// and where threads outnumber cores it is what lets the peer answer.
const PATIENCE: u32 = 200;

/// The looking.
#[derive(Debug)]
pub(crate) struct Watch<'a> {
    control: &'a Control,
    turns: u32,
    serving: bool,
    finish: Option<Vec<u64>>,
    idle: u32,
    patience: u32,
}

impl<'a> Watch<'a> {
    /// For the client: the peer says nothing until it is asked.
    pub(crate) fn of_client(control: &'a Control) -> Watch<'a> {
        Watch {
            control,
            turns: 0,
            serving: false,
            finish: None,
            idle: 0,
            patience: if few_cores() { 0 } else { PATIENCE },
        }
    }

    /// For the server: the peer says when it has finished.
    pub(crate) fn of_server(control: &'a Control) -> Watch<'a> {
        Watch {
            serving: true,
            ..Watch::of_client(control)
        }
    }

    /// One turn of a loop that found something to do.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; [`Failure::Test`] when the peer failed or is gone.
    #[inline]
    pub(crate) fn turn(&mut self) -> Result<(), Failure> {
        self.idle = 0;
        self.count()
    }

    /// One turn of a loop that found nothing to do.
    ///
    /// # Errors
    /// As [`Watch::turn`].
    #[inline]
    pub(crate) fn idle(&mut self) -> Result<(), Failure> {
        if self.idle < self.patience {
            self.idle += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
        self.count()
    }

    #[inline]
    fn count(&mut self) -> Result<(), Failure> {
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(TURNS) && self.control.attention() {
            self.look()
        } else {
            Ok(())
        }
    }

    #[cold]
    fn look(&mut self) -> Result<(), Failure> {
        while let Some(message) = self.control.look()? {
            match message {
                Message::Finish(finish) if self.serving && self.finish.is_none() => self.finish = Some(finish.messages),
                other => return Err(self.control.unexpected(&other, "silence")),
            }
        }
        Ok(())
    }

    /// The messages that the client has sent on each lane, once it has said so.
    #[inline]
    pub(crate) fn finished(&self) -> Option<&[u64]> {
        self.finish.as_deref()
    }
}

/// Whether the spinning threads of both ends are more than the cores, so that a spinner has to make way.
fn few_cores() -> bool {
    std::thread::available_parallelism().is_ok_and(|cores| cores.get() < 4)
}

/// When a test that runs for a time ends.
#[derive(Debug)]
pub(crate) struct Deadline {
    duration: Option<Duration>,
    at_ns: Option<u64>,
}

impl Deadline {
    /// One that begins when it is started; without a duration it is never over.
    pub(crate) fn after(duration: Option<Duration>) -> Deadline {
        Deadline { duration, at_ns: None }
    }

    /// Starts it.
    pub(crate) fn start(&mut self, now_ns: u64) {
        let after = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.at_ns = self.duration.map(|duration| now_ns.saturating_add(after(duration)));
    }

    /// Whether it is over; reads the clock only where there is an end.
    #[inline]
    pub(crate) fn is_over(&self, clock: &Clock) -> bool {
        self.at_ns.is_some_and(|at| clock.now() >= at)
    }

    /// Whether it was over at this time.
    #[inline]
    pub(crate) fn is_over_at(&self, now_ns: u64) -> bool {
        self.at_ns.is_some_and(|at| now_ns >= at)
    }
}
