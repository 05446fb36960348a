//! Algorithms of collectives and the schedules that they generate.
//!
//! An algorithm for a collective is a *recipe*: the number of blocks, the number of strands, and
//! the steps of the member at a *position* of the shape's order, generated lazily. Each family has
//! a file; each recipe's header there states its costs and order of reduction. p is the number of
//! ranks and n the size in nccl-tests: all of all-reduce, broadcast and reduce, all ranks' parts
//! together of the others, one rank's part of send and receive.
//!
//! A single rank copies, for any algorithm, so recipes have at least two members.

use crate::plan::{Collective, PlanMemory, Schedule, Shape, Span, Step};
use crate::types::{Rank, named};

mod bruck;
mod double_tree;
mod fold;
mod halving;
mod mesh;
mod recursive;
mod ring;
#[cfg(test)]
mod tests;
mod tree;

named! {
    /// An algorithm.
    #[doc(alias = "NCCL_ALGO")]
    Algorithm, "algorithm" {
        /// Ring, or chain from or to the root.
        Ring = "ring",
        /// Binomial tree.
        Tree = "tree",
        /// Double binary tree: no rank but the root has children in both.
        DoubleBinaryTree = "double-binary-tree",
        /// Recursive doubling: pairs at distances 1, 2, 4 … exchange all their data.
        RecursiveDoubling = "recursive-doubling",
        /// Recursive halving, followed by recursive doubling for all-reduce.
        HalvingDoubling = "halving-doubling",
        /// Bruck: each sends to the ranks at distances 1, 2, 4 … before it; ⌈log₂ p⌉ rounds.
        Bruck = "bruck",
        /// Full mesh: direct messages between all pairs.
        FullMesh = "full-mesh",
        /// All-reduce in one hop: each sends its input to all, and reduces everything.
        OneShot = "one-shot",
    }
}

/// Why there is no schedule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// The algorithm does not support the collective.
    #[error("{algorithm} does not do {collective}: one of {known}")]
    Collective {
        /// The algorithm.
        algorithm: Algorithm,
        /// The collective.
        collective: Collective,
        /// The algorithms that support it.
        known: String,
    },
    /// There are no members.
    #[error("a collective needs one rank at least")]
    NoRanks,
    /// The order of the members is not a permutation.
    #[error("the order of {ranks} ranks is not a permutation: rank {rank} is in it twice, or is none of them")]
    Order {
        /// The number of ranks.
        ranks: usize,
        /// The duplicate or invalid rank.
        rank: Rank,
    },
    /// The root is not a member.
    #[error("rank {root} cannot be the root of {ranks} ranks")]
    Root {
        /// The root.
        root: Rank,
        /// The number of ranks.
        ranks: usize,
    },
}

impl Algorithm {
    /// Whether it supports `collective`.
    #[must_use]
    pub fn supports(self, collective: Collective) -> bool {
        self.recipe(collective).is_some()
    }

    /// The algorithms that support `collective`.
    pub fn of(collective: Collective) -> impl Iterator<Item = Self> {
        Self::ALL
            .iter()
            .copied()
            .filter(move |algorithm| algorithm.supports(collective))
    }

    /// Whether the order of reduction of `collective`, and so the bits, do not depend on how the
    /// count is cut into slices and blocks. True for collectives without reduction.
    #[must_use]
    pub fn deterministic(self, collective: Collective) -> bool {
        self.recipe(collective).is_some_and(|recipe| recipe.deterministic)
    }

    /// The schedule of `collective` among the ranks of `order`, the order of rings and trees.
    /// `root` is used by rooted collectives.
    ///
    /// # Errors
    /// When the algorithm does not support the collective, or order or root are invalid.
    pub fn schedule(
        self,
        collective: Collective,
        order: &[Rank],
        root: Rank,
    ) -> Result<Box<dyn Schedule>, Unsupported> {
        let recipe = self.recipe(collective).ok_or_else(|| Unsupported::Collective {
            algorithm: self,
            collective,
            known: Self::of(collective).map(Self::name).collect::<Vec<_>>().join(", "),
        })?;
        let recipe = if order.len() == 1 { SINGLE_RANK } else { recipe };
        let members = Members::new(collective, order, root, recipe.blocks)?;
        Ok(Box::new(RecipeSchedule { members, recipe }))
    }

    fn recipe(self, collective: Collective) -> Option<Recipe> {
        use Collective as C;
        Some(match (self, collective) {
            (Self::Ring, C::AllReduce) => ring::ALL_REDUCE,
            (Self::Ring, C::AllGather) => ring::ALL_GATHER,
            (Self::Ring, C::ReduceScatter) => ring::REDUCE_SCATTER,
            (Self::Ring, C::Broadcast) => ring::BROADCAST,
            (Self::Ring, C::Reduce) => ring::REDUCE,
            (Self::Tree, C::AllReduce) => tree::ALL_REDUCE,
            (Self::Tree, C::Broadcast) => tree::BROADCAST,
            (Self::Tree, C::Reduce) => tree::REDUCE,
            (Self::Tree, C::Gather) => tree::GATHER,
            (Self::Tree, C::Scatter) => tree::SCATTER,
            (Self::Tree, C::Barrier) => tree::BARRIER,
            (Self::DoubleBinaryTree, C::AllReduce) => double_tree::ALL_REDUCE,
            (Self::DoubleBinaryTree, C::Broadcast) => double_tree::BROADCAST,
            (Self::DoubleBinaryTree, C::Reduce) => double_tree::REDUCE,
            (Self::RecursiveDoubling, C::AllReduce) => recursive::ALL_REDUCE,
            (Self::RecursiveDoubling, C::AllGather) => recursive::ALL_GATHER,
            (Self::RecursiveDoubling, C::Barrier) => recursive::BARRIER,
            (Self::HalvingDoubling, C::AllReduce) => halving::ALL_REDUCE,
            (Self::HalvingDoubling, C::ReduceScatter) => halving::REDUCE_SCATTER,
            (Self::Bruck, C::AllGather) => bruck::ALL_GATHER,
            (Self::Bruck, C::AllToAll) => bruck::ALL_TO_ALL,
            (Self::FullMesh, C::AllReduce) => mesh::ALL_REDUCE,
            (Self::FullMesh, C::AllGather) => mesh::ALL_GATHER,
            (Self::FullMesh, C::ReduceScatter) => mesh::REDUCE_SCATTER,
            (Self::FullMesh, C::Broadcast) => mesh::BROADCAST,
            (Self::FullMesh, C::Reduce) => mesh::REDUCE,
            (Self::FullMesh, C::Gather) => mesh::GATHER,
            (Self::FullMesh, C::Scatter) => mesh::SCATTER,
            (Self::FullMesh, C::AllToAll | C::AllToAllV) => mesh::ALL_TO_ALL,
            (Self::FullMesh, C::SendRecv) => mesh::SEND_RECV,
            (Self::OneShot, C::AllReduce) => mesh::ONE_SHOT,
            _ => return None,
        })
    }
}

type Steps<'a> = Box<dyn Iterator<Item = Step> + Send + 'a>;

#[derive(Clone, Copy)]
struct Recipe {
    /// The number of blocks for a number of ranks: [`Shape::blocks`].
    blocks: fn(u32) -> u32,
    strands: u32,
    in_place: bool,
    /// Whether the order in which an element is reduced does not depend on its block.
    deterministic: bool,
    steps: for<'a> fn(&'a Members, u32, u32) -> Steps<'a>,
    scratch: fn(&Members, u32) -> Vec<u32>,
    partial: fn(&Members, u32) -> Vec<u32>,
}

/// Also what the other recipes have where they state nothing else.
const SINGLE_RANK: Recipe = Recipe {
    blocks: |_| 1,
    strands: 1,
    in_place: true,
    deterministic: true,
    steps: |members, _, _| match members.shape.collective {
        Collective::Barrier => Box::new(std::iter::empty()),
        collective if collective.reduces() => Box::new(std::iter::once(Step::Reduce {
            sources: Box::new([Span::block(PlanMemory::Input, 0)]),
            into: Span::block(PlanMemory::Output, 0),
        })),
        _ => Box::new(std::iter::once(copy(
            Span::block(PlanMemory::Input, 0),
            Span::block(PlanMemory::Output, 0),
        ))),
    },
    scratch: |_, _| Vec::new(),
    partial: |_, _| Vec::new(),
};

struct Members {
    shape: Shape,
    /// By rank: its position in the order.
    positions: Box<[u32]>,
    /// The root's position; 0 if the collective has no root.
    root_position: u32,
    sorted: bool,
}

/// Members that are consecutive in the order and in rank.
struct RankRun {
    at: u32,
    rank: u32,
    ranks: u32,
}

impl Members {
    fn new(collective: Collective, order: &[Rank], root: Rank, blocks: fn(u32) -> u32) -> Result<Self, Unsupported> {
        let ranks = order.len();
        if ranks == 0 {
            return Err(Unsupported::NoRanks);
        }
        if root.index() >= ranks {
            return Err(Unsupported::Root { root, ranks });
        }
        let mut positions = vec![u32::MAX; ranks].into_boxed_slice();
        for (position, &rank) in order.iter().enumerate() {
            match positions.get_mut(rank.index()) {
                Some(free) if *free == u32::MAX => *free = position as u32,
                _ => return Err(Unsupported::Order { ranks, rank }),
            }
        }
        let root_position = if collective.has_root() {
            positions[root.index()]
        } else {
            0
        };
        let sorted = order.is_sorted();
        let shape = Shape {
            collective,
            order: order.into(),
            root,
            blocks: blocks(ranks as u32),
        };
        Ok(Self {
            shape,
            positions,
            root_position,
            sorted,
        })
    }

    fn ranks(&self) -> u32 {
        self.shape.ranks()
    }

    fn rank(&self, position: u32) -> Rank {
        self.shape.order[(position % self.ranks()) as usize]
    }

    fn distance_from_root(&self, position: u32) -> u32 {
        let p = self.ranks();
        (position + p - self.root_position) % p
    }

    /// The rank at this distance from the root, or from the first of the order.
    fn rank_at_distance(&self, distance: u32) -> Rank {
        self.rank(self.root_position + distance)
    }

    fn runs(&self, first: u32, count: u32) -> impl Iterator<Item = RankRun> + Send + '_ {
        let mut next = 0;
        std::iter::from_fn(move || {
            let at = next;
            if at == count {
                return None;
            }
            let rank = self.rank(first + at).0;
            next += 1;
            while next < count && self.rank(first + next).0 == rank + (next - at) {
                next += 1;
            }
            Some(RankRun {
                at,
                rank,
                ranks: next - at,
            })
        })
    }
}

struct RecipeSchedule {
    members: Members,
    recipe: Recipe,
}

impl RecipeSchedule {
    fn position(&self, rank: Rank) -> u32 {
        self.members.positions[rank.index()]
    }
}

impl Schedule for RecipeSchedule {
    fn shape(&self) -> &Shape {
        &self.members.shape
    }

    fn strands(&self) -> u32 {
        self.recipe.strands
    }

    fn steps(&self, strand: u32, rank: Rank) -> Steps<'_> {
        (self.recipe.steps)(&self.members, strand, self.position(rank))
    }

    fn scratch(&self, rank: Rank) -> Vec<u32> {
        (self.recipe.scratch)(&self.members, self.position(rank))
    }

    fn partial(&self, rank: Rank) -> Vec<u32> {
        (self.recipe.partial)(&self.members, self.position(rank))
    }

    fn in_place(&self) -> bool {
        self.recipe.in_place && self.members.shape.collective.runs_in_place()
    }
}

const fn send(to: Rank, span: Span) -> Step {
    Step::Send { to, span }
}

const fn recv(from: Rank, into: Span) -> Step {
    Step::Recv { from, into }
}

const fn copy(from: Span, into: Span) -> Step {
    Step::Copy { from, into }
}
