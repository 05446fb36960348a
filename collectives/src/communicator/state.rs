//! State under a communicator's lock: the engine, and plans by collective and size class.

use std::sync::Arc;

use super::call::{CacheKey, CallSettings};
use super::error::{CollectiveError, GroupFailed};
use crate::algorithm::Algorithm;
use crate::cost::{Compute, Link};
use crate::executor::{CACHED_PROGRAMS, CachedProgram, Engine, PlanId, Ticket, Tuning};
use crate::memory::Segment;
use crate::plan::Collective;
use crate::topology;
use crate::tune::{Choice, Decision, Overrides, Tuner, TuningRequest};
use crate::types::{DataType, Protocol, Rank};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ChoiceKey {
    collective: Collective,
    root: Rank,
    data: DataType,
    /// Operations of more than 2^(n-1) and at most 2^n bytes share a choice.
    size_class: u32,
    deterministic: bool,
    forced: Overrides,
}

struct ChosenPlan {
    key: ChoiceKey,
    plan: PlanId,
    tuning: Tuning,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stall {
    None,
    Investigated,
}

// fields: one rank's part of a group: engine, mesh, choices and buffers share one lock.
pub(super) struct State {
    pub(super) engine: Engine,
    pub(super) tuner: Tuner,
    pub(super) hosts: Vec<u32>,
    pub(super) order: Vec<Rank>,
    pub(super) locations: Vec<topology::Member>,
    chosen: Vec<ChosenPlan>,
    last: usize,
    plans: Vec<(Algorithm, Collective, Rank, PlanId)>,
    /// Operations whose requests were dropped, and the segments that must outlive them.
    pub(super) abandoned: Vec<(Ticket, [Option<Arc<Segment>>; 2])>,
    pub(super) stall: Stall,
    /// Keys of the engine's cached programs, and the index of the last one used.
    repeated: Vec<(CacheKey, CachedProgram)>,
    latest: usize,
    pub(super) failed: Option<Box<GroupFailed>>,
}

impl State {
    pub(super) fn new(
        engine: Engine,
        tuner: Tuner,
        hosts: Vec<u32>,
        order: Vec<Rank>,
        locations: Vec<topology::Member>,
    ) -> Self {
        Self {
            engine,
            tuner,
            hosts,
            order,
            locations,
            chosen: Vec::new(),
            last: 0,
            plans: Vec::new(),
            abandoned: Vec::new(),
            stall: Stall::None,
            repeated: Vec::with_capacity(CACHED_PROGRAMS),
            latest: 0,
            failed: None,
        }
    }

    pub(super) fn choose_by(&mut self, tuner: Tuner) {
        self.tuner = tuner;
        self.chosen.clear();
        self.repeated.clear();
    }

    /// The cached program of an operation, if it can run at once.
    #[inline]
    pub(super) fn cached(&mut self, cache_key: &CacheKey) -> Option<CachedProgram> {
        if self.repeated.get(self.latest).is_none_or(|(last, _)| last != cache_key) {
            self.latest = self.repeated.iter().position(|(one, _)| one == cache_key)?;
        }
        let (_, cached) = self.repeated[self.latest];
        self.engine.can_run_cached(cached).then_some(cached)
    }

    pub(super) fn cache_program(&mut self, cache_key: CacheKey, ticket: Ticket) {
        let known = self.repeated.iter().position(|(one, _)| *one == cache_key);
        let Some(cached) = self.engine.cache_program(ticket) else {
            return;
        };
        let new = (cache_key, cached);
        match known {
            Some(index) => self.repeated[index] = new,
            None if self.repeated.len() < CACHED_PROGRAMS => self.repeated.push(new),
            // The engine evicts round-robin, too.
            None => {
                self.repeated.remove(0);
                self.repeated.push(new);
            }
        }
    }

    #[inline]
    pub(super) fn plan_for(
        &mut self,
        collective: Collective,
        root: Rank,
        data: DataType,
        bytes: u64,
        settings: &CallSettings,
    ) -> Result<(PlanId, Tuning), CollectiveError> {
        let key = ChoiceKey {
            collective,
            root: if collective.has_root() { root } else { Rank(0) },
            data,
            size_class: size_class(bytes),
            deterministic: settings.deterministic,
            forced: settings.forced,
        };
        if self.chosen.get(self.last).is_none_or(|chosen| chosen.key != key) {
            self.last = match self.chosen.iter().position(|chosen| chosen.key == key) {
                Some(known) => known,
                None => self.choose(key)?,
            };
        }
        let chosen = &self.chosen[self.last];
        Ok((chosen.plan, chosen.tuning))
    }

    #[cold]
    fn choose(&mut self, key: ChoiceKey) -> Result<usize, CollectiveError> {
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
        self.chosen.push(ChosenPlan { key, plan, tuning });
        Ok(self.chosen.len() - 1)
    }

    fn decide(&self, key: ChoiceKey) -> Result<Decision, CollectiveError> {
        let ChoiceKey {
            collective,
            root,
            data,
            deterministic,
            mut forced,
            ..
        } = key;
        if let Some(algorithm) = forced.algorithm {
            algorithm.schedule(collective, &self.order, root)?;
            if deterministic && !algorithm.deterministic(collective) {
                return Err(CollectiveError::Misuse {
                    collective,
                    what: format!("{algorithm} does not keep to one order of reduction: name another, or none"),
                });
            }
        }
        if collective == Collective::AllToAllV {
            // Each pair of ranks has other lengths, so no common size is known to choose by.
            forced.protocol = forced.protocol.or(Some(Protocol::Simple));
        }
        let question = TuningRequest {
            collective,
            bytes: 1 << key.size_class,
            data,
            root,
            deterministic,
        };
        if deterministic && forced.algorithm.is_none() {
            // The reduction order depends on the algorithm: it must not depend on measurements.
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

    pub(super) fn explain(
        &self,
        collective: Collective,
        root: Rank,
        data: DataType,
        bytes: u64,
        settings: &CallSettings,
    ) -> Result<Decision, CollectiveError> {
        self.decide(ChoiceKey {
            collective,
            root,
            data,
            size_class: size_class(bytes),
            deterministic: settings.deterministic,
            forced: settings.forced,
        })
    }

    pub(super) fn plan(
        &mut self,
        algorithm: Algorithm,
        collective: Collective,
        root: Rank,
    ) -> Result<PlanId, CollectiveError> {
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

    pub(super) fn drop_completed(&mut self) {
        let Self { engine, abandoned, .. } = self;
        abandoned.retain(|(ticket, _)| engine.take(*ticket).is_none() && engine.has(*ticket));
    }
}

fn size_class(bytes: u64) -> u32 {
    bytes.max(1).checked_next_power_of_two().map_or(63, u64::trailing_zeros)
}

#[cfg(test)]
mod tests {
    use super::size_class;

    #[test]
    fn a_class_ends_at_its_power_of_two() {
        assert_eq!([0, 1, 2, 3, 4, 5, 8, 9].map(size_class), [0, 0, 1, 2, 2, 3, 3, 4]);
        assert_eq!([1 << 63, u64::MAX].map(size_class), [63, 63]);
    }
}
