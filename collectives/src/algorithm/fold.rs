//! Folding, which extends algorithms for powers of two to any number of ranks.
//!
//! Of p ranks, 2^k = the largest power of two up to p are *cores*. Of the first 2(p−2^k) positions
//! each odd one is *folded* into the core before it: it sends that core its contribution before the
//! first round, and receives its result after the last.

use super::Members;
use crate::types::Rank;

#[derive(Clone, Copy)]
pub(super) struct Fold {
    /// log₂ of the number of cores.
    pub(super) rounds: u32,
    /// Number of cores with a folded rank: the first ones.
    pub(super) folded: u32,
}

pub(super) enum Role {
    Core(u32),
    /// Folded into the previous member.
    Folded,
}

impl Fold {
    pub(super) const fn new(ranks: u32) -> Self {
        let rounds = ranks.ilog2();
        let folded = ranks - (1 << rounds);
        Self { rounds, folded }
    }

    pub(super) const fn role(self, v: u32) -> Role {
        if v >= 2 * self.folded {
            Role::Core(v - self.folded)
        } else if v.is_multiple_of(2) {
            Role::Core(v / 2)
        } else {
            Role::Folded
        }
    }

    pub(super) const fn cores(self) -> u32 {
        1 << self.rounds
    }

    pub(super) const fn has_folded(self, core: u32) -> bool {
        core < self.folded
    }

    /// The position of a core; for the number of cores, the number of ranks.
    pub(super) const fn position(self, core: u32) -> u32 {
        core + if core < self.folded { core } else { self.folded }
    }

    pub(super) fn rank(self, members: &Members, core: u32) -> Rank {
        members.rank(self.position(core))
    }
}
