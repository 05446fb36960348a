//! What the kernels report of an impossible routing: the watchdog aborts the communicator for it.

use std::sync::atomic::Ordering;

use super::arguments::{FALSE_COUNTS, NO_EXPERT, NO_MEMORY, NO_OUTPUT, TOO_MANY_PAIRS};
use crate::gpu::peers::Peers;

/// Offset of the report in [`Peers::control`]: 8 bytes, zero for none.
pub(in crate::gpu) const REPORT: usize = 1024;

/// The report of a kernel of this rank, if there is one.
pub(in crate::gpu) fn violation(peers: &Peers) -> Option<String> {
    let word = peers.control().atomic_u64(REPORT).ok()?.load(Ordering::Acquire);
    (word != 0).then(|| describe(word))
}

fn describe(word: u64) -> String {
    let number = word & u64::from(u32::MAX);
    match word >> 56 {
        NO_EXPERT => format!("its routing of token {number} names an expert that does not exist"),
        TOO_MANY_PAIRS => {
            format!(
                "its routing has more pairs for rank {number} than there are slots: a token chooses an expert twice"
            )
        }
        FALSE_COUNTS => format!("rank {number} has counted more pairs than it can have"),
        NO_OUTPUT => format!("it received row {number}, and there is no output of an expert for it"),
        NO_MEMORY => format!("rank {number} would receive more rows than it has memory for: give a larger capacity"),
        other => format!("its kernel reports failure {other}, which is unknown"),
    }
}
