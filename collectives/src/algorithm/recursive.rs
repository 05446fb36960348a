//! Recursive doubling: pairs at distances 1, 2, 4 … exchange all their data, so the amount doubles
//! with every round.
//!
//! If p is not a power of two, ranks are folded ([`Fold`]), which takes two steps more. Barrier
//! needs no folding, as information may reach a rank twice.

use super::fold::{Fold, Role};
use super::{Members, Recipe, SINGLE_RANK, copy, recv, send};
use crate::plan::{BlockForm, PlanMemory, Span, Step};

/// For the smallest counts. log₂ p steps, log₂ p·n sent and received; ⌊log₂ p⌋+2 steps if p is not
/// a power of two. Reduced in pairs, then pairs of pairs: ((0 ⊕ 1) ⊕ (2 ⊕ 3)) ⊕ …; a folded rank
/// with its core first. Both of a pair add the same two values, and so have the same bits.
pub(super) const ALL_REDUCE: Recipe = Recipe {
    steps: |members, _, v| Box::new(all_reduce(members, v).into_iter()),
    partial: |members, v| {
        let fold = Fold::new(members.ranks());
        match fold.role(v) {
            Role::Core(core) => vec![0; (fold.rounds - 1 + u32::from(fold.has_folded(core))).min(2) as usize],
            Role::Folded => Vec::new(),
        }
    },
    ..SINGLE_RANK
};

fn all_reduce(members: &Members, v: u32) -> Vec<Step> {
    let fold = Fold::new(members.ranks());
    let output = Span::block(PlanMemory::Output, 0);
    let mut held = Span::block(PlanMemory::Input, 0);
    let Role::Core(core) = fold.role(v) else {
        let into = members.rank(v - 1);
        return vec![send(into, held), recv(into, output)];
    };
    let mut steps = Vec::with_capacity(2 * fold.rounds as usize + 2);
    // Partial results alternate between two blocks: no round waits for the previous one's message.
    let mut turn = 0;
    if fold.has_folded(core) {
        let into = Span::block(PlanMemory::Partial, 0);
        let (from, form) = (members.rank(v + 1), BlockForm::Element);
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
        let form = if round == 0 && !fold.has_folded(other) {
            BlockForm::Element
        } else {
            BlockForm::Partial
        };
        let into = if round + 1 == fold.rounds {
            output
        } else {
            Span::block(PlanMemory::Partial, turn)
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
    if fold.has_folded(core) {
        steps.push(send(members.rank(v + 1), output));
    }
    steps
}

/// log₂ p steps, (p−1)/p·n sent and received; if p is not a power of two, ⌊log₂ p⌋+2 steps, and a
/// core with a folded rank sends n more. If the order is not rank order, parts are collected in
/// that order, and sorted by copying them.
pub(super) const ALL_GATHER: Recipe = Recipe {
    steps: |members, _, v| {
        let place = if members.sorted {
            PlanMemory::Output
        } else {
            PlanMemory::Scratch
        };
        let sort = if members.sorted { 0 } else { members.ranks() };
        let sort = members.runs(0, sort).map(|run| {
            let subtree_parts = Span::new(PlanMemory::Scratch, run.at, run.ranks);
            copy(subtree_parts, Span::new(PlanMemory::Output, run.rank, run.ranks))
        });
        Box::new(all_gather(members, v, place).into_iter().chain(sort))
    },
    scratch: |members, _| {
        let parts = if members.sorted { 0 } else { members.ranks() };
        (0..parts).map(|position| members.rank(position).0).collect()
    },
    ..SINGLE_RANK
};

/// Collects all parts in `place`, in the order of the members.
fn all_gather(members: &Members, v: u32, place: PlanMemory) -> Vec<Step> {
    let p = members.ranks();
    let fold = Fold::new(p);
    let input = Span::block(PlanMemory::Input, 0);
    let all = Span::new(place, 0, p);
    let Role::Core(core) = fold.role(v) else {
        let into = members.rank(v - 1);
        return vec![send(into, input), recv(into, all)];
    };
    let mut steps = vec![copy(input, Span::block(place, v))];
    if fold.has_folded(core) {
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
    if fold.has_folded(core) {
        steps.push(send(members.rank(v + 1), all));
    }
    steps
}

/// Dissemination: in round i each rank notifies the one 2^i behind it. ⌈log₂ p⌉ steps, no bytes.
pub(super) const BARRIER: Recipe = Recipe {
    in_place: false,
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
    ..SINGLE_RANK
};
