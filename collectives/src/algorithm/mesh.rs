//! Full mesh: direct messages between all pairs; one hop, p−1 messages. Each rank begins with its
//! successor, so that no rank is the first destination of all.
//!
//! Reductions are in rank order, in one pass: the same bits for any order of the members.

use super::{Members, Recipe, SINGLE_RANK, Steps, copy, recv, send};
use crate::plan::{PlanMemory, Span, Step};
use crate::types::Rank;

fn send_order(members: &Members, v: u32) -> impl Iterator<Item = Rank> + Send + '_ {
    (1..members.ranks()).map(move |distance| members.rank(v + distance))
}

/// The peers of the member at position `v` in the order in which they send to it.
fn receive_order(members: &Members, v: u32) -> impl Iterator<Item = Rank> + Send + '_ {
    let p = members.ranks();
    (1..p).map(move |distance| members.rank(v + p - distance))
}

/// The block of `Scratch` for another rank's contribution.
fn contribution(own: u32, other: u32) -> Span {
    Span::block(PlanMemory::Scratch, if other < own { other } else { other - 1 })
}

/// Reduces all contributions to the block `own`, in rank order; the others' are in scratch.
fn reduce_all(members: &Members, rank: u32, own: u32, into: Span) -> Step {
    let source = |other| {
        if other == rank {
            Span::block(PlanMemory::Input, own)
        } else {
            contribution(rank, other)
        }
    };
    Step::Reduce {
        sources: (0..members.ranks()).map(source).collect(),
        into,
    }
}

/// Each rank reduces one of p blocks, and sends the result to all. 2 steps, 2(p−1)/p·n sent and
/// received.
pub(super) const ALL_REDUCE: Recipe = Recipe {
    blocks: |p| p,
    steps: |members, _, v| {
        let rank = members.rank(v).0;
        let output = |rank| Span::block(PlanMemory::Output, rank);
        let sends = send_order(members, v).map(move |to| send(to, output(rank)));
        let receives = receive_order(members, v).map(move |from| recv(from, output(from.0)));
        Box::new(reduce_own(members, v, output(rank)).chain(sends).chain(receives))
    },
    scratch: contributions,
    ..SINGLE_RANK
};

/// 1 step, (p−1)/p·n sent and received by each rank.
pub(super) const REDUCE_SCATTER: Recipe = Recipe {
    steps: |members, _, v| Box::new(reduce_own(members, v, Span::block(PlanMemory::Output, 0))),
    scratch: contributions,
    ..SINGLE_RANK
};

fn reduce_own(members: &Members, v: u32, into: Span) -> impl Iterator<Item = Step> + Send + '_ {
    let rank = members.rank(v).0;
    let give = send_order(members, v).map(|to| send(to, Span::block(PlanMemory::Input, to.0)));
    let take = receive_order(members, v).map(move |from| recv(from, contribution(rank, from.0)));
    let reduce = std::iter::once_with(move || reduce_all(members, rank, rank, into));
    give.chain(take).chain(reduce)
}

fn contributions(members: &Members, v: u32) -> Vec<u32> {
    vec![members.rank(v).0; members.ranks() as usize - 1]
}

/// For the smallest counts of few ranks. 1 step, (p−1)·n sent and received by each rank.
pub(super) const ONE_SHOT: Recipe = Recipe {
    steps: |members, _, v| {
        let rank = members.rank(v).0;
        let give = send_order(members, v).map(|to| send(to, Span::block(PlanMemory::Input, 0)));
        let take = receive_order(members, v).map(move |from| recv(from, contribution(rank, from.0)));
        let reduce = move || reduce_all(members, rank, 0, Span::block(PlanMemory::Output, 0));
        Box::new(give.chain(take).chain(std::iter::once_with(reduce)))
    },
    scratch: |members, _| vec![0; members.ranks() as usize - 1],
    ..SINGLE_RANK
};

/// 1 step; the root receives (p−1)·n, each other rank sends n.
pub(super) const REDUCE: Recipe = Recipe {
    steps: |members, _, v| {
        let (rank, root) = (members.rank(v), members.shape.root);
        if rank != root {
            return Box::new(std::iter::once(send(root, Span::block(PlanMemory::Input, 0))));
        }
        let take = receive_order(members, v).map(move |from| recv(from, contribution(root.0, from.0)));
        let reduce = move || reduce_all(members, root.0, 0, Span::block(PlanMemory::Output, 0));
        Box::new(take.chain(std::iter::once_with(reduce)))
    },
    scratch: |members, v| {
        let others = if members.distance_from_root(v) == 0 {
            members.ranks() - 1
        } else {
            0
        };
        vec![0; others as usize]
    },
    ..SINGLE_RANK
};

/// 1 step; the root sends (p−1)·n, each other rank receives n.
pub(super) const BROADCAST: Recipe = Recipe {
    steps: |members, _, v| from_root(members, v, |_| 0),
    ..SINGLE_RANK
};

/// 1 step; the root sends (p−1)/p·n, each other rank receives n/p.
pub(super) const SCATTER: Recipe = Recipe {
    steps: |members, _, v| from_root(members, v, |rank| rank),
    ..SINGLE_RANK
};

/// The root sends each rank the block of its input that `block` returns.
fn from_root(members: &Members, v: u32, block: fn(u32) -> u32) -> Steps<'_> {
    let (rank, root) = (members.rank(v), members.shape.root);
    let output = Span::block(PlanMemory::Output, 0);
    if rank != root {
        return Box::new(std::iter::once(recv(root, output)));
    }
    let input = move |rank| Span::block(PlanMemory::Input, block(rank));
    let give = send_order(members, v).map(move |to| send(to, input(to.0)));
    Box::new(give.chain(std::iter::once(copy(input(root.0), output))))
}

/// 1 step; the root receives (p−1)/p·n, each other rank sends n/p.
pub(super) const GATHER: Recipe = Recipe {
    steps: |members, _, v| {
        let (rank, root) = (members.rank(v), members.shape.root);
        let input = Span::block(PlanMemory::Input, 0);
        if rank != root {
            return Box::new(std::iter::once(send(root, input)));
        }
        let own = copy(input, Span::block(PlanMemory::Output, root.0));
        let take = receive_order(members, v).map(|from| recv(from, Span::block(PlanMemory::Output, from.0)));
        Box::new(std::iter::once(own).chain(take))
    },
    ..SINGLE_RANK
};

/// 1 step, (p−1)/p·n sent and received by each rank.
pub(super) const ALL_GATHER: Recipe = Recipe {
    steps: |members, _, v| exchange(members, v, |_| 0),
    ..SINGLE_RANK
};

/// Also all-to-all-v. 1 step, (p−1)/p·n sent and received by each rank, where n is one rank's
/// input.
pub(super) const ALL_TO_ALL: Recipe = Recipe {
    in_place: false,
    steps: |members, _, v| exchange(members, v, |rank| rank),
    ..SINGLE_RANK
};

/// Sends each rank the block that `block` returns, and stores received blocks by sender.
fn exchange(members: &Members, v: u32, block: fn(u32) -> u32) -> Steps<'_> {
    let rank = members.rank(v).0;
    let input = move |rank| Span::block(PlanMemory::Input, block(rank));
    let output = |rank| Span::block(PlanMemory::Output, rank);
    let give = send_order(members, v).map(move |to| send(to, input(to.0)));
    let take = receive_order(members, v).map(move |from| recv(from, output(from.0)));
    Box::new(give.chain([copy(input(rank), output(rank))]).chain(take))
}

/// To the next rank, by number, from the previous one. 1 step, n sent and received by each rank.
pub(super) const SEND_RECV: Recipe = Recipe {
    in_place: false,
    steps: |members, _, v| {
        let (p, rank) = (members.ranks(), members.rank(v).0);
        let (next, before) = (Rank((rank + 1) % p), Rank((rank + p - 1) % p));
        let give = send(next, Span::block(PlanMemory::Input, 0));
        Box::new([give, recv(before, Span::block(PlanMemory::Output, 0))].into_iter())
    },
    ..SINGLE_RANK
};
