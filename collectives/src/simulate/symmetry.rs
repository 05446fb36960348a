//! Symmetry check of a schedule.
//!
//! If every rank's steps are the first one's, rotated by its position, then on a uniform fabric all
//! ranks are in the same state at all times: one is simulated for all.

use std::thread;

use crate::plan::{BlockForm, Schedule, Span, Step};
use crate::types::Rank;

/// Ranks that are compared in one pass over the first one's steps.
const RANKS_PER_PASS: usize = 32;

/// Whether all ranks do the same. Positions in memory may differ, lengths may not.
pub(super) fn all_ranks_symmetric(schedule: &dyn Schedule) -> bool {
    let order = &schedule.shape().order;
    if order.len() < 2 {
        return false;
    }
    let mut position = vec![0; order.len()];
    for (place, rank) in order.iter().enumerate() {
        position[rank.index()] = place;
    }
    let position = &position;
    let probe = [1, order.len() / 2, order.len() - 1];
    if !match_the_first(schedule, position, &probe) {
        return false;
    }
    let rest: Vec<usize> = (1..order.len()).collect();
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let share = rest.len().div_ceil(workers).max(1);
    thread::scope(|scope| {
        let parts: Vec<_> = rest
            .chunks(share)
            .map(|part| {
                scope.spawn(move || {
                    part.chunks(RANKS_PER_PASS)
                        .all(|some| match_the_first(schedule, position, some))
                })
            })
            .collect();
        parts.into_iter().all(|part| part.join().unwrap_or(false))
    })
}

fn match_the_first(schedule: &dyn Schedule, position: &[usize], places: &[usize]) -> bool {
    let order = &schedule.shape().order;
    (0..schedule.strands()).all(|strand| {
        let mut others: Vec<_> = places
            .iter()
            .map(|&place| (place, schedule.steps(strand, order[place])))
            .collect();
        let offset = |place: usize, peer: Rank| (position[peer.index()] + order.len() - place) % order.len();
        for first in schedule.steps(strand, order[0]) {
            let same = others.iter_mut().all(|(place, steps)| {
                steps
                    .next()
                    .is_some_and(|other| is_same(&first, &other, |peer| offset(0, peer), |peer| offset(*place, peer)))
            });
            if !same {
                return false;
            }
        }
        others.iter_mut().all(|(_, steps)| steps.next().is_none())
    })
}

fn is_same(one: &Step, other: &Step, of_one: impl Fn(Rank) -> usize, of_other: impl Fn(Rank) -> usize) -> bool {
    let length = |span: &Span| (span.place.form() == BlockForm::Partial, span.blocks);
    match (one, other) {
        (Step::Send { to, span }, Step::Send { to: to2, span: span2 }) => {
            of_one(*to) == of_other(*to2) && length(span) == length(span2)
        }
        (
            Step::Recv { from, into },
            Step::Recv {
                from: from2,
                into: into2,
            },
        ) => of_one(*from) == of_other(*from2) && length(into) == length(into2),
        (
            Step::RecvReduce { from, form, into, .. },
            Step::RecvReduce {
                from: from2,
                form: form2,
                into: into2,
                ..
            },
        ) => of_one(*from) == of_other(*from2) && form == form2 && length(into) == length(into2),
        (
            Step::Reduce { sources, into },
            Step::Reduce {
                sources: sources2,
                into: into2,
            },
        ) => length(into) == length(into2) && sources.iter().map(length).eq(sources2.iter().map(length)),
        (Step::Copy { from, .. }, Step::Copy { from: from2, .. }) => length(from) == length(from2),
        _ => false,
    }
}
