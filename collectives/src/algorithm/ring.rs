//! Ring: each rank only sends to the next one. All links are always busy, and the latency grows
//! with p: for large counts.

use super::{Members, Recipe, SINGLE_RANK, copy, recv, send};
use crate::plan::{BlockForm, PlanMemory, Span, Step};

/// p blocks go around to be reduced, and again to be distributed. 2(p−1) steps, 2(p−1)/p·n sent and
/// received. Block b is reduced in the order of the ring, from position b on: the order depends on
/// the block.
pub(super) const ALL_REDUCE: Recipe = Recipe {
    blocks: |p| p,
    deterministic: false,
    steps: |members, _, v| {
        let p = members.ranks();
        let (before, after) = (members.rank(v + p - 1), members.rank(v + 1));
        let output = move |position: u32| Span::block(PlanMemory::Output, position % p);
        let gather = (0..p - 1).flat_map(move |step| {
            [
                send(after, output(v + 1 + p - step)),
                recv(before, output(v + p - step)),
            ]
        });
        Box::new(reduce_around(members, v, move |turn| (v + p - turn) % p, output(v + 1)).chain(gather))
    },
    partial: |members, v| {
        let p = members.ranks();
        (1..p - 1).map(|turn| (v + p - turn) % p).collect()
    },
    ..SINGLE_RANK
};

/// p−1 steps, (p−1)/p·n sent and received by each rank. The part of the rank at position v is
/// reduced in the order of the ring, from position v+1 on to v.
pub(super) const REDUCE_SCATTER: Recipe = Recipe {
    steps: |members, _, v| {
        let p = members.ranks();
        let part = move |turn| members.rank(v + 2 * p - 1 - turn).0;
        Box::new(reduce_around(members, v, part, Span::block(PlanMemory::Output, 0)))
    },
    partial: |members, v| {
        let p = members.ranks();
        (1..p - 1).map(|turn| members.rank(v + 2 * p - 1 - turn).0).collect()
    },
    ..SINGLE_RANK
};

/// In turn t the rank sends block `block(t)` and adds its contribution to `block(t + 1)`; the last
/// goes into `last`. Turn t uses block t of [`PlanMemory::Partial`]: none in flight is written.
fn reduce_around<'a>(
    members: &'a Members,
    v: u32,
    block: impl Fn(u32) -> u32 + Send + 'a,
    last: Span,
) -> impl Iterator<Item = Step> + Send + 'a {
    let p = members.ranks();
    let (before, after) = (members.rank(v + p - 1), members.rank(v + 1));
    (0..p - 1).flat_map(move |turn| {
        let (form, span) = match turn.checked_sub(1) {
            None => (BlockForm::Element, Span::block(PlanMemory::Input, block(0))),
            Some(done) => (BlockForm::Partial, Span::block(PlanMemory::Partial, done)),
        };
        let into = if turn == p - 2 {
            last
        } else {
            Span::block(PlanMemory::Partial, turn)
        };
        let with = Span::block(PlanMemory::Input, block(turn + 1));
        let from = before;
        [send(after, span), Step::RecvReduce { from, form, with, into }]
    })
}

/// p−1 steps, (p−1)/p·n sent and received by each rank.
pub(super) const ALL_GATHER: Recipe = Recipe {
    steps: |members, _, v| {
        let p = members.ranks();
        let (before, after) = (members.rank(v + p - 1), members.rank(v + 1));
        let output = move |turn: u32| Span::block(PlanMemory::Output, members.rank(v + p - turn).0);
        let input = Span::block(PlanMemory::Input, 0);
        let first = [send(after, input), copy(input, output(0)), recv(before, output(1))];
        let others = (1..p - 1).flat_map(move |turn| [send(after, output(turn)), recv(before, output(turn + 1))]);
        Box::new(first.into_iter().chain(others))
    },
    ..SINGLE_RANK
};

/// Along the chain from the root, slices pipelined. p−1 steps; each rank but the last sends n, each
/// but the root receives n.
pub(super) const BROADCAST: Recipe = Recipe {
    steps: |members, _, v| {
        let (input, output) = (Span::block(PlanMemory::Input, 0), Span::block(PlanMemory::Output, 0));
        let (p, u) = (members.ranks(), members.distance_from_root(v));
        if u == 0 {
            return Box::new([send(members.rank(v + 1), input), copy(input, output)].into_iter());
        }
        let on = (u < p - 1).then(|| send(members.rank(v + 1), output));
        Box::new(std::iter::once(recv(members.rank(v + p - 1), output)).chain(on))
    },
    ..SINGLE_RANK
};

/// Along the chain that ends at the root. p−1 steps; each rank but the root sends n, each but the
/// first receives n. Order: positions r−1, r−2 … r+1, r, where r is the root's.
pub(super) const REDUCE: Recipe = Recipe {
    steps: |members, _, v| {
        let input = Span::block(PlanMemory::Input, 0);
        let (p, u) = (members.ranks(), members.distance_from_root(v));
        let towards_root = members.rank(v + p - 1);
        if u == p - 1 {
            return Box::new(std::iter::once(send(towards_root, input)));
        }
        let into = Span::block(
            if u == 0 {
                PlanMemory::Output
            } else {
                PlanMemory::Partial
            },
            0,
        );
        let add = Step::RecvReduce {
            from: members.rank(v + 1),
            form: if u + 1 == p - 1 {
                BlockForm::Element
            } else {
                BlockForm::Partial
            },
            with: input,
            into,
        };
        let on = (u > 0).then(|| send(towards_root, into));
        Box::new(std::iter::once(add).chain(on))
    },
    partial: |members, v| {
        let u = members.distance_from_root(v);
        (u > 0 && u < members.ranks() - 1).then_some(0).into_iter().collect()
    },
    ..SINGLE_RANK
};
