//! The client of `bw read`: each READ lands in a buffer of its own. With `--verify` the peer's slots hold a pattern, and each buffer is spoilt
//! before it is read into, so a byte that never came cannot pass for one that did.

use doorbell_verbs::{Batch, Buffer, Completion, Local, Opaque, ProtectionDomain, Read as MayRead, Remote};

use super::super::gpu::{Content, Pool};
use super::super::pattern::{Mismatch, Pattern};
use super::super::station::{Grants, Needs, Own, Test, Theirs, refused};
use super::stream::{Flow, Pace, Wrong};
use crate::failure::Failure;

/// One lane.
#[derive(Debug)]
pub(crate) struct Pull {
    seed: u64,
    lane: usize,
    bytes: u64,
    verify: bool,
    free: Free,
    source: Option<Remote<MayRead>>,
    slots: u64,
}

/// What is read into, that nothing is read into just now.
#[derive(Debug)]
enum Free {
    Host(Vec<Buffer<Local>>),
    Gpu(Box<Pool>),
}

impl Own for Pull {
    fn needs(test: &Test<'_>) -> Needs {
        Needs {
            send: Pace::new(test, 0).depth(),
            receive: 1,
            inline: 0,
            grants: Grants::Nothing,
        }
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, lane: usize) -> Result<Self, Failure> {
        let (len, window) = (test.len(), test.window() as usize);
        let free = match &test.device.gpu {
            Some(gpu) => Free::Gpu(Box::new(Pool::new(gpu, pd, len, window)?)),
            None => Free::Host(
                pd.register_chunks(test.memory(len * window)?, len, Local)
                    .map_err(refused)?
                    .collect(),
            ),
        };
        let plan = test.plan;
        Ok(Pull {
            seed: plan.seed,
            lane,
            bytes: test.bytes,
            verify: plan.verify,
            free,
            source: None,
            slots: 0,
        })
    }
}

impl Flow for Pull {
    fn requests_per_list(_test: &Test<'_>) -> u32 {
        0
    }

    fn attach(&mut self, _test: &Test<'_>, theirs: &Theirs) -> Result<(), Failure> {
        self.slots = u64::from(theirs.slots).max(1);
        self.source = Some(theirs.data(self.slots * self.bytes)?);
        Ok(())
    }

    fn allowance(&self) -> u64 {
        u64::MAX
    }

    #[inline]
    fn free(&self) -> usize {
        match &self.free {
            Free::Host(free) => free.len(),
            Free::Gpu(pool) => pool.len(),
        }
    }

    fn payload(&self, _index: u64, _into: &mut [u8]) {}

    #[inline]
    fn stage<'d>(&mut self, batch: &mut Batch<'_, 'd>, index: u64, _inline: Option<&'d [u8]>, signal: bool) {
        let source = self
            .source
            .and_then(|source| source.slice(index % self.slots * self.bytes, self.bytes));
        let Some(source) = source else { return };
        let pattern = Pattern::new(self.seed, self.lane, index % self.slots);
        macro_rules! post {
            ($request:expr) => {{
                $request.signalled_if(signal);
            }};
        }
        match &mut self.free {
            Free::Host(free) => {
                let Some(mut buffer) = free.pop() else { return };
                if self.verify {
                    pattern.fill_wrong(&mut buffer);
                }
                post!(batch.read(buffer, source));
            }
            Free::Gpu(pool) => {
                let content = if self.verify {
                    Content::Wrong(pattern)
                } else {
                    Content::Nothing
                };
                let Some(buffer) = pool.take(content) else { return };
                post!(batch.read(buffer, source));
            }
        }
    }

    fn end_list<'d>(&mut self, _batch: &mut Batch<'_, 'd>, _posted: &'d [u8; 8], _signal: bool) {}

    #[inline]
    fn retire(&mut self, mut done: Completion<'_>) -> Result<(), Wrong> {
        let iteration = done.sequence();
        let pattern = self
            .verify
            .then(|| Pattern::new(self.seed, self.lane, iteration % self.slots));
        let wrong = match &mut self.free {
            Free::Host(free) => {
                let Some(buffer) = done.take::<Local>() else {
                    return Ok(());
                };
                let wrong = pattern.and_then(|pattern| pattern.check(&buffer));
                free.push(buffer);
                wrong
            }
            Free::Gpu(pool) => {
                let Some(buffer) = done.take::<Opaque<Local>>() else {
                    return Ok(());
                };
                let wrong = pool.look(&buffer, pattern);
                pool.give(buffer);
                if let Some(failure) = pool.failed() {
                    return Err(Wrong::Gpu(failure.to_string()));
                }
                wrong.map_err(|failure| Wrong::Gpu(failure.to_string()))?
            }
        };
        match wrong {
            Some(wrong) => Err(Wrong::Byte(Mismatch::at(self.bytes, self.lane, iteration, wrong))),
            None => Ok(()),
        }
    }

    #[inline]
    fn done(&self, retired: u64) -> u64 {
        retired
    }
}
