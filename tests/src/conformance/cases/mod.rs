//! The rules, by area.

mod access;
mod calls;
mod completion;
mod datagram;
mod events;
mod extended_cq;
mod matrix;
mod memory;
mod notify;
mod objects;
mod posting;
mod reliable;
mod retries;
mod shared;
mod transfers;
mod transitions;
mod unreliable;
mod windows;

use super::Case;

pub(super) use matrix::print as matrix;

pub(super) fn all() -> Vec<Case> {
    [
        objects::cases(),
        transitions::cases(),
        posting::cases(),
        transfers::cases(),
        access::cases(),
        completion::cases(),
        retries::cases(),
        reliable::cases(),
        notify::cases(),
        datagram::cases(),
        unreliable::cases(),
        events::cases(),
        memory::cases(),
        windows::cases(),
        shared::cases(),
        calls::cases(),
        extended_cq::cases(),
        matrix::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::all;

    #[test]
    fn every_case_has_a_name_of_its_own_a_clause_and_a_rule() {
        let mut names = BTreeSet::new();
        for case in all() {
            assert!(names.insert(case.name.clone()), "{} twice", case.name);
            assert!(
                case.name.contains('/') && !case.name.contains([' ', '*', ':']),
                "{}",
                case.name
            );
            assert!(!case.clause.is_empty() && !case.rule.is_empty(), "{}", case.name);
        }
    }
}
