//! Requests of one queue that are not yet taken, by sequence.

use std::collections::VecDeque;
use std::task::Waker;

/// In order of posting; sequences are consecutive, so that the first one's finds the others.
#[derive(Debug)]
pub(crate) struct Pending<T> {
    first: u64,
    slots: VecDeque<Slot<T>>,
}

#[derive(Debug)]
enum Slot<T> {
    Posted(Option<Waker>),
    Complete(T),
    /// Posted, by a task that does not wait any more.
    Abandoned,
    Taken,
}

impl<T> Default for Pending<T> {
    fn default() -> Self {
        Self {
            first: 0,
            slots: VecDeque::new(),
        }
    }
}

impl<T> Pending<T> {
    /// A request has been posted, the next after all before.
    pub(crate) fn push(&mut self, sequence: u64) {
        if self.slots.is_empty() {
            self.first = sequence;
        }
        debug_assert_eq!(self.first + self.slots.len() as u64, sequence);
        self.slots.push_back(Slot::Posted(None));
    }

    /// A request has completed: whom to wake.
    pub(crate) fn complete(&mut self, sequence: u64, outcome: T) -> Option<Waker> {
        let slot = self.slot(sequence)?;
        match std::mem::replace(slot, Slot::Taken) {
            Slot::Posted(waker) => {
                *slot = Slot::Complete(outcome);
                waker
            }
            _ => {
                self.trim();
                None
            }
        }
    }

    /// The outcome of a request that is complete; once.
    pub(crate) fn take(&mut self, sequence: u64) -> Option<T> {
        let slot = self.slot(sequence)?;
        let Slot::Complete(_) = slot else { return None };
        let Slot::Complete(outcome) = std::mem::replace(slot, Slot::Taken) else {
            return None;
        };
        self.trim();
        Some(outcome)
    }

    /// Keeps the waker of the task that waits for a request.
    pub(crate) fn wait(&mut self, sequence: u64, waker: &Waker) {
        match self.slot(sequence) {
            Some(Slot::Posted(Some(known))) if known.will_wake(waker) => {}
            Some(Slot::Posted(kept)) => *kept = Some(waker.clone()),
            _ => {}
        }
    }

    /// Nobody waits for a request any more: its outcome, if it is complete.
    pub(crate) fn abandon(&mut self, sequence: u64) -> Option<T> {
        let outcome = self.take(sequence);
        if let Some(slot @ Slot::Posted(_)) = self.slot(sequence) {
            *slot = Slot::Abandoned;
        }
        outcome
    }

    fn slot(&mut self, sequence: u64) -> Option<&mut Slot<T>> {
        let at = sequence.checked_sub(self.first)?;
        self.slots.get_mut(usize::try_from(at).ok()?)
    }

    fn trim(&mut self) {
        while let Some(Slot::Taken) = self.slots.front() {
            self.slots.pop_front();
            self.first += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Each outcome is taken once, by its own task; nothing is kept of what is taken or abandoned.
        #[test]
        fn outcomes_reach_their_tasks_alone(actions in prop::collection::vec((0..4_u8, 0..8_u64), 0..200)) {
            let mut pending = Pending::default();
            let (mut posted, mut completed) = (5, 5);
            let mut open = std::collections::BTreeSet::new();
            for (action, which) in actions {
                let some = open.iter().copied().nth(which as usize % open.len().max(1));
                match (action, some) {
                    (0, _) => {
                        pending.push(posted);
                        open.insert(posted);
                        posted += 1;
                    }
                    (1, _) if completed < posted => {
                        prop_assert!(pending.complete(completed, completed).is_none());
                        completed += 1;
                    }
                    (2, Some(sequence)) => {
                        let taken = pending.take(sequence);
                        prop_assert_eq!(taken, (sequence < completed).then_some(sequence));
                        if taken.is_some() {
                            open.remove(&sequence);
                        }
                    }
                    (3, Some(sequence)) => {
                        let taken = pending.abandon(sequence);
                        prop_assert_eq!(taken, (sequence < completed).then_some(sequence));
                        open.remove(&sequence);
                    }
                    _ => {}
                }
            }
            while completed < posted {
                pending.complete(completed, completed);
                completed += 1;
            }
            for sequence in open {
                prop_assert_eq!(pending.take(sequence), Some(sequence));
            }
            prop_assert!(pending.slots.is_empty());
        }
    }
}
