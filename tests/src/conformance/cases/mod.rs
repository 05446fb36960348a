//! The rules, by area.

mod access;
mod completion;
mod notify;
mod objects;
mod posting;
mod reliable;
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
        access::cases(),
        completion::cases(),
        reliable::cases(),
        notify::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
