//! The client of `ib_read_lat` and `ib_atomic_lat`: one-sided requests that the peer's device
//! completes.

use doorbell_verbs::{AtomicAccess, AtomicWord, Buffer, Local, ReadAccess, ReliableConnection, Remote, RemoteWord};

use super::single::LatRequester;
use crate::classic::settings::Settings;
use crate::classic::test_end::{TestEnd, allocate, registration, slots};
use crate::classic::tool::Verb;
use crate::cli::AtomicOperation;
use crate::engine::gpu::{Content, GpuPool};
use crate::engine::test_end::{self, completions};
use crate::failure::{Failure, refused};

/// Bytes of the operand of an atomic.
const WORD: usize = 8;

/// The operation, with the local buffer while no request uses it.
#[derive(Debug)]
enum Operation {
    Read {
        into: Option<Buffer<Local>>,
        from: Remote<ReadAccess>,
        bytes: usize,
    },
    GpuRead {
        into: GpuPool,
        from: Remote<ReadAccess>,
    },
    Atomic {
        /// Receives the original value.
        into: Option<AtomicWord>,
        at: RemoteWord,
        operation: AtomicOperation,
    },
}

#[derive(Debug)]
pub(super) struct OneSided {
    test_end: TestEnd<ReliableConnection>,
    op: Operation,
    /// Whether to sleep on the completion channel instead of polling.
    sleeps: bool,
}

impl OneSided {
    pub(super) fn new(settings: &Settings, test_end: TestEnd<ReliableConnection>) -> Result<OneSided, Failure> {
        let longest = settings.sizes.iter().max().copied().unwrap_or(1);
        if let (Verb::Read, Some(gpu)) = (settings.tool.verb, &test_end.gpu) {
            let into = slots(gpu, &test_end.pd, longest, 1)?;
            let from = test_end.links[0].remote(&test_end.cycle(longest));
            return Ok(OneSided {
                op: Operation::GpuRead { into, from },
                sleeps: settings.events,
                test_end,
            });
        }
        let bytes = match settings.tool.verb {
            Verb::Atomic => WORD,
            _ => usize::try_from(longest).unwrap_or(usize::MAX),
        };
        let memory = allocate(settings, bytes)?;
        let into = registration(settings, &test_end.pd)
            .register(memory, Local)
            .map_err(refused)?;
        let (link, cycle) = (&test_end.links[0], test_end.cycle(longest));
        let op = if settings.tool.verb == Verb::Atomic {
            let at = link.remote::<AtomicAccess>(&cycle).word(0);
            Operation::Atomic {
                into: into.into_word().ok(),
                at: at.ok_or_else(|| Failure::test(format!("{link} sent an address that is not a word's")))?,
                operation: settings.atomic,
            }
        } else {
            Operation::Read {
                into: Some(into),
                from: link.remote(&cycle),
                bytes,
            }
        };
        Ok(OneSided {
            test_end,
            op,
            sleeps: settings.events,
        })
    }

    pub(super) fn resize(&mut self, size: usize) {
        if let Operation::Read { bytes, .. } = &mut self.op {
            *bytes = size;
        }
    }
}

impl LatRequester for OneSided {
    #[inline]
    fn post(&mut self) -> Result<(), Failure> {
        let test_qp = &mut self.test_end.end.qps[0];
        let posted = match &mut self.op {
            Operation::Read { into, from, bytes } => match into.take() {
                Some(buffer) => {
                    let (from, bytes) = (*from, *bytes);
                    test_qp
                        .qp
                        .post(|batch| drop(batch.read(buffer.part(..bytes), from).signaled()))
                }
                None => Ok(()),
            },
            Operation::GpuRead { into, from } => match into.take(Content::Nothing) {
                Some(buffer) => {
                    let from = *from;
                    test_qp.qp.post(|batch| drop(batch.read(buffer, from).signaled()))
                }
                None => Ok(()),
            },
            Operation::Atomic { into, at, operation } => match into.take() {
                Some(word) => {
                    let (at, operation) = (*at, *operation);
                    test_qp.qp.post(|batch| match operation {
                        AtomicOperation::FetchAdd => drop(batch.fetch_add(word, at, 1).signaled()),
                        AtomicOperation::CompareSwap => drop(batch.compare_swap(word, at, 0, 0).signaled()),
                    })
                }
                None => Ok(()),
            },
        };
        posted.map_err(|e| test_qp.refused(&e))
    }

    #[inline]
    fn is_complete(&mut self) -> Result<bool, Failure> {
        let test_end::TestEnd { cq, qps, .. } = &mut self.test_end.end;
        let mut answered = false;
        for mut done in completions(cq, self.sleeps)? {
            done.result().map_err(|failure| qps[0].failed(&failure))?;
            answered = true;
            match &mut self.op {
                Operation::Read { into, .. } => *into = done.take(),
                Operation::GpuRead { into, .. } => {
                    done.take().into_iter().for_each(|buffer| into.release_received(buffer));
                    if let Some(failure) = into.take_error() {
                        return Err(failure);
                    }
                }
                Operation::Atomic { into, .. } => *into = done.take_word(),
            }
        }
        Ok(answered)
    }
}
