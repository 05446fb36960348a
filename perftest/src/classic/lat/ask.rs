//! The client of `ib_read_lat` and `ib_atomic_lat`: one-sided requests that the peer's device
//! completes.

use doorbell_verbs::{Atomic as MayCount, Buffer, Local, Rc, Read, Remote, RemoteWord, Word};

use super::send::SLEEP;
use super::single::Asker;
use crate::classic::settings::{Atomic, Settings};
use crate::classic::station::{Station, allocate, refused, registration, slots};
use crate::classic::tool::Verb;
use crate::failure::Failure;
use crate::run::gpu::{Content, Pool};

/// Bytes of the operand of an atomic.
const WORD: usize = 8;

/// The operation, with the local buffer while no request uses it.
#[derive(Debug)]
enum Question {
    /// RDMA READ.
    Read {
        /// The local buffer, as long as the longest message.
        into: Option<Buffer<Local>>,
        /// The remote memory.
        from: Remote<Read>,
        /// Message size.
        bytes: usize,
    },
    /// RDMA READ into a GPU's memory.
    GpuRead {
        /// One buffer.
        into: Pool,
        from: Remote<Read>,
    },
    /// An atomic on a remote word.
    Atomic {
        /// Receives the original value.
        into: Option<Word>,
        /// The remote word.
        at: RemoteWord,
        operation: Atomic,
    },
}

/// One end.
#[derive(Debug)]
pub(super) struct Asks {
    station: Station<Rc>,
    question: Question,
    /// Whether to sleep on the completion channel instead of polling.
    sleeps: bool,
}

impl Asks {
    /// # Errors
    /// [`Failure::Test`] when there is no memory, or the peer's address is invalid.
    pub(super) fn new(settings: &Settings, station: Station<Rc>) -> Result<Asks, Failure> {
        let longest = settings.sizes.iter().max().copied().unwrap_or(1);
        if let (Verb::Read, Some(gpu)) = (settings.tool.verb, &station.gpu) {
            let into = slots(gpu, &station.pd, longest, 1)?;
            let from = station.lanes[0].remote(&station.cycle(longest));
            return Ok(Asks {
                question: Question::GpuRead { into, from },
                sleeps: settings.events,
                station,
            });
        }
        let bytes = match settings.tool.verb {
            Verb::Atomic => WORD,
            _ => usize::try_from(longest).unwrap_or(usize::MAX),
        };
        let memory = allocate(settings, bytes)?;
        let into = registration(settings, &station.pd)
            .register(memory, Local)
            .map_err(refused)?;
        let (lane, cycle) = (&station.lanes[0], station.cycle(longest));
        let question = if settings.tool.verb == Verb::Atomic {
            let at = lane.remote::<MayCount>(&cycle).word(0);
            Question::Atomic {
                into: into.into_word().ok(),
                at: at.ok_or_else(|| Failure::test(format!("{lane} has told an address that is not a word's")))?,
                operation: settings.atomic,
            }
        } else {
            Question::Read {
                into: Some(into),
                from: lane.remote(&cycle),
                bytes,
            }
        };
        Ok(Asks {
            station,
            question,
            sleeps: settings.events,
        })
    }

    /// Sets the message size.
    pub(super) fn resize(&mut self, size: usize) {
        if let Question::Read { bytes, .. } = &mut self.question {
            *bytes = size;
        }
    }
}

impl Asker for Asks {
    #[inline]
    fn ask(&mut self) -> Result<(), Failure> {
        let lane = &mut self.station.lanes[0];
        let posted = match &mut self.question {
            Question::Read { into, from, bytes } => match into.take() {
                Some(buffer) => {
                    let (from, bytes) = (*from, *bytes);
                    lane.qp
                        .post(|batch| drop(batch.read(buffer.part(..bytes), from).signalled()))
                }
                None => Ok(()),
            },
            Question::GpuRead { into, from } => match into.take(Content::Nothing) {
                Some(buffer) => {
                    let from = *from;
                    lane.qp.post(|batch| drop(batch.read(buffer, from).signalled()))
                }
                None => Ok(()),
            },
            Question::Atomic { into, at, operation } => match into.take() {
                Some(word) => {
                    let (at, operation) = (*at, *operation);
                    lane.qp.post(|batch| match operation {
                        Atomic::FetchAdd => drop(batch.fetch_add(word, at, 1).signalled()),
                        Atomic::CompareSwap => drop(batch.compare_swap(word, at, 0, 0).signalled()),
                    })
                }
                None => Ok(()),
            },
        };
        posted.map_err(|e| lane.refused(&e))
    }

    #[inline]
    fn is_answered(&mut self) -> Result<bool, Failure> {
        let Station { cq, lanes, .. } = &mut self.station;
        let completions = if self.sleeps {
            cq.wait(SLEEP).map_err(refused)?
        } else {
            cq.poll().map_err(refused)?
        };
        let mut answered = false;
        for mut done in completions {
            done.result().map_err(|failure| lanes[0].failed(&failure))?;
            answered = true;
            match &mut self.question {
                Question::Read { into, .. } => *into = done.take(),
                Question::GpuRead { into, .. } => {
                    done.take().into_iter().for_each(|buffer| into.give_filled(buffer));
                    if let Some(failure) = into.failed() {
                        return Err(failure);
                    }
                }
                Question::Atomic { into, .. } => *into = done.take_word(),
            }
        }
        Ok(answered)
    }
}
