//! The client of `bw atomic`: every queue pair increments a word of its own, by fetch-and-add of
//! one or by compare-and-swap. Atomics on one queue pair are executed in order, so the returned
//! values must be 0, 1, 2, …: `--verify` checks that.

use doorbell_verbs::{AtomicAccess, AtomicWord, Batch, Completion, Local, Memory, ProtectionDomain, RemoteWord};

use super::super::test_end::{PeerQp, QpMemory, QpRequirements, RemoteAccess, Test};
use super::bw_loop::{BwRequester, DataError, PostParams};
use crate::cli::AtomicOperation;
use crate::failure::{Failure, refused};
use crate::plan::Verb;

#[derive(Debug)]
pub(crate) struct AtomicRequester {
    operation: AtomicOperation,
    verify: bool,
    free: Vec<AtomicWord>,
    target: Option<RemoteWord>,
}

impl QpMemory for AtomicRequester {
    fn requirements(test: &Test<'_>) -> QpRequirements {
        QpRequirements {
            send: PostParams::new(test, 0).depth(),
            receive: 1,
            inline: 0,
            access: RemoteAccess::Nothing,
        }
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, _lane: usize) -> Result<Self, Failure> {
        let memory = Memory::zeroed(8 * test.window() as usize);
        let free = pd
            .register_chunks(memory, 8, Local)
            .map_err(refused)?
            .filter_map(|buffer| buffer.into_word().ok())
            .collect();
        let operation = match test.plan.verb {
            Verb::Atomic(operation) => operation,
            Verb::Write | Verb::Read | Verb::Send => AtomicOperation::default(),
        };
        Ok(AtomicRequester {
            operation,
            verify: test.plan.verify,
            free,
            target: None,
        })
    }
}

impl BwRequester for AtomicRequester {
    fn requests_per_list(_test: &Test<'_>) -> u32 {
        0
    }

    fn attach(&mut self, test: &Test<'_>, peer: &PeerQp) -> Result<(), Failure> {
        let word = peer.data::<AtomicAccess>(8)?.word(0);
        self.target =
            Some(word.ok_or_else(|| Failure::test(format!("peer {}: its word is not aligned", test.control.peer())))?);
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
        let (Some(target), Some(mut word)) = (self.target, self.free.pop()) else {
            return;
        };
        if self.verify {
            word.set(u64::MAX);
        }
        match self.operation {
            AtomicOperation::FetchAdd => {
                batch.fetch_add(word, target, 1).signaled_if(signal);
            }
            AtomicOperation::CompareSwap => {
                batch.compare_swap(word, target, index, index + 1).signaled_if(signal);
            }
        }
    }

    fn end_list<'d>(&mut self, _batch: &mut Batch<'_, 'd>, _posted: &'d [u8; 8], _signal: bool) {}

    #[inline]
    fn retire(&mut self, mut done: Completion<'_>) -> Result<(), DataError> {
        let iteration = done.sequence();
        let Some(word) = done.take_word() else { return Ok(()) };
        let found = word.get();
        if self.verify && found != iteration {
            return Err(DataError::Value {
                iteration,
                expected: iteration,
                found,
            });
        }
        self.free.push(word);
        Ok(())
    }

    #[inline]
    fn done(&self, retired: u64) -> u64 {
        retired
    }
}
