//! The best path through a few ranks, by the least weight of neighbours, then the total weight.

/// Maximum ranks for exhaustive search; above, greedy.
pub(super) const MAX_EXACT: usize = 12;
/// Maximum weight of a pair: sums of [`MAX_EXACT`] of these have to fit.
pub(super) const MAX_WEIGHT: u64 = 1 << 50;

/// Weights are symmetric, at most [`MAX_WEIGHT`]. With `closed` the last and the first are
/// neighbours too, and the order begins with 0. Differences below `grain` count only in the total.
/// Among equal orders the lexicographically first is returned.
pub(super) fn best(weight: &[Vec<u64>], grain: u64, closed: bool) -> Vec<usize> {
    match weight.len() {
        0..=2 => (0..weight.len()).collect(),
        3..=MAX_EXACT => exact(weight, grain, closed),
        _ => greedy(weight),
    }
}

fn exact(weight: &[Vec<u64>], grain: u64, closed: bool) -> Vec<usize> {
    let mut levels: Vec<u64> = weight
        .iter()
        .enumerate()
        .flat_map(|(one, row)| row[one + 1..].iter().map(|weight| weight / grain * grain))
        .collect();
    levels.sort_unstable();
    levels.dedup();
    // At the lowest level every order is possible, so one is always found.
    let possible = levels.partition_point(|level| PathSearch::new(weight, closed, *level).begin().is_some());
    let least = levels[possible.saturating_sub(1)];
    let ways = PathSearch::new(weight, closed, least);
    let Some(first) = ways.begin() else {
        return (0..weight.len()).collect();
    };
    let mut order = vec![first];
    let mut gone = 1usize << first;
    let mut last = first;
    while order.len() < weight.len() {
        let Some(next) = ways.next(gone, last) else {
            break;
        };
        order.push(next);
        gone |= 1 << next;
        last = next;
    }
    order
}

/// The best total weight from a state: a bit per visited rank, and the current one (Held-Karp).
struct PathSearch<'a> {
    weight: &'a [Vec<u64>],
    closed: bool,
    least: u64,
    rest: Vec<Option<u64>>,
}

impl<'a> PathSearch<'a> {
    fn new(weight: &'a [Vec<u64>], closed: bool, least: u64) -> Self {
        let count = weight.len();
        let mut ways = Self {
            weight,
            closed,
            least,
            rest: vec![None; count << count],
        };
        for gone in (1..1usize << count).rev() {
            for last in (0..count).filter(|last| gone >> last & 1 == 1) {
                ways.rest[gone * count + last] = match gone == (1 << count) - 1 {
                    true if !closed => Some(0),
                    true => ways.step(last, 0),
                    false => ways.steps(gone, last).map(|(_, all)| all).max(),
                };
            }
        }
        ways
    }

    /// The weight of a step, if it suffices.
    fn step(&self, from: usize, to: usize) -> Option<u64> {
        Some(self.weight[from][to]).filter(|weight| *weight >= self.least)
    }

    fn steps(&self, gone: usize, last: usize) -> impl Iterator<Item = (usize, u64)> {
        let count = self.weight.len();
        let left = (0..count).filter(move |next| gone >> next & 1 == 0);
        left.filter_map(move |next| {
            let rest = self.rest[(gone | 1 << next) * count + next]?;
            Some((next, self.step(last, next)? + rest))
        })
    }

    fn next(&self, gone: usize, last: usize) -> Option<usize> {
        first_of_best(self.steps(gone, last))
    }

    fn begin(&self) -> Option<usize> {
        let count = self.weight.len();
        let all = (0..count).filter(|first| !self.closed || *first == 0);
        first_of_best(all.filter_map(|first| Some((first, self.rest[(1 << first) * count + first]?))))
    }
}

fn first_of_best(all: impl Iterator<Item = (usize, u64)>) -> Option<usize> {
    all.reduce(|best, other| if other.1 > best.1 { other } else { best })
        .map(|(which, _)| which)
}

fn greedy(weight: &[Vec<u64>]) -> Vec<usize> {
    let mut order = vec![0];
    let mut left: Vec<usize> = (1..weight.len()).collect();
    let mut last = 0;
    while let Some(next) = first_of_best(left.iter().enumerate().map(|(at, which)| (at, weight[last][*which]))) {
        last = left.remove(next);
        order.push(last);
    }
    order
}
