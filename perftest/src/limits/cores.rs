//! A pair of CPUs for the two ends of a measurement.
//!
//! On a virtual machine one CPU may be a third slower than another, and which one changes from
//! second to second: measurements that are compared use the same pair, and each round another one.

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

pub(crate) const SELF: Pid = Pid::from_raw(0);

/// While it lives, this thread and the threads and processes it starts are bound to two CPUs.
pub(super) struct CpuPair {
    before: Option<CpuSet>,
}

impl CpuPair {
    /// Binds to the pair of a round. Without two CPUs or the permission, nothing changes.
    pub(super) fn bind(round: usize) -> Self {
        let before = sched_getaffinity(SELF).ok().filter(|before| {
            let pair = pair_of(before, round);
            pair.is_some_and(|pair| sched_setaffinity(SELF, &pair).is_ok())
        });
        Self { before }
    }
}

impl Drop for CpuPair {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // If one of them is gone meanwhile, the kernel uses the others.
            let _ = sched_setaffinity(SELF, before);
        }
    }
}

/// The CPUs in a set, in order.
pub(crate) fn processors(set: &CpuSet) -> Vec<usize> {
    (0..CpuSet::count())
        .filter(|&cpu| set.is_set(cpu) == Ok(true))
        .collect()
}

/// The set of these CPUs; `None` where one is beyond what a set holds.
pub(crate) fn set_of(processors: impl IntoIterator<Item = usize>) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    for cpu in processors {
        set.set(cpu).ok()?;
    }
    Some(set)
}

/// Two adjacent CPUs of `set`, different ones each round; `None` when it has fewer.
fn pair_of(set: &CpuSet, round: usize) -> Option<CpuSet> {
    let processors = processors(set);
    if processors.len() < 2 {
        return None;
    }
    let first = round % processors.len();
    set_of(processors.into_iter().cycle().skip(first).take(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_round_has_another_pair_of_the_allowed_cpus() {
        let allowed = set_of([1, 4, 6]).unwrap();
        for (round, pair) in [(0, [1, 4]), (1, [4, 6]), (2, [6, 1]), (3, [1, 4])] {
            assert_eq!(pair_of(&allowed, round), set_of(pair), "round {round}");
        }
        assert_eq!(pair_of(&set_of([3]).unwrap(), 0), None);
    }

    #[test]
    fn the_previous_affinity_is_restored() {
        let before = sched_getaffinity(SELF).unwrap();
        let expected = pair_of(&before, 1);
        {
            let _pair = CpuPair::bind(1);
            let now = sched_getaffinity(SELF).unwrap();
            assert_eq!(now, expected.unwrap_or(before));
        }
        assert_eq!(sched_getaffinity(SELF).unwrap(), before);
    }
}
