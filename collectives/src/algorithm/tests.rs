//! Every algorithm is proved, for every number of ranks, root and order that fits in the time.

use super::Algorithm;
use crate::plan::check::prove;
use crate::plan::{Collective, Plan};
use crate::types::Rank;

fn in_order(ranks: u32) -> Vec<Rank> {
    (0..ranks).map(Rank).collect()
}

/// Proves one, in place too where it claims to run so.
fn proved(algorithm: Algorithm, collective: Collective, order: &[Rank], root: Rank) {
    let schedule = algorithm.schedule(collective, order, root).expect("a schedule");
    let plan = Plan::of(&*schedule);
    let proof =
        prove(&plan).unwrap_or_else(|flaw| panic!("{algorithm} {collective} of {}, root {root}: {flaw}", order.len()));
    assert_eq!(proof.in_place, collective.runs_in_place(), "{algorithm} {collective}");
}

/// Each with each of its collectives.
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
