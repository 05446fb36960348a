//! The rules, by area.

mod objects;
mod posting;
mod transfers;
mod transitions;

use super::Case;

/// Every case, in the order in which they run.
pub(super) fn all() -> Vec<Case> {
    [
        objects::cases(),
        transitions::cases(),
        posting::cases(),
        transfers::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
