//! Closed-form cost of each algorithm, evaluated in the same time for 16,384 ranks as for two.
//!
//! Of one slice: the *path* is the time from the first step to the last; the *load* is the time for
//! which it occupies the busiest rank's processor and adapter. Consecutive slices of a channel are
//! a path apart if all ranks receive the result, else a load. Channels overlap until the load of
//! all exceeds the path of one. So S slices, k of them per channel, take about
//!
//! > path + max((k − 1)·(path or load), (S − 1)·load)
//!
//! Links are equal and not shared. `simulate` models more; the tests compare both.

mod trees;

use super::{Compute, DataMover, Link};
use crate::algorithm::Algorithm;
use crate::plan::Collective;
use crate::simulate::Work;

/// Duration of an operation, ns; `None` if the algorithm does not support the collective.
#[must_use]
pub fn predict_ns(
    algorithm: Algorithm,
    collective: Collective,
    ranks: u32,
    link: &Link,
    compute: &Compute,
    work: &Work,
) -> Option<f64> {
    if ranks == 0 || !algorithm.supports(collective) {
        return None;
    }
    let blocks = blocks(algorithm, collective, ranks);
    let slices = work.slices_of(blocks);
    let channels = u64::from(work.channels.max(1)).min(slices) as f64;
    let whole = work.bytes as f64;
    let message = whole / slices as f64 / f64::from(blocks.max(1));
    // Between two ranks the root of a reduction only receives.
    let sends = collective != Collective::Reduce || ranks > 2;
    let rates = Rates::new(
        link,
        compute,
        work,
        (message, work.touched(collective, ranks, message)),
        sends,
    );
    let slice = rates.slice(algorithm, collective, ranks, whole / slices as f64);
    let follows = if slice.coupled { slice.path } else { slice.load };
    let slices = slices as f64;
    let rounds = (slices / channels).ceil();
    let last_round = slices - (rounds - 1.0) * channels;
    let one_after_another = (rounds - 1.0) * follows + (last_round - 1.0) * slice.load;
    let cost = link.cost(work.protocol);
    let around = if ranks > 1 {
        compute.begin_ns + cost.grant_ns(message) + cost.confirm_ns(message)
    } else {
        compute.begin_ns
    };
    Some(around + slice.path + one_after_another.max((slices - 1.0) * slice.load))
}

pub(crate) fn blocks(algorithm: Algorithm, collective: Collective, ranks: u32) -> u32 {
    use Algorithm as A;
    use Collective as C;
    match (collective, algorithm) {
        (C::AllReduce, A::Ring | A::FullMesh) => ranks,
        (C::AllReduce, A::HalvingDoubling) => 1 << ranks.ilog2(),
        (C::AllReduce | C::Broadcast | C::Reduce, A::DoubleBinaryTree) if ranks > 1 => 2,
        (C::AllReduce | C::Broadcast | C::Reduce | C::SendRecv, _) => 1,
        (C::Barrier, _) => 0,
        _ => ranks,
    }
}

#[derive(Clone, Copy, Default, Debug)]
struct Slice {
    path: f64,
    load: f64,
    coupled: bool,
}

/// Costs in ns, and in ns per byte.
struct Rates {
    send: f64,
    receive: f64,
    latency: f64,
    /// Per byte of the link.
    wire: f64,
    /// Per byte of the sender's and of the receiver's processor.
    give: f64,
    take: f64,
    gamma: f64,
    /// Per byte of the first operand that was received into scratch memory, and of other operands.
    gathered: (f64, f64),
    copy: f64,
    /// Bytes of a partial result relative to those of an element.
    wide: f64,
}

#[derive(Clone, Copy, Default)]
struct RankWork {
    sends: f64,
    receives: f64,
    out: f64,
    into: f64,
    /// ns of reductions.
    reducing: f64,
    copied: f64,
}

impl Rates {
    /// For messages of about so many bytes, in an operation of so many; whether the rank that
    /// reduces also sends.
    fn new(link: &Link, compute: &Compute, work: &Work, (message, whole): (f64, f64), sends: bool) -> Self {
        let cost = link.cost(work.protocol);
        let beta = cost.beta(message, whole, false, 1.0);
        let (giving, taking) = link.data_mover.shares(work.protocol, message);
        let own = compute.gamma(message, whole);
        let gathered = cost.gathering(message, whole, sends).filter(|_| giving > taking);
        let wire = match link.data_mover {
            DataMover::Device => cost.beta_ns_per_byte,
            DataMover::Processors => 0.0,
        };
        Self {
            send: cost.send_ns,
            receive: cost.receive_ns,
            // In nearly all algorithms ranks send concurrently.
            latency: cost.latency_ns() + cost.bidirectional_ns,
            wire,
            give: giving * beta,
            take: taking * beta,
            gamma: own.max(cost.reducing(message, whole, sends).unwrap_or(0.0)),
            gathered: (own.max(gathered.unwrap_or(0.0)), own),
            copy: compute.copy(message, whole),
            wide: work.data.accumulator().bytes() as f64 / work.data.bytes() as f64,
        }
    }

    /// Messages that ranks exchange concurrently, of which one rank `sends`, and one `receives`, so
    /// many: the slowest of the sender's processor, its link, the receiver's link and processor.
    fn stage(&self, sends: f64, receives: f64, bytes: f64) -> f64 {
        let (wire, give, take) = (bytes * self.wire, self.giving(bytes), self.receive + bytes * self.take);
        let posted = sends * give + self.latency + wire + take;
        let carried = give + self.latency + sends.max(receives) * wire + take;
        let taken = give + self.latency + wire + receives * take;
        let both = sends * give + receives * take;
        posted.max(carried).max(taken).max(both)
    }

    /// Time of the sender's processor for a message.
    fn giving(&self, bytes: f64) -> f64 {
        self.send + bytes * self.give
    }

    fn hop(&self, bytes: f64) -> f64 {
        self.stage(1.0, 1.0, bytes)
    }

    fn load(&self, duty: RankWork) -> f64 {
        let processor = duty.sends * self.send
            + duty.receives * self.receive
            + duty.out * self.give
            + duty.into * self.take
            + duty.reducing
            + duty.copied * self.copy;
        processor.max(duty.out.max(duty.into) * self.wire)
    }

    /// Exchanges that all ranks do alike: (bytes, whether they are reduced).
    fn exchanges(&self, exchanges: impl IntoIterator<Item = (f64, bool)>, copied: f64) -> Slice {
        let mut duty = RankWork {
            copied,
            ..RankWork::default()
        };
        let mut path = copied * self.copy;
        for (bytes, reduces) in exchanges {
            let reducing = if reduces { bytes * self.gamma } else { 0.0 };
            path += self.hop(bytes) + reducing;
            duty.sends += 1.0;
            duty.receives += 1.0;
            duty.out += bytes;
            duty.into += bytes;
            duty.reducing += reducing;
        }
        Slice::coupled(path, self.load(duty))
    }

    fn slice(&self, algorithm: Algorithm, collective: Collective, ranks: u32, n: f64) -> Slice {
        use Algorithm as A;
        use Collective as C;
        if ranks == 1 {
            let alone = match collective {
                C::Barrier => 0.0,
                _ if collective.reduces() => n * self.gamma,
                _ => n * self.copy,
            };
            return Slice::coupled(alone, alone);
        }
        match (algorithm, collective) {
            (A::Ring, C::Broadcast | C::Reduce) => self.chain(collective, ranks, n),
            (A::Ring, _) => self.ring(collective, ranks, n),
            (A::Tree, _) => self.tree(collective, ranks, n),
            (A::DoubleBinaryTree, _) => self.double_tree(collective, ranks, n),
            (A::RecursiveDoubling, C::Barrier) => self.exchanges(powers(ranks).map(|_| (0.0, false)), 0.0),
            (A::RecursiveDoubling | A::HalvingDoubling, _) => self.folded(algorithm, collective, ranks, n),
            (A::Bruck, _) => self.bruck(collective, ranks, n),
            (A::FullMesh | A::OneShot, _) => self.mesh(algorithm, collective, ranks, n),
        }
    }

    fn ring(&self, collective: Collective, ranks: u32, n: f64) -> Slice {
        let block = n / f64::from(ranks);
        // The first message of a reduction has elements, the others partial results.
        let reducing = (0..ranks - 1).map(|turn| (if turn == 0 { block } else { block * self.wide }, true));
        let gathering = (0..ranks - 1).map(|_| (block, false));
        match collective {
            Collective::AllReduce => self.exchanges(reducing.chain(gathering), 0.0),
            Collective::ReduceScatter => self.exchanges(reducing, 0.0),
            // The rank's own part is copied while the first message is in flight.
            _ => self
                .exchanges(gathering, 0.0)
                .overlap_copy(block * self.copy, self.latency + block * self.wire),
        }
    }

    fn chain(&self, collective: Collective, ranks: u32, n: f64) -> Slice {
        let hops = f64::from(ranks - 1);
        let middle = f64::from(u32::from(ranks > 2));
        if collective == Collective::Broadcast {
            let duty = RankWork {
                sends: middle,
                receives: 1.0,
                out: middle * n,
                into: n,
                ..RankWork::default()
            };
            return self.rooted(
                hops * self.hop(n),
                duty,
                RankWork {
                    sends: 1.0,
                    out: n,
                    copied: n,
                    ..RankWork::default()
                },
            );
        }
        let wide = n * self.wide;
        let path = self.hop(n) + n * self.gamma + (hops - 1.0) * (self.hop(wide) + wide * self.gamma);
        let most = if ranks > 2 { wide } else { n };
        let duty = RankWork {
            sends: middle,
            receives: 1.0,
            out: middle * most,
            into: most,
            reducing: most * self.gamma,
            copied: 0.0,
        };
        Slice::pipelined(path, self.load(duty))
    }

    /// From a root to others: the root also copies its own part, after it has sent the others.
    fn rooted(&self, path: f64, other: RankWork, root: RankWork) -> Slice {
        let copied = root.sends * self.send + root.out * self.give + root.copied * self.copy;
        Slice::pipelined(path.max(copied), self.load(root).max(self.load(other)))
    }

    /// Pairwise algorithms: if the number of ranks is not a power of two, the folded ranks send
    /// their data to another rank, and receive the result.
    fn folded(&self, algorithm: Algorithm, collective: Collective, ranks: u32, n: f64) -> Slice {
        let rounds = ranks.ilog2();
        let cores = f64::from(1u32 << rounds);
        let folds = !ranks.is_power_of_two();
        let before = |bytes, reduces| folds.then_some((bytes, reduces));
        // The first round sends elements, unless a rank was folded in.
        let width = |round: u32| if round == 0 && !folds { 1.0 } else { self.wide };
        let part = n / f64::from(ranks);
        // The parts of the largest group of a round: cores with folded ranks come first.
        let group =
            move |round: u32| f64::from((1u32 << round) + (ranks - (1 << ranks.ilog2())).min(1 << round)) * part;
        match (algorithm, collective) {
            (Algorithm::RecursiveDoubling, Collective::AllReduce) => {
                let rounds = (0..rounds).map(|round| (n * width(round), true));
                self.exchanges(before(n, true).into_iter().chain(rounds).chain(before(n, false)), 0.0)
            }
            (Algorithm::RecursiveDoubling, _) => {
                let rounds = (0..rounds).map(|round| (group(round), false));
                self.exchanges(
                    before(part, false).into_iter().chain(rounds).chain(before(n, false)),
                    part,
                )
            }
            (_, Collective::AllReduce) => {
                let halving = (0..rounds).map(|round| (n / f64::from(2u32 << round) * width(round), true));
                let doubling = (0..rounds).map(|round| (n * f64::from(1u32 << round) / cores, false));
                self.exchanges(
                    before(n, true)
                        .into_iter()
                        .chain(halving)
                        .chain(doubling)
                        .chain(before(n, false)),
                    0.0,
                )
            }
            _ => {
                let halving = (0..rounds).map(|round| (group(rounds - 1 - round) * width(round), true));
                let last = before(part * self.wide, true);
                self.exchanges(before(n, true).into_iter().chain(halving).chain(last), 0.0)
            }
        }
    }

    fn bruck(&self, collective: Collective, ranks: u32, n: f64) -> Slice {
        let part = n / f64::from(ranks);
        if collective == Collective::AllGather {
            let parts = powers(ranks).map(|distance| (f64::from(distance.min(ranks - distance)) * part, false));
            return self.exchanges(parts, n + part);
        }
        let travelling = |distance: u32| (1..ranks).filter(|d| d & distance != 0).count() as f64 * part;
        let moved: f64 = powers(ranks).map(travelling).sum();
        self.exchanges(powers(ranks).map(|distance| (travelling(distance), false)), moved + n)
    }

    fn mesh(&self, algorithm: Algorithm, collective: Collective, ranks: u32, n: f64) -> Slice {
        let others = f64::from(ranks - 1);
        let part = n / f64::from(ranks);
        // Reads of what several ranks have written to scratch memory overlap.
        let gathered = |bytes: f64| bytes * (self.gathered.0 + (others - 1.0) * self.gathered.1);
        let all = |bytes: f64, reduces: bool, copied: f64| {
            let reducing = if reduces { gathered(bytes) } else { 0.0 };
            let moved = others * bytes;
            let duty = RankWork {
                sends: others,
                receives: others,
                out: moved,
                into: moved,
                reducing,
                copied,
            };
            let stage = self.stage(others, others, bytes);
            let processor = others * (self.giving(bytes) + self.receive + bytes * self.take) + copied * self.copy;
            Slice::coupled(stage.max(processor) + reducing, self.load(duty))
        };
        let to_root = |bytes: f64, reduces: bool| {
            let (reducing, copied) = if reduces { (gathered(bytes), 0.0) } else { (0.0, bytes) };
            let duty = RankWork {
                receives: others,
                into: others * bytes,
                reducing,
                copied,
                ..RankWork::default()
            };
            // At worst the message that the root receives first arrives last.
            let comes = (self.giving(bytes) + self.latency + others * bytes * self.wire).max(copied * self.copy);
            let takes = others * (self.receive + bytes * self.take);
            let leaf = RankWork {
                sends: 1.0,
                out: bytes,
                ..RankWork::default()
            };
            Slice::pipelined(comes + takes + reducing, self.load(duty).max(self.load(leaf)))
        };
        let from_root = |bytes: f64| {
            let root = RankWork {
                sends: others,
                out: others * bytes,
                copied: bytes,
                ..RankWork::default()
            };
            let leaf = RankWork {
                receives: 1.0,
                into: bytes,
                ..RankWork::default()
            };
            self.rooted(self.stage(others, 1.0, bytes), leaf, root)
        };
        match (algorithm, collective) {
            (Algorithm::OneShot, _) => all(n, true, 0.0),
            (_, Collective::AllReduce) => {
                let (reduce, gather) = (all(part, true, 0.0), all(part, false, 0.0));
                Slice::coupled(reduce.path + gather.path, reduce.load + gather.load)
            }
            (_, Collective::ReduceScatter) => all(part, true, 0.0),
            (_, Collective::SendRecv) => self.exchanges([(n, false)], 0.0),
            (_, Collective::Broadcast) => from_root(n),
            (_, Collective::Scatter) => from_root(part),
            (_, Collective::Reduce) => to_root(n, true),
            (_, Collective::Gather) => to_root(part, false),
            _ => all(part, false, part),
        }
    }
}

impl Slice {
    /// All ranks receive its result.
    fn coupled(path: f64, load: f64) -> Self {
        Self {
            path,
            load,
            coupled: true,
        }
    }

    /// The next one may begin before its result is received.
    fn pipelined(path: f64, load: f64) -> Self {
        Self {
            coupled: false,
            ..Self::coupled(path, load)
        }
    }

    /// With a copy that a rank does while it waits in one of its exchanges.
    fn overlap_copy(mut self, copying: f64, waits: f64) -> Self {
        self.load += copying;
        self.path += (copying - waits).max(0.0);
        self
    }
}

/// 1, 2, 4 … below `ranks`.
fn powers(ranks: u32) -> impl Iterator<Item = u32> {
    (0..u32::BITS)
        .map(|bit| 1 << bit)
        .take_while(move |&power| power < ranks)
}

#[cfg(test)]
mod tests;
