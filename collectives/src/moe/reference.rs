//! Dispatch and combine written plainly, for all ranks in one process: what they compute.

pub use super::quantise::quantise;
pub use super::row::{dequantise, write_row};

use super::row::to_bf16;
use super::{Payload, Routing, Shape};
use crate::kernel::bf16;
use crate::types::Rank;

/// A row at an expert.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Row {
    /// The rank of its token.
    pub source: Rank,
    /// The pair, of that rank.
    pub pair: u32,
    /// The token in the payload's form.
    pub bytes: Vec<u8>,
}

/// By expert of all ranks, what it receives, by (source rank, token): `tokens` and `routings` by
/// rank.
///
/// # Panics
/// When a rank's tokens are not those of its routing.
#[must_use]
pub fn dispatch(shape: &Shape, payload: Payload, tokens: &[Vec<bf16>], routings: &[Routing]) -> Vec<Vec<Row>> {
    let hidden = shape.hidden() as usize;
    let mut experts = vec![Vec::new(); shape.experts() as usize];
    for (source, (tokens, routing)) in tokens.iter().zip(routings).enumerate() {
        assert_eq!(tokens.len(), routing.tokens() * hidden, "the tokens of the routing");
        for (index, token) in tokens.chunks_exact(hidden).enumerate() {
            for choice in routing.choices(index) {
                let mut bytes = vec![0; payload.row_bytes(shape.hidden())];
                write_row(payload, token, &mut bytes);
                experts[choice.expert as usize].push(Row {
                    source: Rank(source as u32),
                    pair: choice.pair,
                    bytes,
                });
            }
        }
    }
    experts
}

/// The combined tokens of one rank: `output` returns the output of an expert for a pair of it.
#[must_use]
pub fn combine(routing: &Routing, output: impl Fn(u32, u32) -> Vec<bf16>) -> Vec<bf16> {
    let hidden = routing.shape().hidden() as usize;
    let mut combined = Vec::with_capacity(routing.tokens() * hidden);
    for token in 0..routing.tokens() {
        let mut sums = vec![0.0_f32; hidden];
        for choice in routing.choices(token) {
            for (sum, element) in sums.iter_mut().zip(output(choice.expert, choice.pair)) {
                *sum += choice.weight * element.to_f32();
            }
        }
        combined.extend(sums.into_iter().map(to_bf16));
    }
    combined
}
