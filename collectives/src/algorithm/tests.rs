//! Every algorithm is proved, for as many numbers of ranks, roots and orders as the time allows.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::{Algorithm, Unsupported};
use crate::plan::check::prove;
use crate::plan::{Collective, Plan, PlanMemory, Step};
use crate::types::Rank;

mod expression;

fn in_order(ranks: u32) -> Vec<Rank> {
    (0..ranks).map(Rank).collect()
}

fn proved(algorithm: Algorithm, collective: Collective, order: &[Rank], root: Rank) {
    let schedule = algorithm.schedule(collective, order, root).expect("a schedule");
    let plan = Plan::of(&*schedule);
    let proof =
        prove(&plan).unwrap_or_else(|flaw| panic!("{algorithm} {collective} of {}, root {root}: {flaw}", order.len()));
    assert_eq!(proof.in_place, collective.runs_in_place(), "{algorithm} {collective}");
}

fn all() -> impl Iterator<Item = (Algorithm, Collective)> {
    Collective::ALL
        .iter()
        .flat_map(|&collective| Algorithm::of(collective).map(move |algorithm| (algorithm, collective)))
}

#[test]
fn every_algorithm_is_right_for_1_to_64_ranks() {
    for (algorithm, collective) in all() {
        for ranks in 1..=64 {
            proved(algorithm, collective, &in_order(ranks), Rank(ranks / 3));
        }
    }
}

#[test]
fn every_root_and_scattered_ranks() {
    for (algorithm, collective) in all() {
        for ranks in 1..=17 {
            let roots = if collective.has_root() { ranks } else { 1 };
            for root in 0..roots {
                proved(algorithm, collective, &in_order(ranks), Rank(root));
                proved(algorithm, collective, &scattered(ranks), Rank(root));
            }
        }
        for ranks in 18..=64 {
            proved(algorithm, collective, &scattered(ranks), Rank(ranks - 1));
        }
    }
}

fn scattered(ranks: u32) -> Vec<Rank> {
    let (even, odd): (Vec<_>, Vec<_>) = (0..ranks).partition(|rank| rank.is_multiple_of(2));
    even.into_iter().chain(odd.into_iter().rev()).map(Rank).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_order_and_root(order in (1..=64u32).prop_flat_map(|ranks| Just(in_order(ranks)).prop_shuffle()), root in any::<prop::sample::Index>()) {
        let root = *root.get(&order);
        for (algorithm, collective) in all() {
            proved(algorithm, collective, &order, root);
        }
    }
}

#[test]
fn some_hundreds_of_ranks() {
    for ranks in [65, 127, 200] {
        for (algorithm, collective) in all() {
            // p² data blocks in p memories are too many for a test.
            if !matches!(collective, Collective::AllToAll | Collective::AllToAllV) {
                proved(algorithm, collective, &in_order(ranks), Rank(1));
            }
        }
    }
}

/// No rank allocates memory that it does not use.
#[test]
fn all_memory_is_used() {
    for (algorithm, collective) in all() {
        for ranks in 1..=33 {
            for order in [in_order(ranks), scattered(ranks)] {
                let plan = Plan::of(
                    &*algorithm
                        .schedule(collective, &order, Rank(ranks - 1))
                        .expect("a schedule"),
                );
                for (rank, program) in plan.programs.iter().enumerate() {
                    let written = program.strands.iter().flatten().filter_map(|step| match step {
                        Step::Send { .. } => None,
                        Step::Recv { into, .. }
                        | Step::RecvReduce { into, .. }
                        | Step::Reduce { into, .. }
                        | Step::Copy { into, .. } => Some(*into),
                    });
                    let written: BTreeSet<_> = written
                        .flat_map(|span| span.range().map(move |block| (span.place, block)))
                        .collect();
                    for (place, blocks) in [
                        (PlanMemory::Scratch, &program.scratch),
                        (PlanMemory::Partial, &program.partial),
                    ] {
                        let used = written.iter().filter(|(of, _)| *of == place).count();
                        assert_eq!(
                            used,
                            blocks.len(),
                            "{algorithm} {collective} of {ranks}, rank {rank}: {place}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn every_collective_has_an_algorithm() {
    let names = |collective: Collective| {
        let names: Vec<_> = Algorithm::of(collective).map(Algorithm::name).collect();
        format!("{collective}: {}", names.join(", "))
    };
    let matrix: Vec<_> = Collective::ALL.iter().copied().map(names).collect();
    insta::assert_snapshot!(matrix.join("\n"));
}

/// Then an element's bits do not depend on how the count is cut.
#[test]
fn deterministic_algorithms_reduce_all_blocks_alike() {
    let alike = |algorithm: Algorithm, collective, ranks| {
        let plan = Plan::of(
            &*algorithm
                .schedule(collective, &in_order(ranks), Rank(0))
                .expect("a schedule"),
        );
        let orders = expression::of_results(&plan);
        orders.iter().all(|order| order == &orders[0])
    };
    for algorithm in Algorithm::of(Collective::AllReduce) {
        let all_alike = (2..=16).all(|ranks| alike(algorithm, Collective::AllReduce, ranks));
        assert_eq!(algorithm.deterministic(Collective::AllReduce), all_alike, "{algorithm}");
    }
    for algorithm in Algorithm::of(Collective::Reduce) {
        let all_alike = (2..=16).all(|ranks| alike(algorithm, Collective::Reduce, ranks));
        assert_eq!(algorithm.deterministic(Collective::Reduce), all_alike, "{algorithm}");
    }
    assert!(
        !Algorithm::Bruck.deterministic(Collective::AllReduce),
        "it does not do that at all"
    );
}

#[test]
fn small_plans() {
    for &algorithm in Algorithm::ALL {
        let plans = Collective::ALL
            .iter()
            .filter(|&&collective| algorithm.supports(collective))
            .flat_map(|&collective| {
                [2, 3, 4].map(|ranks| {
                    Plan::of(
                        &*algorithm
                            .schedule(collective, &in_order(ranks), Rank(0))
                            .expect("a schedule"),
                    )
                    .to_string()
                })
            });
        insta::assert_snapshot!(algorithm.name(), plans.collect::<Vec<_>>().join("\n---\n\n"));
    }
}

#[test]
fn unsupported_collectives_are_reported() {
    let said = |algorithm: Algorithm, collective, order: &[u32], root| {
        let order: Vec<_> = order.iter().copied().map(Rank).collect();
        algorithm
            .schedule(collective, &order, Rank(root))
            .map(|_| ())
            .expect_err("an error")
    };
    let ring = |order: &[u32], root| said(Algorithm::Ring, Collective::AllReduce, order, root);
    assert_eq!(ring(&[], 0), Unsupported::NoRanks);
    assert_eq!(
        ring(&[0, 1], 2),
        Unsupported::Root {
            root: Rank(2),
            ranks: 2
        }
    );
    assert_eq!(
        ring(&[0, 0], 0),
        Unsupported::Order {
            ranks: 2,
            rank: Rank(0)
        }
    );
    assert_eq!(
        ring(&[0, 2], 0),
        Unsupported::Order {
            ranks: 2,
            rank: Rank(2)
        }
    );
    assert_eq!(
        said(Algorithm::Bruck, Collective::AllReduce, &[0], 0).to_string(),
        "bruck does not do allreduce: one of ring, tree, double-binary-tree, recursive-doubling, halving-doubling, full-mesh, one-shot"
    );
}
