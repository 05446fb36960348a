//! The client of `bw atomic`: every lane counts in a word of its own, by adding one or by swapping each value for the next. On one queue pair
//! atomics are done in order, so the values that come back have to be 0, 1, 2, …: that is what `--verify` looks at.

use doorbell_verbs::{Atomic as MayCount, Batch, Completion, Local, Memory, ProtectionDomain, RemoteWord, Word};

use super::super::station::{Grants, Needs, Own, Test, Theirs, refused};
use super::stream::{Flow, Pace, Wrong};
use crate::cli::AtomicOperation;
use crate::failure::Failure;
use crate::plan::Verb;

/// One lane.
#[derive(Debug)]
pub(crate) struct Count {
    operation: AtomicOperation,
    verify: bool,
    free: Vec<Word>,
    target: Option<RemoteWord>,
}

impl Own for Count {
    fn needs(test: &Test<'_>) -> Needs {
        Needs {
            send: Pace::new(test, 0).depth(),
            receive: 1,
            inline: 0,
            grants: Grants::Nothing,
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
        Ok(Count {
            operation,
            verify: test.plan.verify,
            free,
            target: None,
        })
    }
}

impl Flow for Count {
    fn requests_per_list(_test: &Test<'_>) -> u32 {
        0
    }

    fn attach(&mut self, test: &Test<'_>, theirs: &Theirs) -> Result<(), Failure> {
        let word = theirs.data::<MayCount>(8)?.word(0);
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
                batch.fetch_add(word, target, 1).signalled_if(signal);
            }
            AtomicOperation::CompareSwap => {
                batch.compare_swap(word, target, index, index + 1).signalled_if(signal);
            }
        }
    }

    fn end_list<'d>(&mut self, _batch: &mut Batch<'_, 'd>, _posted: &'d [u8; 8], _signal: bool) {}

    #[inline]
    fn retire(&mut self, mut done: Completion<'_>) -> Result<(), Wrong> {
        let iteration = done.sequence();
        let Some(word) = done.take_word() else { return Ok(()) };
        let found = word.get();
        if self.verify && found != iteration {
            return Err(Wrong::Value {
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
