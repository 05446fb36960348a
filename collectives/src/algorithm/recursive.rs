//! Pairs at distances 1, 2, 4 … exchange all that they have, so what each has doubles with every round.
//!
//! Where p is no power of two, ranks are folded ([`Fold`]): that takes two steps more. Barrier needs no folding: it may reach a rank twice.

use super::fold::{Fold, Role};
use super::{Members, Recipe, copy, nothing, one, recv, send};
use crate::plan::{Form, Place, Span, Step};

/// All-reduce: for the smallest counts.
///
/// log₂ p steps and log₂ p·n sent and received by each rank; ⌊log₂ p⌋+2 steps where p is no power of two. Reduced in pairs, then pairs of pairs: ((0 ⊕ 1) ⊕ (2 ⊕ 3)) ⊕ …; whoever is folded, with its core before all. Both of a pair add the same two values, and so
/// have the same bits.
pub(super) const ALL_REDUCE: Recipe = Recipe {
    blocks: one,
    strands: 1,
    in_place: true,
    deterministic: true,
    steps: |members, _, v| Box::new(all_reduce(members, v).into_iter()),
    scratch: nothing,
    partial: |members, v| {
        let fold = Fold::new(members.ranks());
        match fold.role(v) {
            Role::Core(core) => vec![0; (fold.rounds - 1 + u32::from(fold.has(core))).min(2) as usize],
            Role::Folded => Vec::new(),
        }
    },
};

fn all_reduce(members: &Members, v: u32) -> Vec<Step> {
    let fold = Fold::new(members.ranks());
    let output = Span::block(Place::Output, 0);
    let mut held = Span::block(Place::Input, 0);
    let Role::Core(core) = fold.role(v) else {
        let into = members.rank(v - 1);
        return vec![send(into, held), recv(into, output)];
    };
    let mut steps = Vec::with_capacity(2 * fold.rounds as usize + 2);
    // Partial results are written by turns to two blocks, so that no round waits until the message of the one before has left.
    let mut turn = 0;
    if fold.has(core) {
        let into = Span::block(Place::Partial, 0);
        let (from, form) = (members.rank(v + 1), Form::Element);
        steps.push(Step::RecvReduce {
            from,
            form,
            with: held,
            into,
        });
        (held, turn) = (into, 1);
    }
    for round in 0..fold.rounds {
        let other = core ^ 1 << round;
        let peer = fold.rank(members, other);
        let form = if round == 0 && !fold.has(other) {
            Form::Element
        } else {
            Form::Partial
        };
        let into = if round + 1 == fold.rounds {
            output
        } else {
            Span::block(Place::Partial, turn)
        };
        steps.push(send(peer, held));
        steps.push(Step::RecvReduce {
            from: peer,
            form,
            with: held,
            into,
        });
        (held, turn) = (into, 1 - turn);
    }
    if fold.has(core) {
        steps.push(send(members.rank(v + 1), output));
    }
    steps
}

/// All-gather.
///
/// log₂ p steps and (p−1)/p·n sent and received by each rank; where p is no power of two, ⌊log₂ p⌋+2 steps, and a core into which somebody is folded sends n more. Where the order is not that of the ranks, parts are collected in that order, and sorted by
/// copying them.
pub(super) const ALL_GATHER: Recipe = Recipe {
    blocks: one,
    strands: 1,
    in_place: true,
    deterministic: true,
    steps: |members, _, v| {
        let place = if members.sorted { Place::Output } else { Place::Scratch };
        let sort = if members.sorted { 0 } else { members.ranks() };
        let sort = members.runs(0, sort).map(|run| {
            let collected = Span::new(Place::Scratch, run.at, run.ranks);
            copy(collected, Span::new(Place::Output, run.rank, run.ranks))
        });
        Box::new(all_gather(members, v, place).into_iter().chain(sort))
    },
    scratch: |members, _| {
        let parts = if members.sorted { 0 } else { members.ranks() };
        (0..parts).map(|position| members.rank(position).0).collect()
    },
    partial: nothing,
};

/// Collects all parts in `place`, in the order of the members.
fn all_gather(members: &Members, v: u32, place: Place) -> Vec<Step> {
    let p = members.ranks();
    let fold = Fold::new(p);
    let input = Span::block(Place::Input, 0);
    let all = Span::new(place, 0, p);
    let Role::Core(core) = fold.role(v) else {
        let into = members.rank(v - 1);
        return vec![send(into, input), recv(into, all)];
    };
    let mut steps = vec![copy(input, Span::block(place, v))];
    if fold.has(core) {
        steps.push(recv(members.rank(v + 1), Span::block(place, v + 1)));
    }
    for round in 0..fold.rounds {
        let parts = |group: u32| {
            let (first, end) = (fold.position(group << round), fold.position((group + 1) << round));
            Span::new(place, first, end - first)
        };
        let group = core >> round;
        let peer = fold.rank(members, core ^ 1 << round);
        steps.extend([send(peer, parts(group)), recv(peer, parts(group ^ 1))]);
    }
    if fold.has(core) {
        steps.push(send(members.rank(v + 1), all));
    }
    steps
}

/// Barrier: in round i each tells the one 2^i behind it of all that it has heard of (dissemination).
///
/// ⌈log₂ p⌉ steps, no bytes.
pub(super) const BARRIER: Recipe = Recipe {
    blocks: one,
    strands: 1,
    in_place: false,
    deterministic: true,
    steps: |members, _, v| {
        let p = members.ranks();
        let distances = (0..u32::BITS)
            .map(|round| 1 << round)
            .take_while(move |&distance| distance < p);
        Box::new(distances.flat_map(move |distance| {
            let (to, from) = (members.rank(v + distance), members.rank(v + p - distance));
            [send(to, Span::empty()), recv(from, Span::empty())]
        }))
    },
    scratch: nothing,
    partial: nothing,
};
