//! Mutation tests: every step of every algorithm is damaged; the checker finds each.

use super::prove;
use crate::algorithm::Algorithm;
use crate::plan::{BlockForm, Collective, Plan, PlanMemory, Span, Step};
use crate::types::Rank;

fn plans() -> impl Iterator<Item = (String, Plan)> {
    let pairs = Collective::ALL
        .iter()
        .flat_map(|&collective| Algorithm::of(collective).map(move |algorithm| (collective, algorithm)));
    pairs.flat_map(|(collective, algorithm)| {
        (2..=7).map(move |ranks| {
            let order: Vec<_> = (0..ranks).map(Rank).collect();
            let schedule = algorithm.schedule(collective, &order, Rank(1)).expect("a schedule");
            (format!("{algorithm} {collective} of {ranks}"), Plan::of(&*schedule))
        })
    })
}

/// `damage` returns a damaged plan, which must be detected, or `None`.
fn every_step(damage: impl Fn(&Plan, usize, usize, usize) -> Option<Plan>) -> usize {
    let mut damaged = 0;
    for (name, plan) in plans() {
        for (rank, program) in plan.programs.iter().enumerate() {
            for (strand, steps) in program.strands.iter().enumerate() {
                for (number, step) in steps.iter().enumerate() {
                    let Some(worse) = damage(&plan, rank, strand, number) else {
                        continue;
                    };
                    damaged += 1;
                    assert!(
                        prove(&worse).is_err(),
                        "{name}, rank {rank}, step {number} {step} damaged:\n{worse}"
                    );
                }
            }
        }
    }
    damaged
}

#[test]
fn a_step_that_is_left_out() {
    let damaged = every_step(|plan, rank, strand, number| {
        let mut plan = plan.clone();
        plan.programs[rank].strands[strand].remove(number);
        Some(plan)
    });
    assert!(damaged > 1000, "{damaged}");
}

#[test]
fn an_exchange_that_is_done_twice_at_one_end() {
    let damaged = every_step(|plan, rank, strand, number| {
        let mut plan = plan.clone();
        let steps = &mut plan.programs[rank].strands[strand];
        let step = steps[number].clone();
        if matches!(step, Step::Reduce { .. } | Step::Copy { .. }) {
            return None;
        }
        steps.insert(number, step);
        Some(plan)
    });
    assert!(damaged > 1000, "{damaged}");
}

#[test]
fn another_peer() {
    let damaged = every_step(|plan, rank, strand, number| {
        let mut plan = plan.clone();
        let ranks = plan.shape.ranks();
        match &mut plan.programs[rank].strands[strand][number] {
            Step::Send { to: peer, .. } | Step::Recv { from: peer, .. } | Step::RecvReduce { from: peer, .. } => {
                peer.0 = (peer.0 + 1) % ranks;
            }
            Step::Reduce { .. } | Step::Copy { .. } => return None,
        }
        Some(plan)
    });
    assert!(damaged > 1000, "{damaged}");
}

#[test]
fn another_form() {
    let damaged = every_step(|plan, rank, strand, number| {
        let mut plan = plan.clone();
        match &mut plan.programs[rank].strands[strand][number] {
            Step::RecvReduce { form, .. } => {
                *form = if *form == BlockForm::Element {
                    BlockForm::Partial
                } else {
                    BlockForm::Element
                }
            }
            _ => return None,
        }
        Some(plan)
    });
    assert!(damaged > 100, "{damaged}");
}

fn read(step: &mut Step) -> Option<&mut Span> {
    match step {
        Step::Send { span, .. } => Some(span),
        Step::RecvReduce { with, .. } => Some(with),
        Step::Reduce { sources, .. } => sources.first_mut(),
        Step::Copy { from, .. } => Some(from),
        Step::Recv { .. } => None,
    }
}

fn written(step: &mut Step) -> Option<&mut Span> {
    match step {
        Step::Recv { into, .. }
        | Step::RecvReduce { into, .. }
        | Step::Reduce { into, .. }
        | Step::Copy { into, .. } => Some(into),
        Step::Send { .. } => None,
    }
}

#[test]
fn another_block_read() {
    for by in [1, u32::MAX] {
        let damaged = every_step(|plan, rank, strand, number| {
            let mut plan = plan.clone();
            let span = read(&mut plan.programs[rank].strands[strand][number]).filter(|span| span.blocks > 0)?;
            span.first = span.first.wrapping_add(by);
            Some(plan)
        });
        assert!(damaged > 1000, "{damaged}");
    }
}

#[test]
fn another_block_written() {
    for by in [1, u32::MAX] {
        let damaged = every_step(|plan, rank, strand, number| {
            let mut plan = plan.clone();
            let span = written(&mut plan.programs[rank].strands[strand][number]).filter(|span| span.blocks > 0)?;
            span.first = span.first.wrapping_add(by);
            Some(plan)
        });
        assert!(damaged > 1000, "{damaged}");
    }
}

#[test]
fn another_place() {
    let damaged = every_step(|plan, rank, strand, number| {
        let mut plan = plan.clone();
        let span = written(&mut plan.programs[rank].strands[strand][number]).filter(|span| span.blocks > 0)?;
        span.place = if span.place == PlanMemory::Output {
            PlanMemory::Input
        } else {
            PlanMemory::Output
        };
        Some(plan)
    });
    assert!(damaged > 1000, "{damaged}");
}

#[test]
fn a_block_less_or_more() {
    for by in [1, u32::MAX] {
        let damaged = every_step(|plan, rank, strand, number| {
            let mut plan = plan.clone();
            let step = &mut plan.programs[rank].strands[strand][number];
            let span = if matches!(step, Step::Send { .. }) {
                read(step)
            } else {
                written(step)
            }?;
            span.blocks = span.blocks.checked_add_signed(by as i32)?;
            Some(plan)
        });
        assert!(damaged > 1000, "{damaged}");
    }
}

/// A barrier may have redundant messages: information reaches some ranks by several paths.
#[test]
fn a_message_that_is_left_out() {
    let damaged = every_step(|plan, rank, strand, number| {
        let mut plan = plan.clone();
        let steps = &mut plan.programs[rank].strands[strand];
        let Step::Send { to, .. } = steps[number] else {
            return None;
        };
        if plan.shape.collective == Collective::Barrier {
            return None;
        }
        let to_same = |step: &&Step| matches!(step, Step::Send { to: other, .. } if *other == to);
        let index = steps[..number].iter().filter(to_same).count();
        steps.remove(number);
        let others = &mut plan.programs[to.index()].strands[strand];
        let from_here = |(_, step): &(usize, &Step)| matches!(step, Step::Recv { from, .. } | Step::RecvReduce { from, .. } if from.index() == rank);
        let (received, _) = others.iter().enumerate().filter(from_here).nth(index)?;
        others.remove(received);
        Some(plan)
    });
    assert!(damaged > 1000, "{damaged}");
}
