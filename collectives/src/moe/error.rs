//! Errors of expert parallelism.

use super::{RoutingError, ShapeError};
use crate::communicator::CollectiveError;
use crate::types::Rank;

/// Why dispatch or combine has failed, or was not begun.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MoeError {
    /// Dimensions that no layer has.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// An impossible routing.
    #[error(transparent)]
    Routing(#[from] RoutingError),
    /// The communicator has failed, or refuses the operation.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The dimensions are for another number of ranks.
    #[error("the dimensions are for {given} ranks, and the communicator has {ranks}")]
    Ranks {
        /// Ranks of the dimensions.
        given: u32,
        /// Ranks of the communicator.
        ranks: u32,
    },
    /// Another rank was given other settings.
    #[error("rank {rank} has other dimensions, another payload, mode or capacity than rank {own}: give all the same")]
    Disagree {
        /// That rank.
        rank: Rank,
        /// This rank.
        own: Rank,
    },
    /// The areas are larger than memory can be.
    #[error("{bytes} bytes for dispatch and combine: more than there can be in memory")]
    Memory {
        /// The bytes.
        bytes: u128,
    },
    /// The routing was checked for other dimensions.
    #[error("the routing was made for other dimensions")]
    OtherShape,
    /// The tokens are not those of the routing.
    #[error("{given} elements, and the routing is of {expected}")]
    Elements {
        /// The given elements.
        given: usize,
        /// Tokens times hidden.
        expected: usize,
    },
    /// No area is free.
    #[error("{held} dispatches are not combined or dropped: that is the maximum")]
    Held {
        /// The results that are held.
        held: u64,
    },
    /// A rank would receive more rows than it has memory for. Nothing was sent, and all ranks have
    /// this error.
    #[error("rank {rank} would receive {rows} rows, and has memory for {capacity}: give a larger capacity")]
    Capacity {
        /// That rank.
        rank: Rank,
        /// Its rows.
        rows: u64,
        /// The maximum.
        capacity: usize,
    },
    /// A rank has sent counts that no routing has. The communicator is aborted.
    #[error("rank {source_rank} has sent counts that no routing has")]
    Impossible {
        /// That rank.
        source_rank: Rank,
    },
    /// A rank has announced a put exchange or released a dispatch that cannot have begun. The
    /// communicator is aborted.
    #[error("rank {source_rank} has announced an exchange that has not begun")]
    Line {
        /// That rank.
        source_rank: Rank,
    },
}
