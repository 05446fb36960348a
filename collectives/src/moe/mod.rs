//! Expert parallelism: dispatch of tokens to experts by a top-k routing, and combine with weights.
//!
//! The experts of a mixture-of-experts layer are divided among the ranks: with E experts on R
//! ranks, expert e is on rank e / (E / R). *Dispatch* sends each token to each expert that its
//! routing chooses; *combine* returns the experts' outputs to the rank of the token, which adds
//! them up, multiplied by their weights.
//!
//! - [`ExpertParallel`]: both operations, on the memory of hosts.
//! - [`Shape`]: the dimensions, the same on all ranks; [`Payload`]: how a token travels.
//! - [`Routing`]: the experts and weights of one rank's tokens, checked.
//! - [`ReceivedRows`], [`SlotLayout`]: where rows are, in each [`Mode`].
//! - [`mod@reference`]: what both operations compute, written plainly in one process.
//!
//! # Order and arithmetic
//!
//! A *pair* is a token and one of its chosen experts. The *send order* of a rank's pairs is by
//! expert, then token ([`Routing::order`]); as experts are divided in order, the pairs for one rank
//! are consecutive in it. Each pair is one *row* of the payload at its expert.
//!
//! - [`Mode::HighThroughput`]: counts are exchanged first; the rows received are contiguous, by
//!   (expert, source rank, token).
//! - [`Mode::LowLatency`]: nothing is exchanged first. Each rank has an area of
//!   [`SlotLayout::slots_per_source`] fixed slots for each source rank; the source's pairs are at
//!   its beginning, by (expert, token). The counts by expert arrive with the last write.
//!
//! Combine computes, for each token and element, `sum = 0.0f32`, then in order of k, for each
//! chosen expert, `sum = sum + weight * output`: the product and the sum are each rounded to `f32`
//! (no fused multiply-add), and the last sum to bf16, to nearest, ties to even. So the result has
//! the same bits in every mode, on any number of ranks, and in every run.
//!
//! With [`Payload::Fp8`], dispatch quantises blocks of [`FP8_BLOCK`] elements ([`quantise`]);
//! combine always carries bf16.
//!
//! # Porting from DeepEP
//!
//! DeepEP's names (its `deep_ep.Buffer`, of 2025) beside these:
//!
//! | DeepEP | here |
//! |---|---|
//! | `Buffer(group, …)` | [`ExpertParallel`], made by [`Communicator::expert_parallel`](crate::Communicator::expert_parallel) |
//! | `num_experts`, `num_max_dispatch_tokens_per_rank` | [`Shape::experts`], [`Shape::max_tokens`]; there a batch has fewer tokens than the maximum, here at most as many |
//! | `x` of both dispatches: `[num_tokens, hidden]`, bf16 | `tokens`: the same |
//! | `x` of `dispatch` as a tuple of e4m3 and scales | the payload [`Payload::Fp8`]: bf16 tokens are quantised by dispatch, in both modes |
//! | `topk_idx`: `[num_tokens, num_topk]`, -1 for none | `indices` of [`Routing::new`]: the same; an expert twice in one token is refused |
//! | `topk_weights`: `[num_tokens, num_topk]`, f32 | `weights` of [`Routing::new`] |
//! | `use_fp8` | [`Payload::Fp8`] |
//! | `return_recv_hook`, `hook()` | [`ExpertParallel::dispatch_send`] and [`Received::combine_send`], whose results have `receive()` |
//! | `async_finish`, `previous_event`, `event` | none on hosts: `receive()` waits |
//! | `get_dispatch_layout` → `num_tokens_per_rank`, `is_token_in_rank` | [`Routing::tokens_per_rank`], [`Routing::is_token_in_rank`] |
//! | `get_dispatch_layout` → `num_tokens_per_expert` | [`Routing::pairs_per_expert`] |
//! | `low_latency_dispatch` → `recv_x`: `[local experts, max tokens · ranks, hidden]` | rows of [`ReceivedRows::range`] by expert and source, in slots; [`Received::expert_rows`] copies those of one expert together |
//! | `low_latency_dispatch` → `recv_count`: `[local experts]` | [`ReceivedRows::of_expert`] |
//! | `recv_x[1]`: scales `[…, hidden / 128]`, f32, column-major | behind the elements of each row, row-major: [`Payload::row_bytes`] |
//! | `handle`: `src_info`, `layout_range` | [`Received`]; [`ReceivedRows::range`] |
//! | `low_latency_combine(x, topk_idx, topk_weights, handle)` | [`Received::combine`]: outputs where the rows are; routing and weights are the dispatch's |
//! | `zero_copy`, `get_next_low_latency_combine_buffer` | [`Received::with_outputs`]: registered memory, from which combine sends |
//! | `combined_x`: `[num_tokens, hidden]`, bf16 | the same |
//! | `dispatch` → `recv_x`: a row for each token and *rank* that has an expert of it | a row for each token and *expert*, ordered by expert: no `recv_topk_idx` is needed to find an expert's rows |
//! | `dispatch` → `num_recv_tokens_per_expert_list`, `expert_alignment` | [`ReceivedRows::of_expert`]; rows are not padded |
//! | `dispatch` → `recv_topk_weights`, `combine(x, handle, topk_weights)`: sums *without* weights | weights remain at the token's rank, and combine multiplies by them in both modes; give 1.0 to port a model whose experts multiply |
//! | `clean_low_latency_buffer` | not needed: arrivals are numbered |
//! | two low-latency results at most are held at a time | the same: a third dispatch is refused ([`MoeError::Held`]) while two are held here, and waits while they are held elsewhere |

mod combine;
mod dispatch;
mod error;
mod layout;
mod parallel;
mod quantise;
pub mod reference;
mod routing;
mod row;

use crate::types::{Rank, named};

pub use combine::Combining;
pub use dispatch::{Dispatching, Received};
pub use error::MoeError;
pub use layout::{ReceivedRows, SlotLayout};
pub use parallel::{ExpertParallel, MoeOptions};
pub use quantise::quantise;
pub use routing::{Choice, NO_EXPERT, Routing, RoutingError};
pub use row::dequantise;

/// Elements that share a scale in [`Payload::Fp8`].
pub const FP8_BLOCK: usize = 128;

/// Multiple of elements of [`Shape::hidden`]: rows of bf16 are multiples of 16 bytes.
pub const HIDDEN_MULTIPLE: u32 = 8;

/// Maximum pairs that one rank may send, or receive, in an operation.
pub const MAX_PAIRS: u64 = 1 << 31;

named! {
    /// How the two operations exchange rows.
    Mode, "mode" {
        /// Fixed slots, written without an exchange of counts before.
        LowLatency = "low-latency",
        /// Counts are exchanged, and the rows received are contiguous.
        HighThroughput = "high-throughput",
    }
}

named! {
    /// How dispatch carries a token.
    Payload, "payload" {
        /// Elements of bf16.
        Bf16 = "bf16",
        /// Elements of FP8 (E4M3), with a scale of `f32` for each [`FP8_BLOCK`] of them.
        Fp8 = "fp8",
    }
}

impl Payload {
    /// Bytes of a row, a multiple of 16: `hidden` elements, then (of FP8) their scales as `f32` in
    /// the byte order of the host, then padding.
    #[must_use]
    pub const fn row_bytes(self, hidden: u32) -> usize {
        let hidden = hidden as usize;
        match self {
            Self::Bf16 => hidden * 2,
            Self::Fp8 => (hidden + hidden / FP8_BLOCK * size_of::<f32>()).next_multiple_of(16),
        }
    }
}

/// The dimensions of an expert-parallel layer: the same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    ranks: u32,
    experts: u32,
    top_k: u32,
    hidden: u32,
    max_tokens: u32,
}

/// Dimensions that no layer has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// The experts cannot be divided among the ranks.
    #[error("{experts} experts on {ranks} ranks: the experts must be a multiple of the ranks, and one at least")]
    Experts {
        /// The experts.
        experts: u32,
        /// The ranks.
        ranks: u32,
    },
    /// A token cannot choose so many different experts.
    #[error("top-{top_k} of {experts} experts: it must be from 1 to the number of experts")]
    TopK {
        /// The chosen experts of a token.
        top_k: u32,
        /// The experts.
        experts: u32,
    },
    /// A row is not a multiple of 16 bytes.
    #[error("a hidden dimension of {hidden}: it must be a multiple of {multiple}")]
    Hidden {
        /// The elements of a token.
        hidden: u32,
        /// What it must be a multiple of.
        multiple: u32,
    },
    /// A rank must be able to have a token.
    #[error("a maximum of 0 tokens of a rank: it must be 1 at least")]
    NoTokens,
    /// Counts and offsets would overflow.
    #[error("{tokens} tokens of each of {ranks} ranks, top-{top_k}, hidden {hidden}: a rank may receive too much")]
    TooLarge {
        /// The maximum tokens of a rank.
        tokens: u32,
        /// The ranks.
        ranks: u32,
        /// The chosen experts of a token.
        top_k: u32,
        /// The elements of a token.
        hidden: u32,
    },
}

impl Shape {
    /// The dimensions: `experts` on `ranks` ranks, of which each token chooses up to `top_k`;
    /// tokens of `hidden` elements, at most `max_tokens` of a rank in one operation.
    ///
    /// # Errors
    /// When experts cannot be divided evenly, a dimension is 0, `top_k` exceeds the experts, rows
    /// are not multiples of 16 bytes, or a rank could receive more than [`MAX_PAIRS`].
    pub fn new(ranks: u32, experts: u32, top_k: u32, hidden: u32, max_tokens: u32) -> Result<Self, ShapeError> {
        if ranks == 0 || experts == 0 || !experts.is_multiple_of(ranks) {
            return Err(ShapeError::Experts { experts, ranks });
        }
        if top_k == 0 || top_k > experts {
            return Err(ShapeError::TopK { top_k, experts });
        }
        if hidden == 0 || !hidden.is_multiple_of(HIDDEN_MULTIPLE) {
            return Err(ShapeError::Hidden {
                hidden,
                multiple: HIDDEN_MULTIPLE,
            });
        }
        if max_tokens == 0 {
            return Err(ShapeError::NoTokens);
        }
        let shape = Self {
            ranks,
            experts,
            top_k,
            hidden,
            max_tokens,
        };
        let pairs = u128::from(max_tokens) * u128::from(top_k) * u128::from(ranks);
        let bytes = pairs * u128::from(hidden) * 2;
        if pairs > u128::from(MAX_PAIRS) || bytes > 1 << 46 {
            return Err(ShapeError::TooLarge {
                tokens: max_tokens,
                ranks,
                top_k,
                hidden,
            });
        }
        Ok(shape)
    }

    /// Checks that rows of this payload exist.
    ///
    /// # Errors
    /// When FP8's scales would not cover whole blocks.
    pub fn supports(&self, payload: Payload) -> Result<(), ShapeError> {
        let multiple = match payload {
            Payload::Bf16 => HIDDEN_MULTIPLE,
            Payload::Fp8 => FP8_BLOCK as u32,
        };
        match self.hidden.is_multiple_of(multiple) {
            true => Ok(()),
            false => Err(ShapeError::Hidden {
                hidden: self.hidden,
                multiple,
            }),
        }
    }

    /// The number of ranks.
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The experts of all ranks.
    #[must_use]
    pub const fn experts(&self) -> u32 {
        self.experts
    }

    /// The maximum number of experts of a token.
    #[must_use]
    pub const fn top_k(&self) -> u32 {
        self.top_k
    }

    /// The elements of a token.
    #[must_use]
    pub const fn hidden(&self) -> u32 {
        self.hidden
    }

    /// The maximum tokens of a rank in one operation.
    #[must_use]
    pub const fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    /// The experts of each rank.
    #[must_use]
    pub const fn local_experts(&self) -> u32 {
        self.experts / self.ranks
    }

    /// The rank that has an expert.
    #[must_use]
    pub const fn rank_of(&self, expert: u32) -> Rank {
        Rank(expert / self.local_experts())
    }

    /// The first expert of a rank.
    #[must_use]
    pub const fn first_expert(&self, rank: Rank) -> u32 {
        rank.0 * self.local_experts()
    }

    /// The maximum pairs that a rank sends: all tokens with all their experts.
    #[must_use]
    pub const fn max_pairs(&self) -> usize {
        self.max_tokens as usize * self.top_k as usize
    }

    /// The maximum pairs of one rank for one other: a token chooses an expert once.
    #[must_use]
    pub const fn max_pairs_for_rank(&self) -> usize {
        let chosen = if self.top_k < self.local_experts() {
            self.top_k
        } else {
            self.local_experts()
        };
        self.max_tokens as usize * chosen as usize
    }
}
