//! A processor for each rank, as `mpirun` gives one to each of its processes: a rank that is moved from one to another leaves its caches behind, and where two share one, each waits for the other's time slice.
//!
//! Only the thread that runs the operations is bound, after the threads beside it have been started: these do little, and the kernel finds them a place.

use clap::ValueEnum;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::limits::processors;

/// This thread.
const SELF: Pid = Pid::from_raw(0);

/// What a rank is bound to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Bind {
    /// Each rank to a processor of its own, if there are as many
    Processor,
    /// None to anything
    None,
}

/// Binds this thread, which is rank `rank` of `ranks` on this host. Where there are fewer processors than ranks, or the system does not let us choose, nothing changes.
pub(super) fn bind(to: Bind, rank: u32, ranks: u32) {
    if to == Bind::None {
        return;
    }
    let allowed = sched_getaffinity(SELF).ok();
    if let Some(own) = allowed.and_then(|allowed| own(&allowed, rank as usize, ranks as usize)) {
        // What cannot be bound runs anywhere.
        let _ = sched_setaffinity(SELF, &own);
    }
}

/// The processor of a rank, among those allowed; `None` where they are fewer than the ranks.
fn own(allowed: &CpuSet, rank: usize, ranks: usize) -> Option<CpuSet> {
    let processors = processors(allowed);
    let mut own = CpuSet::new();
    own.set(*processors.get(rank).filter(|_| ranks <= processors.len())?)
        .ok()?;
    Some(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(processors: &[usize]) -> CpuSet {
        let mut set = CpuSet::new();
        processors.iter().for_each(|&cpu| set.set(cpu).unwrap());
        set
    }

    #[test]
    fn each_rank_has_its_own_of_those_allowed() {
        let allowed = of(&[1, 4, 6]);
        assert_eq!(own(&allowed, 0, 3), Some(of(&[1])));
        assert_eq!(own(&allowed, 2, 3), Some(of(&[6])));
        assert_eq!(own(&allowed, 1, 2), Some(of(&[4])));
        assert_eq!(own(&allowed, 0, 4), None);
    }

    #[test]
    fn a_rank_that_is_to_be_bound_to_nothing_is_not() {
        let before = sched_getaffinity(SELF).unwrap();
        bind(Bind::None, 0, 1);
        assert_eq!(sched_getaffinity(SELF).unwrap(), before);
        let bound = std::thread::spawn(|| {
            bind(Bind::Processor, 0, 1);
            sched_getaffinity(SELF).unwrap()
        });
        assert_eq!(Some(bound.join().unwrap()), own(&before, 0, 1));
    }
}
