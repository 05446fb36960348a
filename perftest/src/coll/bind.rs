//! CPU binding of ranks, as `mpirun` does: a rank that migrates loses its caches, and ranks that
//! share a CPU wait for each other's time slice.
//!
//! Only the thread that runs the operations is bound: the helper threads do little.

use clap::ValueEnum;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::limits::{SELF, processors, set_of};

/// What a rank is bound to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Bind {
    /// Each rank to a processor of its own, if there are enough
    Processor,
    /// No binding
    None,
}

/// Binds this thread, rank `rank` of `ranks` on this host. With fewer CPUs than ranks, or without
/// permission, nothing changes.
pub(super) fn bind(to: Bind, rank: u32, ranks: u32) {
    if to == Bind::None {
        return;
    }
    let allowed = sched_getaffinity(SELF).ok();
    if let Some(own_cpu) = allowed.and_then(|allowed| own_cpu(&allowed, rank as usize, ranks as usize)) {
        // A failure only leaves the thread unbound.
        let _ = sched_setaffinity(SELF, &own_cpu);
    }
}

/// The CPU of a rank, among those allowed; `None` where they are fewer than the ranks.
fn own_cpu(allowed: &CpuSet, rank: usize, ranks: usize) -> Option<CpuSet> {
    let processors = processors(allowed);
    let own_cpu = *processors.get(rank).filter(|_| ranks <= processors.len())?;
    set_of([own_cpu])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_its_own_allowed_cpu() {
        let allowed = set_of([1, 4, 6]).unwrap();
        assert_eq!(own_cpu(&allowed, 0, 3), set_of([1]));
        assert_eq!(own_cpu(&allowed, 2, 3), set_of([6]));
        assert_eq!(own_cpu(&allowed, 1, 2), set_of([4]));
        assert_eq!(own_cpu(&allowed, 0, 4), None);
    }

    #[test]
    fn no_binding_changes_nothing() {
        let before = sched_getaffinity(SELF).unwrap();
        bind(Bind::None, 0, 1);
        assert_eq!(sched_getaffinity(SELF).unwrap(), before);
        let bound = std::thread::spawn(|| {
            bind(Bind::Processor, 0, 1);
            sched_getaffinity(SELF).unwrap()
        });
        assert_eq!(Some(bound.join().unwrap()), own_cpu(&before, 0, 1));
    }
}
