//! The best way through a few ranks: as much as possible where it has least, and then as much as possible in all.

/// Up to how many ranks every way is looked at; above, each goes on to the best that is left.
pub(super) const EXACT: usize = 12;
/// The most that two can be worth as neighbours: sums of [`EXACT`] of these have to fit.
pub(super) const MOST: u64 = 1 << 50;

/// An order of all, given what each two are worth as neighbours (at most [`MOST`], the same both ways). With `closed` the last and the first are neighbours too, and it begins with 0. What is less than `grain` counts only in all,
/// not where there is least. Of the best orders it is the first, as words are in a dictionary.
pub(super) fn best(worth: &[Vec<u64>], grain: u64, closed: bool) -> Vec<usize> {
    match worth.len() {
        0..=2 => (0..worth.len()).collect(),
        3..=EXACT => exact(worth, grain, closed),
        _ => greedy(worth),
    }
}

fn exact(worth: &[Vec<u64>], grain: u64, closed: bool) -> Vec<usize> {
    let mut levels: Vec<u64> = worth
        .iter()
        .enumerate()
        .flat_map(|(one, row)| row[one + 1..].iter().map(|worth| worth / grain * grain))
        .collect();
    levels.sort_unstable();
    levels.dedup();
    // With the lowest level every order will do, so one is always found.
    let possible = levels.partition_point(|level| Ways::new(worth, closed, *level).begin().is_some());
    let least = levels[possible.saturating_sub(1)];
    let ways = Ways::new(worth, closed, least);
    let Some(first) = ways.begin() else {
        return (0..worth.len()).collect();
    };
    let mut order = vec![first];
    let mut gone = 1usize << first;
    let mut last = first;
    while order.len() < worth.len() {
        let Some(next) = ways.next(gone, last) else {
            break;
        };
        order.push(next);
        gone |= 1 << next;
        last = next;
    }
    order
}

/// What the best ways are worth from where one is, by where one has been (a bit for each) and is; none where there is no way (Held and Karp's recurrence).
struct Ways<'a> {
    worth: &'a [Vec<u64>],
    closed: bool,
    least: u64,
    rest: Vec<Option<u64>>,
}

impl<'a> Ways<'a> {
    fn new(worth: &'a [Vec<u64>], closed: bool, least: u64) -> Self {
        let count = worth.len();
        let mut ways = Self {
            worth,
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

    /// What the step is worth, if it is worth enough.
    fn step(&self, from: usize, to: usize) -> Option<u64> {
        Some(self.worth[from][to]).filter(|worth| *worth >= self.least)
    }

    /// Where one can go on to, with what all is worth then.
    fn steps(&self, gone: usize, last: usize) -> impl Iterator<Item = (usize, u64)> {
        let count = self.worth.len();
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
        let count = self.worth.len();
        let all = (0..count).filter(|first| !self.closed || *first == 0);
        first_of_best(all.filter_map(|first| Some((first, self.rest[(1 << first) * count + first]?))))
    }
}

fn first_of_best(all: impl Iterator<Item = (usize, u64)>) -> Option<usize> {
    all.reduce(|best, other| if other.1 > best.1 { other } else { best })
        .map(|(which, _)| which)
}

fn greedy(worth: &[Vec<u64>]) -> Vec<usize> {
    let mut order = vec![0];
    let mut left: Vec<usize> = (1..worth.len()).collect();
    let mut last = 0;
    while let Some(next) = first_of_best(left.iter().enumerate().map(|(at, which)| (at, worth[last][*which]))) {
        last = left.remove(next);
        order.push(last);
    }
    order
}
