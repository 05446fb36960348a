//! Plans that are right, and plans that are not.

use super::prove;
use crate::algorithm::Algorithm;
use crate::plan::{Collective, Plan};
use crate::types::Rank;

/// Every algorithm of every collective, for up to 64 ranks.
#[test]
fn every_algorithm_is_right() {
    for &collective in Collective::ALL {
        for algorithm in Algorithm::of(collective) {
            for ranks in 1..=64 {
                let order: Vec<_> = (0..ranks).map(Rank).collect();
                let schedule = algorithm
                    .schedule(collective, &order, Rank(ranks / 2))
                    .expect("a schedule");
                prove(&Plan::of(&*schedule))
                    .unwrap_or_else(|flaw| panic!("{algorithm} {collective} of {ranks}: {flaw}"));
            }
        }
    }
}
