//! The client of `bw read`: each READ lands in a buffer of its own. With `--verify` the peer's slots hold a pattern, and each buffer is spoilt
//! before it is read into, so a byte that never came cannot pass for one that did.

use doorbell_verbs::{Batch, Buffer, Completion, Local, ProtectionDomain, Read as MayRead, Remote};

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
    free: Vec<Buffer<Local>>,
    source: Option<Remote<MayRead>>,
    slots: u64,
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
        let free = pd
            .register_chunks(test.memory(len * window)?, len, Local)
            .map_err(refused)?
            .collect();
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
        self.free.len()
    }

    fn payload(&self, _index: u64, _into: &mut [u8]) {}

    #[inline]
    fn stage<'d>(&mut self, batch: &mut Batch<'_, 'd>, index: u64, _inline: Option<&'d [u8]>, signal: bool) {
        let source = self
            .source
            .and_then(|source| source.slice(index % self.slots * self.bytes, self.bytes));
        if let (Some(source), Some(mut buffer)) = (source, self.free.pop()) {
            if self.verify {
                Pattern::new(self.seed, self.lane, index % self.slots).fill_wrong(&mut buffer);
            }
            let request = batch.read(buffer, source);
            if signal {
                request.signalled();
            }
        }
    }

    fn end_list<'d>(&mut self, _batch: &mut Batch<'_, 'd>, _posted: &'d [u8; 8], _signal: bool) {}

    #[inline]
    fn retire(&mut self, mut done: Completion<'_>) -> Result<(), Wrong> {
        let iteration = done.sequence();
        let Some(buffer) = done.take::<Local>() else {
            return Ok(());
        };
        if self.verify
            && let Some(wrong) = Pattern::new(self.seed, self.lane, iteration % self.slots).check(&buffer)
        {
            return Err(Wrong::Byte(Mismatch::at(self.bytes, self.lane, iteration, wrong)));
        }
        self.free.push(buffer);
        Ok(())
    }

    #[inline]
    fn done(&self, retired: u64) -> u64 {
        retired
    }
}
