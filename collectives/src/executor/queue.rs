//! Operations in submission order, from number 1 on, until their results are taken.

use std::collections::VecDeque;

use super::error::Failed;
use super::operation::{ActiveOperation, Data};

pub(super) struct OperationQueue {
    /// The number of the first operation in the queue.
    first: u64,
    operations: VecDeque<ActiveOperation>,
}

impl OperationQueue {
    pub(super) fn new() -> Self {
        Self {
            first: 1,
            operations: VecDeque::new(),
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    #[inline]
    pub(super) fn next_number(&self) -> u64 {
        self.first + self.operations.len() as u64
    }

    /// Returns its number.
    pub(super) fn push(&mut self, op: ActiveOperation) -> u64 {
        self.operations.push_back(op);
        self.next_number() - 1
    }

    /// Gives the next number to an operation that is done. The queue is empty.
    #[inline]
    pub(super) fn skip(&mut self) {
        self.first += 1;
    }

    fn index(&self, number: u64) -> Option<usize> {
        usize::try_from(number.checked_sub(self.first)?).ok()
    }

    pub(super) fn get(&self, number: u64) -> Option<&ActiveOperation> {
        self.operations.get(self.index(number)?)
    }

    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut ActiveOperation> {
        let index = self.index(number)?;
        self.operations.get_mut(index)
    }

    /// All, and the number of the first.
    #[inline]
    pub(super) fn all_mut(&mut self) -> (u64, &mut [ActiveOperation]) {
        (self.first, self.operations.make_contiguous())
    }

    /// The number of the first without a result.
    pub(super) fn first_in_flight(&self) -> u64 {
        let in_flight = self.operations.iter().position(|op| op.result.is_none());
        self.first + in_flight.unwrap_or(self.operations.len()) as u64
    }

    pub(super) fn is_last_in_flight(&self) -> bool {
        self.operations.back().is_some_and(|op| op.result.is_none())
    }

    pub(super) fn outstanding(&self) -> usize {
        self.operations.iter().filter(|op| !op.taken).count()
    }

    /// In flight, or failed and not taken.
    pub(super) fn open(&mut self) -> impl Iterator<Item = &mut ActiveOperation> {
        self.operations.iter_mut().filter(|op| op.is_open())
    }

    pub(super) fn is_idle(&self) -> bool {
        !self.operations.iter().any(ActiveOperation::is_open)
    }

    /// The result of an operation, once.
    pub(super) fn take(&mut self, number: u64) -> Option<Result<(), Failed>> {
        let op = self.get_mut(number).filter(|op| !op.taken)?;
        let result = op.result.clone()?;
        op.taken = true;
        (op.input, op.output, op.puts) = (Data::None, Data::None, None);
        op.lent = [None, None];
        while self.operations.front().is_some_and(|op| op.taken) {
            self.operations.pop_front();
            self.first += 1;
        }
        Some(result)
    }

    /// Fails all without a result. Their queue pairs are gone, and what was lent is the callers'.
    pub(super) fn fail(&mut self, why: &Failed) {
        for op in &mut self.operations {
            op.lent = [None, None];
            op.result.get_or_insert_with(|| Err(why.clone()));
        }
    }
}
