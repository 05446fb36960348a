//! What makes algorithms for powers of two work for every number of ranks.
//!
//! Of p ranks, the largest power of two below it are *cores*. Of the first 2(p−2^k) positions each odd one is *folded* into the core before it: it gives that core its contribution before the first round, and gets its result after the last.

use super::Members;
use crate::types::Rank;

/// Who is folded into whom.
#[derive(Clone, Copy)]
pub(super) struct Fold {
    /// How many cores, as a power of two.
    pub(super) rounds: u32,
    /// How many cores have somebody folded into them: the first of them.
    pub(super) folded: u32,
}

/// What a member is.
pub(super) enum Role {
    /// The core of this number.
    Core(u32),
    /// Folded into the member before.
    Folded,
}

impl Fold {
    pub(super) const fn new(ranks: u32) -> Self {
        let rounds = ranks.ilog2();
        let folded = ranks - (1 << rounds);
        Self { rounds, folded }
    }

    /// What the member at position `v` is.
    pub(super) const fn role(self, v: u32) -> Role {
        if v >= 2 * self.folded {
            Role::Core(v - self.folded)
        } else if v.is_multiple_of(2) {
            Role::Core(v / 2)
        } else {
            Role::Folded
        }
    }

    /// How many cores.
    pub(super) const fn cores(self) -> u32 {
        1 << self.rounds
    }

    /// Whether somebody is folded into a core.
    pub(super) const fn has(self, core: u32) -> bool {
        core < self.folded
    }

    /// The position of a core; of the one after the last: the number of ranks.
    pub(super) const fn position(self, core: u32) -> u32 {
        core + if core < self.folded { core } else { self.folded }
    }

    /// Who is a core.
    pub(super) fn rank(self, members: &Members, core: u32) -> Rank {
        members.rank(self.position(core))
    }
}
