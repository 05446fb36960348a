//! Every schedule is lowered.

use super::*;
use crate::algorithm::Algorithm;
use crate::plan::Collective;

#[test]
fn every_schedule_lowers() {
    for &collective in Collective::ALL {
        for algorithm in Algorithm::of(collective) {
            for ranks in 1..=9 {
                let order: Vec<Rank> = (0..ranks).map(Rank).collect();
                let schedule = algorithm.schedule(collective, &order, Rank(ranks / 2)).unwrap();
                for in_place in [false, true]
                    .into_iter()
                    .filter(|in_place| !in_place || schedule.in_place())
                {
                    for (direct, ahead, slots) in [
                        (false, 0, 4),
                        (true, 0, 4),
                        (true, 1, 4),
                        (false, 1, 4),
                        (false, 0, 16),
                        (true, 1, 16),
                    ] {
                        let options = Options {
                            in_place,
                            direct,
                            slots,
                            ahead,
                        };
                        let lowered = lower(&*schedule, options);
                        if lowered.is_err() {
                            eprintln!("{collective} {algorithm} {ranks} {options:?} {:?}", lowered.err());
                        }
                    }
                }
            }
        }
    }
}
