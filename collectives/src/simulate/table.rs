//! Tables of the time of a collective by each algorithm.

use super::{Fabric, Work, predict_ns};
use crate::algorithm::Algorithm;
use crate::plan::{Collective, Schedule};
use crate::tune::{Choice, Overrides, Tuner, TuningRequest};
use crate::types::{DataType, Rank};

/// Maximum steps of a row's simulation; beyond, the closed form is used.
const MAX_STEPS: u64 = 20_000_000;

/// One algorithm at one size.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Row {
    /// The number of ranks.
    pub ranks: u32,
    /// Bytes, as [`Work::bytes`] counts them.
    pub bytes: u64,
    /// The best choice with this algorithm.
    pub choice: Choice,
    /// Time, ns.
    pub ns: f64,
    /// Whether it was simulated, or by the closed form for [uniform](Fabric::uniform) fabrics.
    pub simulated: bool,
}

/// Time of `collective` over `fabric`, for each of `sizes` and each algorithm that supports it:
/// with the best protocol, and the channels and slice length that `tuner` chooses.
#[must_use]
pub fn table(tuner: &Tuner, fabric: &Fabric, collective: Collective, data: DataType, sizes: &[u64]) -> Vec<Row> {
    let order: Vec<Rank> = (0..fabric.ranks()).map(Rank).collect();
    let mut rows = Vec::new();
    for algorithm in Algorithm::of(collective) {
        let Ok(schedule) = algorithm.schedule(collective, &order, Rank(0)) else {
            continue;
        };
        let one = Tuner {
            overrides: Overrides {
                algorithm: Some(algorithm),
                ..tuner.overrides
            },
            ..tuner.clone()
        };
        for &bytes in sizes {
            let question = TuningRequest {
                collective,
                bytes,
                data,
                root: Rank(0),
                deterministic: false,
            };
            let Ok(decision) = one.choose(&question, &fabric.hosts, &order) else {
                continue;
            };
            let mut of_size: Vec<Row> = Vec::new();
            for candidate in &decision.candidates {
                let choice = candidate.choice;
                let work = Work {
                    bytes,
                    data,
                    protocol: choice.protocol,
                    channels: choice.channels,
                    slice_bytes: choice.slice_bytes,
                };
                let simulated = (steps(schedule.as_ref(), &work) <= MAX_STEPS)
                    .then(|| predict_ns(schedule.as_ref(), fabric, &work).ok())
                    .flatten();
                of_size.push(Row {
                    ranks: fabric.ranks(),
                    bytes,
                    choice,
                    ns: simulated.unwrap_or(candidate.formula_ns),
                    simulated: simulated.is_some(),
                });
            }
            rows.extend(of_size.into_iter().min_by(|a, b| a.ns.total_cmp(&b.ns)));
        }
    }
    rows
}

fn steps(schedule: &dyn Schedule, work: &Work) -> u64 {
    let shape = schedule.shape();
    let of_first: u64 = (0..schedule.strands())
        .map(|strand| schedule.steps(strand, shape.order[0]).count() as u64)
        .sum();
    let slices = work.slices(shape).min(12 * u64::from(work.busy_channels(shape)));
    of_first.saturating_mul(u64::from(shape.ranks())).saturating_mul(slices)
}

/// The fastest row of each number of ranks and bytes, in order.
#[must_use]
pub fn fastest(rows: &[Row]) -> Vec<Row> {
    let mut best: Vec<Row> = Vec::new();
    for row in rows {
        match best
            .iter_mut()
            .find(|other| (other.ranks, other.bytes) == (row.ranks, row.bytes))
        {
            Some(other) if row.ns < other.ns => *other = *row,
            Some(_) => {}
            None => best.push(*row),
        }
    }
    best.sort_by_key(|row| (row.ranks, row.bytes));
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{Compute, Link};

    #[test]
    fn each_algorithm_has_a_row_for_each_size() {
        let tuner = Tuner::new(Link::ndr400(), Link::ndr400(), Compute::default(), 4);
        let fabric = Fabric::uniform(16, Link::ndr400(), Compute::default());
        let sizes = [8, 1 << 16, 1 << 24];
        let rows = table(&tuner, &fabric, Collective::AllReduce, DataType::F32, &sizes);
        assert_eq!(rows.len(), Algorithm::of(Collective::AllReduce).count() * sizes.len());
        assert!(rows.iter().all(|row| row.simulated && row.ns > 0.0));
        let best = fastest(&rows);
        assert_eq!(best.iter().map(|row| row.bytes).collect::<Vec<_>>(), sizes);
        assert!(best[0].choice.algorithm != best[2].choice.algorithm, "ways cross over");
    }
}
