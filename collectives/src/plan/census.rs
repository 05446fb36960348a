//! Counted costs of a plan: steps, messages and blocks of each rank, and the critical path. Every
//! block counts as one; each strand sends one block per unit of time and receives one concurrently.

use core::fmt;

use super::walk::{StepVisitor, StrandId, visit_steps};
use super::{BlockForm, Schedule, Span, Step};
use crate::types::Rank;

/// Counts of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Count {
    /// Steps.
    pub steps: u64,
    /// Messages sent.
    pub sends: u64,
    /// Messages received.
    pub receives: u64,
    /// Blocks sent.
    pub sent: Blocks,
    /// Blocks received.
    pub received: Blocks,
    /// Blocks read by reductions: two for each received block that is reduced.
    pub reduced: u64,
    /// Blocks copied.
    pub copied: u64,
}

/// Blocks, by form.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Blocks {
    /// Of elements.
    pub elements: u64,
    /// Of partial results: longer, if the accumulator type is.
    pub partials: u64,
}

impl Blocks {
    /// Both.
    #[must_use]
    pub const fn all(self) -> u64 {
        self.elements + self.partials
    }

    fn add(&mut self, form: BlockForm, blocks: u32) {
        match form {
            BlockForm::Element => self.elements += u64::from(blocks),
            BlockForm::Partial => self.partials += u64::from(blocks),
        }
    }
}

impl Count {
    /// The counts of `rank` in `schedule`. Steps of other ranks are not generated.
    #[must_use]
    pub fn of(schedule: &dyn Schedule, rank: Rank) -> Self {
        let mut count = Self::default();
        for strand in 0..schedule.strands() {
            schedule.steps(strand, rank).for_each(|step| count.add(&step));
        }
        count
    }

    fn add(&mut self, step: &Step) {
        self.steps += 1;
        match step {
            Step::Send { span, .. } => {
                self.sends += 1;
                self.sent.add(span.place.form(), span.blocks);
            }
            Step::Recv { into, .. } => {
                self.receives += 1;
                self.received.add(into.place.form(), into.blocks);
            }
            Step::RecvReduce { form, into, .. } => {
                self.receives += 1;
                self.received.add(*form, into.blocks);
                self.reduced += 2 * u64::from(into.blocks);
            }
            Step::Reduce { sources, .. } => {
                self.reduced += sources.iter().map(|source| u64::from(source.blocks)).sum::<u64>()
            }
            Step::Copy { from, .. } => self.copied += u64::from(from.blocks),
        }
    }
}

/// Counts of a plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlanStatistics {
    /// By rank.
    pub ranks: Vec<Count>,
    /// The blocks of n: [`Shape::whole`](super::Shape::whole).
    pub whole: u64,
    /// The longest chain of messages: how often the plan has the latency.
    pub hops: u64,
    /// Length of the critical path, in blocks, without slices.
    pub length: u64,
}

impl PlanStatistics {
    /// Counts all of `schedule`, in memory proportional to its ranks.
    #[must_use]
    pub fn of(schedule: &dyn Schedule) -> Self {
        let ranks = schedule.shape().ranks() as usize;
        let mut counting = Counting {
            ranks,
            counts: vec![Count::default(); ranks],
            clocks: vec![Clock::default(); ranks * schedule.strands() as usize],
        };
        visit_steps(schedule, &mut counting);
        let latest = |of: fn(&Clock) -> u64| counting.clocks.iter().map(of).max().unwrap_or(0);
        Self {
            whole: schedule.shape().whole(),
            hops: latest(|clock| clock.hops),
            length: latest(|clock| clock.now.max(clock.sends_until)),
            ranks: counting.counts,
        }
    }

    /// The most blocks that a rank sends or receives: the bandwidth cost with enough slices.
    #[must_use]
    pub fn busiest(&self) -> u64 {
        let one_way = |count: &Count| count.sent.all().max(count.received.all());
        self.ranks.iter().map(one_way).max().unwrap_or(0)
    }

    /// Blocks as a multiple of n; 0 for barriers.
    #[must_use]
    pub fn multiple(&self, blocks: u64) -> f64 {
        if self.whole == 0 {
            0.0
        } else {
            blocks as f64 / self.whole as f64
        }
    }
}

/// One line: hops, the blocks of the busiest rank, and the critical path.
impl fmt::Display for PlanStatistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let messages: u64 = self.ranks.iter().map(|count| count.sends).sum();
        write!(
            f,
            "{} hops, {messages} messages; the busiest rank moves {:.3} n one way, one after another go {:.3} n",
            self.hops,
            self.multiple(self.busiest()),
            self.multiple(self.length)
        )
    }
}

#[derive(Clone, Copy, Default)]
struct Clock {
    hops: u64,
    now: u64,
    sends_until: u64,
    receives_until: u64,
}

struct Counting {
    ranks: usize,
    counts: Vec<Count>,
    clocks: Vec<Clock>,
}

impl Counting {
    fn clock(&mut self, who: StrandId) -> &mut Clock {
        &mut self.clocks[who.strand as usize * self.ranks + who.rank.index()]
    }
}

/// A message in flight: the messages before it, and when its transmission began.
struct Sent {
    hops: u64,
    at: u64,
}

impl StepVisitor for Counting {
    type Message = Sent;

    fn send(&mut self, who: StrandId, step: &Step) -> Sent {
        self.counts[who.rank.index()].add(step);
        let length = if let Step::Send { span, .. } = step {
            blocks(*span)
        } else {
            0
        };
        let clock = self.clock(who);
        let at = clock.now.max(clock.sends_until);
        clock.sends_until = at + length;
        Sent {
            hops: clock.hops + 1,
            at,
        }
    }

    fn receive(&mut self, who: StrandId, step: &Step, message: Sent) {
        self.counts[who.rank.index()].add(step);
        let length = match step {
            Step::Recv { into, .. } | Step::RecvReduce { into, .. } => blocks(*into),
            _ => 0,
        };
        let clock = self.clock(who);
        clock.receives_until = clock.receives_until.max(message.at) + length;
        clock.now = clock.now.max(clock.receives_until);
        clock.hops = clock.hops.max(message.hops);
    }

    fn local(&mut self, who: StrandId, step: &Step) {
        self.counts[who.rank.index()].add(step);
    }
}

fn blocks(span: Span) -> u64 {
    u64::from(span.blocks)
}

#[cfg(test)]
mod tests {
    use super::{Count, PlanStatistics};
    use crate::algorithm::Algorithm;
    use crate::plan::{Collective, PlanMemory, Schedule, Shape, Step};
    use crate::types::Rank;

    fn census(algorithm: Algorithm, collective: Collective, ranks: u32) -> PlanStatistics {
        let order: Vec<_> = (0..ranks).map(Rank).collect();
        let schedule = algorithm.schedule(collective, &order, Rank(0)).expect("a schedule");
        let census = PlanStatistics::of(&*schedule);
        let one_by_one: Vec<_> = order.iter().map(|&rank| Count::of(&*schedule, rank)).collect();
        assert_eq!(census.ranks, one_by_one);
        census
    }

    /// Hops, and as multiples of n: the blocks of the busiest rank, and the critical path.
    fn check(algorithm: Algorithm, collective: Collective, ranks: u32, hops: u32, busiest: f64, length: f64) {
        let census = census(algorithm, collective, ranks);
        let name = format!("{algorithm} {collective} of {ranks}: {census}");
        assert_eq!(census.hops, u64::from(hops), "{name}");
        let near = |blocks, expected: f64| (census.multiple(blocks) - expected).abs() < 1e-9;
        assert!(near(census.busiest(), busiest), "{name}, not {busiest}");
        assert!(near(census.length, length), "{name}, not {length}");
    }

    #[test]
    fn costs_are_what_the_headers_say() {
        use Algorithm::{Bruck, FullMesh, HalvingDoubling, OneShot, RecursiveDoubling, Ring, Tree};
        use Collective::{
            AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Reduce, ReduceScatter, Scatter, SendRecv,
        };
        for p in 2..=33 {
            let n = f64::from(p);
            let (part, log) = ((n - 1.0) / n, f64::from(p).log2().ceil());
            let rounds = log as u32;
            check(Ring, AllReduce, p, 2 * (p - 1), 2.0 * part, 2.0 * part);
            check(Ring, AllGather, p, p - 1, part, part);
            check(Ring, ReduceScatter, p, p - 1, part, part);
            check(Ring, Broadcast, p, p - 1, 1.0, n - 1.0);
            check(Ring, Reduce, p, p - 1, 1.0, n - 1.0);
            check(FullMesh, AllReduce, p, 2, 2.0 * part, 2.0 * part);
            check(FullMesh, AllGather, p, 1, part, part);
            check(FullMesh, ReduceScatter, p, 1, part, part);
            check(FullMesh, AllToAll, p, 1, part, part);
            check(FullMesh, Broadcast, p, 1, n - 1.0, n - 1.0);
            check(FullMesh, Reduce, p, 1, n - 1.0, n - 1.0);
            check(FullMesh, Gather, p, 1, part, part);
            check(FullMesh, Scatter, p, 1, part, part);
            check(FullMesh, SendRecv, p, 1, 1.0, 1.0);
            check(OneShot, AllReduce, p, 1, n - 1.0, n - 1.0);
            check(Bruck, AllGather, p, rounds, part, part);
            check(RecursiveDoubling, Barrier, p, rounds, 0.0, 0.0);
            if p.is_power_of_two() {
                check(RecursiveDoubling, AllReduce, p, rounds, log, log);
                check(RecursiveDoubling, AllGather, p, rounds, part, part);
                check(HalvingDoubling, AllReduce, p, 2 * rounds, 2.0 * part, 2.0 * part);
                check(HalvingDoubling, ReduceScatter, p, rounds, part, part);
                check(Bruck, AllToAll, p, rounds, log / 2.0, log / 2.0);
                check(Tree, Broadcast, p, rounds, log, log);
                check(Tree, Reduce, p, rounds, log, log);
                check(Tree, AllReduce, p, 2 * rounds, log, 2.0 * log);
                check(Tree, Gather, p, rounds, part, part);
                check(Tree, Scatter, p, rounds, part, part);
                check(Tree, Barrier, p, 2 * rounds, 0.0, 0.0);
            }
        }
    }

    #[test]
    fn other_numbers_of_ranks_cost_a_fold_more() {
        for p in (3..64u32).filter(|p| !p.is_power_of_two()) {
            let rounds = u64::from(p.ilog2());
            for (algorithm, collective, hops) in [
                (Algorithm::RecursiveDoubling, Collective::AllReduce, rounds + 2),
                (Algorithm::RecursiveDoubling, Collective::AllGather, rounds + 2),
                (Algorithm::HalvingDoubling, Collective::AllReduce, 2 * rounds + 2),
                (Algorithm::HalvingDoubling, Collective::ReduceScatter, rounds + 2),
            ] {
                // With few folded ranks, no longest chain of messages begins and ends with one.
                let census = census(algorithm, collective, p);
                let name = format!("{algorithm} {collective} of {p}: {census}");
                assert!(census.hops <= hops && census.hops > hops - 2, "{name}");
                assert!(census.hops == hops || !(p + 1).is_power_of_two() || p == 3, "{name}");
            }
        }
    }

    #[test]
    fn two_trees_share_the_work() {
        for p in 2..=130u32 {
            let depth = u64::from((p - 1).ilog2()) + 1;
            for (collective, hops, moves) in [
                (Collective::Broadcast, depth, 1.0),
                (Collective::Reduce, depth, 1.0),
                (Collective::AllReduce, 2 * depth, 2.0),
            ] {
                let census = census(Algorithm::DoubleBinaryTree, collective, p);
                assert!(census.hops <= hops, "{collective} of {p}: {census}");
                assert!(
                    census.multiple(census.busiest()) <= moves,
                    "{collective} of {p}: {census}"
                );
            }
        }
    }

    /// Steps are generated lazily: the first ones of ten thousand ranks are available at once.
    #[test]
    fn sixteen_thousand_ranks_are_counted_one_at_a_time() {
        let p = 16_384;
        let order: Vec<_> = (0..p).map(Rank).collect();
        for &collective in Collective::ALL {
            for algorithm in Algorithm::of(collective) {
                let schedule = algorithm.schedule(collective, &order, Rank(0)).expect("a schedule");
                let count = Count::of(&*schedule, Rank(p - 1));
                assert!(count.sends + count.receives > 0, "{algorithm} {collective}");
                let first: Option<Step> = schedule.steps(0, Rank(p / 2)).next();
                assert!(first.is_some(), "{algorithm} {collective}");
            }
        }
    }

    #[test]
    fn what_is_sent_is_received() {
        for &collective in Collective::ALL {
            for algorithm in Algorithm::of(collective) {
                for p in 1..=20 {
                    let census = census(algorithm, collective, p);
                    let sum = |of: fn(&Count) -> [u64; 3]| {
                        census
                            .ranks
                            .iter()
                            .map(of)
                            .fold([0; 3], |sum, one| [0, 1, 2].map(|i| sum[i] + one[i]))
                    };
                    let sent = sum(|count| [count.sends, count.sent.elements, count.sent.partials]);
                    let received = sum(|count| [count.receives, count.received.elements, count.received.partials]);
                    assert_eq!(sent, received, "{algorithm} {collective} of {p}");
                }
            }
        }
    }

    #[test]
    fn a_barrier_is_no_multiple_of_anything() {
        let census = census(Algorithm::Tree, Collective::Barrier, 4);
        assert_eq!((census.whole, census.multiple(3)), (0, 0.0));
    }

    /// A schedule in which a rank waits for a message that is never sent is counted up to there.
    #[test]
    fn a_plan_that_is_wrong_is_counted_as_far_as_it_goes() {
        struct Stuck(Shape);
        impl Schedule for Stuck {
            fn shape(&self) -> &Shape {
                &self.0
            }
            fn strands(&self) -> u32 {
                1
            }
            fn steps(&self, _: u32, rank: Rank) -> Box<dyn Iterator<Item = Step> + Send + '_> {
                let into = crate::plan::Span::block(PlanMemory::Output, 0);
                Box::new(
                    (rank == Rank(0))
                        .then_some(Step::Recv { from: Rank(1), into })
                        .into_iter(),
                )
            }
            fn scratch(&self, _: Rank) -> Vec<u32> {
                Vec::new()
            }
            fn partial(&self, _: Rank) -> Vec<u32> {
                Vec::new()
            }
        }
        let order = Box::new([Rank(0), Rank(1)]);
        let shape = Shape {
            collective: Collective::SendRecv,
            order,
            root: Rank(0),
            blocks: 1,
        };
        let census = PlanStatistics::of(&Stuck(shape));
        assert_eq!((census.hops, census.ranks[0].steps), (0, 0));
    }
}
