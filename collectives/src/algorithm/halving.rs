//! Recursive halving: pairs at distances p/2, p/4 … 1 exchange halves, quarters … of their data, so
//! the amount halves with every round; for all-reduce it doubles again (recursive doubling).
//!
//! If p is not a power of two, ranks are folded ([`Fold`]), which takes one or two steps more.

use super::fold::{Fold, Role};
use super::{Members, Recipe, SINGLE_RANK, copy, recv, send};
use crate::plan::{BlockForm, PlanMemory, Span, Step};

/// Recursive halving (reduce-scatter), then recursive doubling (all-gather). 2·log₂ p steps,
/// 2(p−1)/p·n sent and received; if p is not a power of two, 2·⌊log₂ p⌋+2 steps, and n more each
/// way between a core and its folded rank. Pairs at the largest distance first: with four ranks (0
/// ⊕ 2) ⊕ (1 ⊕ 3), in every block.
pub(super) const ALL_REDUCE: Recipe = Recipe {
    blocks: |p| Fold::new(p).cores(),
    steps: |members, _, v| Box::new(all_reduce(members, v).into_iter()),
    partial: |members, v| match Fold::new(members.ranks()).role(v) {
        Role::Core(core) => kept(members, core).collect(),
        Role::Folded => Vec::new(),
    },
    ..SINGLE_RANK
};

fn all_reduce(members: &Members, v: u32) -> Vec<Step> {
    let fold = Fold::new(members.ranks());
    let cores = fold.cores();
    let all = |place| Span::new(place, 0, cores);
    let Role::Core(core) = fold.role(v) else {
        let into = members.rank(v - 1);
        return vec![send(into, all(PlanMemory::Input)), recv(into, all(PlanMemory::Output))];
    };
    let blocks = |place, first, end| Span::new(place, first, end - first);
    let mut steps = halve(
        members,
        core,
        PlanMemory::Input,
        Some(Span::block(PlanMemory::Output, core)),
        blocks,
    );
    for round in 0..fold.rounds {
        let peer = fold.rank(members, core ^ 1 << round);
        let known = |group: u32| Span::new(PlanMemory::Output, group << round, 1 << round);
        let group = core >> round;
        steps.extend([send(peer, known(group)), recv(peer, known(group ^ 1))]);
    }
    if fold.has_folded(core) {
        steps.push(send(members.rank(v + 1), all(PlanMemory::Output)));
    }
    steps
}

/// log₂ p steps, (p−1)/p·n sent and received; if p is not a power of two, ⌊log₂ p⌋+2 steps, and n
/// more from a folded rank to its core. Order of reduction as in all-reduce; if the order is not
/// that of the ranks, each first copies its contribution into that order.
pub(super) const REDUCE_SCATTER: Recipe = Recipe {
    steps: |members, _, v| {
        let given = if members.sorted {
            PlanMemory::Input
        } else {
            PlanMemory::Scratch
        };
        let sort = if members.sorted { 0 } else { members.ranks() };
        let sort = members.runs(0, sort).map(|run| {
            let input = Span::new(PlanMemory::Input, run.rank, run.ranks);
            copy(input, Span::new(PlanMemory::Scratch, run.at, run.ranks))
        });
        Box::new(sort.chain(reduce_scatter(members, v, given)))
    },
    scratch: |members, _| {
        let parts = if members.sorted { 0 } else { members.ranks() };
        (0..parts).map(|position| members.rank(position).0).collect()
    },
    partial: |members, v| {
        let fold = Fold::new(members.ranks());
        match fold.role(v) {
            Role::Core(core) => {
                let cores = kept(members, core);
                let positions = fold.position(cores.start)..fold.position(cores.end);
                positions.map(|position| members.rank(position).0).collect()
            }
            Role::Folded => vec![members.rank(v).0],
        }
    },
    ..SINGLE_RANK
};

/// The cores whose blocks a core has partial results of: all if it has a folded rank, else those of
/// its half after the first round; none if that is the last.
fn kept(members: &Members, core: u32) -> core::ops::Range<u32> {
    let fold = Fold::new(members.ranks());
    let half = fold.cores() / 2;
    match (fold.has_folded(core), fold.rounds) {
        (true, _) => 0..fold.cores(),
        (false, 1) => 0..0,
        (false, _) => core / half * half..(core / half + 1) * half,
    }
}

fn reduce_scatter(members: &Members, v: u32, given: PlanMemory) -> Vec<Step> {
    let p = members.ranks();
    let fold = Fold::new(p);
    let output = Span::block(PlanMemory::Output, 0);
    let round_off = |partial| Step::Reduce {
        sources: Box::new([Span::block(PlanMemory::Partial, partial)]),
        into: output,
    };
    let Role::Core(core) = fold.role(v) else {
        let into = members.rank(v - 1);
        return vec![
            send(into, Span::new(given, 0, p)),
            recv(into, Span::block(PlanMemory::Partial, 0)),
            round_off(0),
        ];
    };
    let parts = |place, first, end| {
        let (first, end) = (fold.position(first), fold.position(end));
        Span::new(place, first, end - first)
    };
    let last = (!fold.has_folded(core)).then_some(output);
    let mut steps = halve(members, core, given, last, parts);
    if fold.has_folded(core) {
        let rest = Span::block(PlanMemory::Partial, v + 1);
        steps.extend([send(members.rank(v + 1), rest), round_off(v)]);
    }
    steps
}

/// The halving rounds of a core: partial results are in `Partial` from the first block that it
/// keeps, and its own result goes into `last`, if it is complete then.
fn halve(
    members: &Members,
    core: u32,
    given: PlanMemory,
    last: Option<Span>,
    span: impl Fn(PlanMemory, u32, u32) -> Span,
) -> Vec<Step> {
    let fold = Fold::new(members.ranks());
    let mut steps = Vec::with_capacity(4 * fold.rounds as usize + 2);
    let before = span(PlanMemory::Partial, 0, kept(members, core).start).blocks;
    let blocks = |place, from, to| {
        let Span { first, blocks, .. } = span(place, from, to);
        Span::new(
            place,
            if place == PlanMemory::Partial {
                first - before
            } else {
                first
            },
            blocks,
        )
    };
    let mut held = given;
    if fold.has_folded(core) {
        let from = members.rank(fold.position(core) + 1);
        let (with, into) = (
            blocks(given, 0, fold.cores()),
            blocks(PlanMemory::Partial, 0, fold.cores()),
        );
        let form = BlockForm::Element;
        steps.push(Step::RecvReduce { from, form, with, into });
        held = PlanMemory::Partial;
    }
    for round in (0..fold.rounds).rev() {
        let other = core ^ 1 << round;
        let peer = fold.rank(members, other);
        let half = |of: u32, place| blocks(place, of >> round << round, ((of >> round) + 1) << round);
        let first = round + 1 == fold.rounds;
        let form = if first && !fold.has_folded(other) {
            BlockForm::Element
        } else {
            BlockForm::Partial
        };
        let into = match last {
            Some(last) if round == 0 => last,
            _ => half(core, PlanMemory::Partial),
        };
        let with = half(core, held);
        steps.push(send(peer, half(other, held)));
        steps.push(Step::RecvReduce {
            from: peer,
            form,
            with,
            into,
        });
        held = PlanMemory::Partial;
    }
    steps
}
