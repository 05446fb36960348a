//! Dispatch and combine written plainly, for all ranks in one process: what they compute.

use super::{FP8_BLOCK, Payload, Routing, Shape};
use crate::kernel::{F8E4M3, bf16};
use crate::types::Rank;

/// The least magnitude by which a block is scaled, as in DeepEP: a block of zeros has a scale.
const LEAST_AMAX: f32 = 1e-4;
/// The largest number of E4M3.
const FP8_MAX: f32 = 448.0;

/// Quantises a block: its scale, and by element the nearest number of E4M3 to `x * (448 / amax)`,
/// where amax is the largest magnitude, and at least 1e-4. The scale is `amax * (1 / 448)`, so that
/// `element * scale` is about x. All operations are of `f32`; E4M3 saturates.
///
/// NaN does not count in amax and remains NaN. In a block with an infinity, finite elements become 0
/// and the infinity NaN, with an infinite scale.
///
/// # Panics
/// When the lengths differ.
pub fn quantise(block: &[bf16], into: &mut [u8]) -> f32 {
    assert_eq!(block.len(), into.len(), "an E4M3 for each element");
    let amax = block
        .iter()
        .fold(LEAST_AMAX, |amax, element| amax.max(element.to_f32().abs()));
    let scale = FP8_MAX / amax;
    for (into, element) in into.iter_mut().zip(block) {
        *into = F8E4M3::from_f32(element.to_f32() * scale).to_bits();
    }
    amax * (1.0 / FP8_MAX)
}

/// The elements of a row of this payload as `f32`: of FP8, the products with their scales.
///
/// # Panics
/// When the row is shorter than [`Payload::row_bytes`].
#[must_use]
pub fn dequantise(payload: Payload, hidden: u32, row: &[u8]) -> Vec<f32> {
    let hidden = hidden as usize;
    match payload {
        Payload::Bf16 => row[..2 * hidden]
            .chunks_exact(2)
            .map(|element| bf16::from_ne_bytes([element[0], element[1]]).to_f32())
            .collect(),
        Payload::Fp8 => {
            let scales = row[hidden..].chunks_exact(4);
            let scales = scales.map(|scale| f32::from_ne_bytes([scale[0], scale[1], scale[2], scale[3]]));
            let blocks = row[..hidden].chunks(FP8_BLOCK).zip(scales);
            let elements = blocks.flat_map(|(block, scale)| block.iter().map(move |&element| (element, scale)));
            elements
                .map(|(element, scale)| F8E4M3::from_bits(element).to_f32() * scale)
                .collect()
        }
    }
}

/// A token as a row of this payload.
///
/// # Panics
/// When `into` is not of [`Payload::row_bytes`].
pub fn write_row(payload: Payload, token: &[bf16], into: &mut [u8]) {
    assert_eq!(into.len(), payload.row_bytes(token.len() as u32), "a row");
    match payload {
        Payload::Bf16 => {
            for (into, element) in into.chunks_exact_mut(2).zip(token) {
                into.copy_from_slice(&element.to_ne_bytes());
            }
        }
        Payload::Fp8 => {
            let (elements, rest) = into.split_at_mut(token.len());
            let blocks = token.chunks(FP8_BLOCK).zip(elements.chunks_mut(FP8_BLOCK));
            let (scales, padding) = rest.split_at_mut(token.len() / FP8_BLOCK * 4);
            for ((block, elements), scale) in blocks.zip(scales.chunks_exact_mut(4)) {
                scale.copy_from_slice(&quantise(block, elements).to_ne_bytes());
            }
            padding.fill(0);
        }
    }
}

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
        combined.extend(sums.into_iter().map(bf16::from_f32));
    }
    combined
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each block's largest magnitude becomes 448; the rest is within half a unit in the last place of
    /// E4M3, which has 3 bits of fraction.
    #[test]
    fn a_block_keeps_its_largest_element_and_a_relative_error_of_a_sixteenth() {
        let values: Vec<bf16> = (0..256)
            .map(|index| bf16::from_f32((index as f32 - 100.0) * if index < 128 { 3.0 } else { 1e-3 }))
            .collect();
        let mut row = vec![0; Payload::Fp8.row_bytes(256)];
        write_row(Payload::Fp8, &values, &mut row);
        let back = dequantise(Payload::Fp8, 256, &row);
        for (index, (value, back)) in values.iter().zip(&back).enumerate() {
            let value = value.to_f32();
            assert!((value - back).abs() <= value.abs() / 16.0, "{index}: {value} {back}");
        }
        assert_eq!(row[0], F8E4M3::from_f32(-448.0).to_bits());
        assert_eq!(row[255], F8E4M3::from_f32(448.0).to_bits());
    }

    #[test]
    fn zeros_nans_and_infinities_of_a_block_stay_in_it() {
        let mut elements = [0; 4];
        let number = bf16::from_f32;
        assert_eq!(quantise(&[bf16::ZERO; 4], &mut elements), 1e-4 * (1.0 / 448.0));
        assert_eq!(elements, [0; 4]);
        let scale = quantise(&[bf16::NAN, number(2.0), number(-1.0), bf16::ZERO], &mut elements);
        let read = elements.map(|element| F8E4M3::from_bits(element).to_f32() * scale);
        assert!(read[0].is_nan() && read[1..] == [2.0, -1.0, 0.0], "{read:?}");
        assert_eq!(
            quantise(&[bf16::INFINITY, number(2.0)], &mut elements[..2]),
            f32::INFINITY
        );
        assert!(F8E4M3::from_bits(elements[0]).to_f32().is_nan() && elements[1] == 0);
    }
}
