//! The launch argument of the kernels of dispatch and combine (`gpudirect/cuda/kernels/moe.cu`).

use crate::gpu::peers::MAX_PEERS;

/// The version of [`Arguments`].
pub(super) const VERSION: u64 = 1;
/// The most experts of all ranks.
pub(super) const MAX_EXPERTS: u32 = 1024;
/// The most ranks times experts.
pub(super) const MAX_CELLS: u32 = 8192;
/// The most thread blocks of a launch.
pub(super) const MAX_BLOCKS: u32 = 256;

/// What the kernels report, in the upper 8 bits of the report.
pub(super) const NO_EXPERT: u64 = 1;
pub(super) const TOO_MANY_PAIRS: u64 = 2;
pub(super) const FALSE_COUNTS: u64 = 3;
pub(super) const NO_OUTPUT: u64 = 4;
pub(super) const NO_MEMORY: u64 = 5;

doorbell_cuda::kernel_arguments! {
    constants {
        const MOE_VERSION: u64 = VERSION;
        /// Elements with one scale.
        const SCALED: u32 = crate::moe::FP8_BLOCK as u32;
        /// The most experts of all ranks, ranks times experts, and thread blocks.
        const MOST_EXPERTS: u32 = MAX_EXPERTS;
        const MOST_CELLS: u32 = MAX_CELLS;
        const MOST_BLOCKS: u32 = MAX_BLOCKS;
        /// Of a token: an expert that it chooses does not exist.
        const NO_EXPERT: u64 = NO_EXPERT;
        /// Of the rank that would receive it: more pairs than there are slots.
        const TOO_MANY_PAIRS: u64 = TOO_MANY_PAIRS;
        /// Of the rank that sent them: counts of more pairs than it can have.
        const FALSE_COUNTS: u64 = FALSE_COUNTS;
        /// Of a received row: there is no output of its expert.
        const NO_OUTPUT: u64 = NO_OUTPUT;
        /// Of the rank that would receive them: more rows than it has memory for.
        const NO_MEMORY: u64 = NO_MEMORY;
    }
    /// The launch argument of dispatch and combine.
    // fields: the layout of the kernel's parameter.
    #[derive(Clone, Copy, Debug)]
    pub(super) struct Arguments as Moe in "moe" {
        pub(super) version: u64,
        /// The address of a word that is set to nonzero to end all waits.
        pub(super) stop: u64,
        /// The address of a report of 8 bytes.
        pub(super) report: u64,
        /// By rank: the memory that its peers write.
        pub(super) memories: [u64; MAX_PEERS],
        /// Offsets in it: received rows, returned outputs, and the words.
        pub(super) rows: u64,
        pub(super) outputs: u64,
        pub(super) ready: u64,
        pub(super) counts: u64,
        pub(super) arrived: u64,
        pub(super) returned: u64,
        /// Addresses in the rank's own memory: the state, the pairs by position, the positions by
        /// pair, by expert the bases, and the tables of what is received.
        pub(super) state: u64,
        pub(super) order: u64,
        pub(super) positions: u64,
        pub(super) bases: u64,
        pub(super) tables: u64,
        /// Addresses of the routing; of tokens or the experts' outputs; and of combined tokens.
        pub(super) indices: u64,
        pub(super) weights: u64,
        pub(super) input: u64,
        pub(super) output: u64,
        pub(super) rank: u32,
        pub(super) ranks: u32,
        /// Of all ranks.
        pub(super) experts: u32,
        pub(super) top_k: u32,
        pub(super) hidden: u32,
        pub(super) tokens: u32,
        /// The most pairs of a rank, and those that it may have for one other.
        pub(super) pairs: u32,
        pub(super) slots: u32,
        /// Bytes of a row of dispatch, and of an index of the routing (4 or 8).
        pub(super) row_bytes: u32,
        pub(super) index_bytes: u32,
        /// Thread blocks of dispatch, and of combine, on every rank.
        pub(super) blocks: u32,
        /// Whether rows are consecutive, and not in slots.
        pub(super) contiguous: u32,
        /// The experts' outputs that there are, and the rows for which each rank has memory.
        pub(super) given: u32,
        pub(super) capacity: u32,
    }
}

// Within the limit of launch parameters.
const _: () = assert!(size_of::<Arguments>() <= 4096);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_header_is_committed() {
        <Arguments as doorbell_cuda::arguments::Arguments>::header().check(env!("CARGO_MANIFEST_DIR"));
    }
}
