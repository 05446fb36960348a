//! What a communicator holds under its lock: the engine, and how operations of each kind and size are done.

use std::sync::Arc;

use super::call::{Likeness, Settings};
use super::error::{CollectiveError, GroupFailed};
use crate::algorithm::Algorithm;
use crate::cost::{Compute, Link};
use crate::executor::{Engine, KEPT, PlanId, Remembered, Ticket, Tuning};
use crate::memory::Segment;
use crate::plan::Collective;
use crate::topology;
use crate::tune::{Choice, Decision, Overrides, Question, Tuner};
use crate::types::{DataType, Protocol, Rank};

/// What decides how an operation is done; the same on all ranks, as sizes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Key {
    collective: Collective,
    root: Rank,
    data: DataType,
    /// Operations of more than half of 2^class bytes, and not more than that, are done in one way.
    class: u32,
    deterministic: bool,
    forced: Overrides,
}

/// A way that was chosen.
struct Way {
    key: Key,
    plan: PlanId,
    tuning: Tuning,
}

/// How far a communicator is with a stall.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stall {
    /// None, or not long enough.
    Quiet,
    /// Half of an operation's time was over, and the members were asked.
    Asked,
}

/// Under the lock.
pub(super) struct State {
    pub(super) engine: Engine,
    pub(super) tuner: Tuner,
    /// By rank: which of the hosts it is on.
    pub(super) hosts: Vec<u32>,
    /// The order of rings and trees.
    pub(super) order: Vec<Rank>,
    /// By rank: where it is.
    pub(super) places: Vec<topology::Member>,
    ways: Vec<Way>,
    /// The way that was taken last, as it most often is the next.
    last: usize,
    plans: Vec<(Algorithm, Collective, Rank, PlanId)>,
    /// Operations whose requests were dropped, and what must outlive them.
    pub(super) abandoned: Vec<(Ticket, [Option<Arc<Segment>>; 2])>,
    pub(super) stall: Stall,
    /// What operations were like that the engine has remembered, and which of them came last.
    repeated: Vec<(Likeness, Remembered)>,
    latest: usize,
    /// Why nothing goes any more.
    pub(super) failed: Option<Box<GroupFailed>>,
}

impl State {
    pub(super) fn new(
        engine: Engine,
        tuner: Tuner,
        hosts: Vec<u32>,
        order: Vec<Rank>,
        places: Vec<topology::Member>,
    ) -> Self {
        Self {
            engine,
            tuner,
            hosts,
            order,
            places,
            ways: Vec::new(),
            last: 0,
            plans: Vec::new(),
            abandoned: Vec::new(),
            stall: Stall::Quiet,
            repeated: Vec::with_capacity(KEPT),
            latest: 0,
            failed: None,
        }
    }

    /// Chooses anew from now on.
    pub(super) fn choose_by(&mut self, tuner: Tuner) {
        self.tuner = tuner;
        self.ways.clear();
        self.repeated.clear();
    }

    /// What the engine has remembered of an operation like this, and can do at once.
    #[inline]
    pub(super) fn remembered(&mut self, likeness: &Likeness) -> Option<Remembered> {
        if self.repeated.get(self.latest).is_none_or(|(last, _)| last != likeness) {
            self.latest = self.repeated.iter().position(|(one, _)| one == likeness)?;
        }
        let (_, remembered) = self.repeated[self.latest];
        self.engine.is_ready_for(remembered).then_some(remembered)
    }

    /// Has the engine remember an operation that has just begun.
    pub(super) fn remember(&mut self, likeness: Likeness, ticket: Ticket) {
        let known = self.repeated.iter().position(|(one, _)| *one == likeness);
        let Some(remembered) = self.engine.remember(ticket) else {
            return;
        };
        let new = (likeness, remembered);
        match known {
            Some(index) => self.repeated[index] = new,
            None if self.repeated.len() < KEPT => self.repeated.push(new),
            // The engine forgets by turns, too.
            None => {
                self.repeated.remove(0);
                self.repeated.push(new);
            }
        }
    }

    /// How an operation of so many bytes is done.
    #[inline]
    pub(super) fn way(
        &mut self,
        collective: Collective,
        root: Rank,
        data: DataType,
        bytes: u64,
        settings: &Settings,
    ) -> Result<(PlanId, Tuning), CollectiveError> {
        let key = Key {
            collective,
            root: if collective.has_root() { root } else { Rank(0) },
            data,
            class: class(bytes),
            deterministic: settings.deterministic,
            forced: settings.forced,
        };
        if self.ways.get(self.last).is_none_or(|way| way.key != key) {
            self.last = match self.ways.iter().position(|way| way.key == key) {
                Some(known) => known,
                None => self.find(key)?,
            };
        }
        let way = &self.ways[self.last];
        Ok((way.plan, way.tuning))
    }

    /// Chooses a way, and keeps it.
    #[cold]
    fn find(&mut self, key: Key) -> Result<usize, CollectiveError> {
        let Choice {
            algorithm,
            protocol,
            channels,
            slice_bytes,
        } = self.decide(key)?.choice;
        let plan = self.plan(algorithm, key.collective, key.root)?;
        let tuning = Tuning {
            protocol,
            channels,
            slice: usize::try_from(slice_bytes).unwrap_or(usize::MAX).max(1),
        };
        self.ways.push(Way { key, plan, tuning });
        Ok(self.ways.len() - 1)
    }

    fn decide(&self, key: Key) -> Result<Decision, CollectiveError> {
        let Key {
            collective,
            root,
            data,
            deterministic,
            mut forced,
            ..
        } = key;
        if let Some(algorithm) = forced.algorithm {
            // The call names it, so it is this one or none.
            algorithm.schedule(collective, &self.order, root)?;
            if deterministic && !algorithm.deterministic(collective) {
                return Err(CollectiveError::Misuse {
                    collective,
                    what: format!("{algorithm} does not keep to one order of reduction: name another, or none"),
                });
            }
        }
        if collective == Collective::AllToAllV {
            // Each pair of ranks knows other lengths, so there is nothing to choose by that all know.
            forced.protocol = forced.protocol.or(Some(Protocol::Simple));
        }
        let question = Question {
            collective,
            bytes: 1 << key.class,
            data,
            root,
            deterministic,
        };
        if deterministic && forced.algorithm.is_none() {
            // The order is the algorithm's, so nothing that is measured, or said of slices and channels, may decide on it.
            let mut standard = Tuner::new(Link::soft_local(), Link::soft_local(), Compute::default(), 1);
            standard.overrides.algorithm = self.tuner.overrides.algorithm;
            let decision = standard.choose(&question, &vec![0; self.hosts.len()], &self.order)?;
            forced.algorithm = Some(decision.choice.algorithm);
        }
        let tuner = Tuner {
            overrides: forced.over(self.tuner.overrides),
            ..self.tuner.clone()
        };
        Ok(tuner.choose(&question, &self.hosts, &self.order)?)
    }

    /// What would be done, and why.
    pub(super) fn explain(
        &self,
        collective: Collective,
        root: Rank,
        data: DataType,
        bytes: u64,
        settings: &Settings,
    ) -> Result<Decision, CollectiveError> {
        self.decide(Key {
            collective,
            root,
            data,
            class: class(bytes),
            deterministic: settings.deterministic,
            forced: settings.forced,
        })
    }

    fn plan(&mut self, algorithm: Algorithm, collective: Collective, root: Rank) -> Result<PlanId, CollectiveError> {
        let known = self
            .plans
            .iter()
            .find(|known| (known.0, known.1, known.2) == (algorithm, collective, root));
        if let Some((.., plan)) = known {
            return Ok(*plan);
        }
        let schedule = algorithm.schedule(collective, &self.order, root)?;
        let plan = self.engine.prepare(&*schedule)?;
        self.plans.push((algorithm, collective, root, plan));
        Ok(plan)
    }

    /// Forgets operations that nobody asks about any more, and are done.
    pub(super) fn reap(&mut self) {
        let Self { engine, abandoned, .. } = self;
        abandoned.retain(|(ticket, _)| engine.take(*ticket).is_none() && engine.has(*ticket));
    }
}

/// The class of sizes: 2^class bytes are the most of it.
fn class(bytes: u64) -> u32 {
    bytes.max(1).checked_next_power_of_two().map_or(63, u64::trailing_zeros)
}

#[cfg(test)]
mod tests {
    use super::class;

    #[test]
    fn a_class_ends_at_its_power_of_two() {
        assert_eq!([0, 1, 2, 3, 4, 5, 8, 9].map(class), [0, 0, 1, 2, 2, 3, 3, 4]);
        assert_eq!([1 << 63, u64::MAX].map(class), [63, 63]);
    }
}
