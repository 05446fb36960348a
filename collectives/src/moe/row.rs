//! Rows: tokens as dispatch carries them, and the sums of combine.

use super::{FP8_BLOCK, Payload, Routing};
use crate::kernel::{F8E4M3, bf16};

/// Calls a function compiled for AVX2 where the processor has it, else for the build's target. The
/// results have the same bits: no multiplication is fused with an addition.
macro_rules! versioned {
    ($function:ident($($argument:ident: $type:ty),*) -> $result:ty) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2")]
            fn avx2($($argument: $type),*) -> $result {
                $function($($argument),*)
            }
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the processor has AVX2.
                return unsafe { avx2($($argument),*) };
            }
        }
        $function($($argument),*)
    }};
}

/// The least magnitude by which a block is scaled, as in DeepEP: a block of zeros has a scale.
const LEAST_AMAX: f32 = 1e-4;
/// The largest number of E4M3.
const FP8_MAX: f32 = 448.0;

/// Quantises a block: its scale, and by element the nearest number of E4M3 to `x * (448 / amax)`,
/// where amax is the largest magnitude, and at least 1e-4. The scale is `amax * (1 / 448)`, so that
/// `element * scale` is about x. All operations are of `f32`; E4M3 saturates.
///
/// NaN does not count in amax and remains NaN. In a block with an infinity, finite elements become
/// 0 and the infinity NaN, with an infinite scale.
///
/// # Panics
/// When the lengths differ.
pub fn quantise(block: &[bf16], into: &mut [u8]) -> f32 {
    assert_eq!(block.len(), into.len(), "an E4M3 for each element");
    versioned!(quantise_block(block: &[bf16], into: &mut [u8]) -> f32)
}

#[inline(always)]
fn quantise_block(block: &[bf16], into: &mut [u8]) -> f32 {
    // Magnitudes are in the order of their bits; those above infinity's are NaNs.
    let magnitude = |element: &bf16| element.to_bits() & 0x7fff;
    let counted = |bits: u16| if bits > bf16::INFINITY.to_bits() { 0 } else { bits };
    let largest = block
        .iter()
        .map(magnitude)
        .fold(0, |largest, bits| largest.max(counted(bits)));
    let amax = LEAST_AMAX.max(widened(bf16::from_bits(largest)));
    let scale = FP8_MAX / amax;
    for (into, element) in into.iter_mut().zip(block) {
        *into = F8E4M3::from_f32(widened(*element) * scale).to_bits();
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
        Payload::Bf16 => into.copy_from_slice(bytes_of(token)),
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

fn bytes_of(elements: &[bf16]) -> &[u8] {
    // SAFETY: bf16 is a transparent `u16`: every byte of it is initialised.
    unsafe { core::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// As `bf16::to_f32`, without its branch for NaN: for loops that vectorise.
#[inline(always)]
fn widened(element: bf16) -> f32 {
    f32::from_bits(u32::from(element.to_bits()) << 16)
}

/// A sum as an element: to nearest, ties to even; NaN as the one quiet NaN without a sign.
#[inline(always)]
pub(super) fn to_bf16(sum: f32) -> bf16 {
    let bits = sum.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    bf16::from_bits(if sum.is_nan() { 0x7fc0 } else { rounded as u16 })
}

/// Elements that are added up at once: their sums stay in the first-level cache.
const SUMS: usize = 256;
/// Outputs that are added between a load and a store of the sums.
const FUSED: usize = 4;

/// The outputs of a rank's pairs: those of other ranks' experts where they have arrived, those of
/// its own experts where these have written them.
#[derive(Clone, Copy)]
pub(super) struct Outputs<'o> {
    /// By position in the send order.
    pub(super) arrived: &'o [bf16],
    /// By row of what the rank has received.
    pub(super) own: &'o [bf16],
    /// The rows of the pairs for the rank's own experts, which are consecutive in the send order.
    pub(super) own_rows: &'o [u32],
    /// The position of the first of those pairs.
    pub(super) own_base: u32,
}

impl<'o> Outputs<'o> {
    #[inline(always)]
    fn of(&self, position: u32, hidden: usize) -> &'o [bf16] {
        let index = position.wrapping_sub(self.own_base) as usize;
        match self.own_rows.get(index) {
            Some(&row) => &self.own[row as usize * hidden..][..hidden],
            None => &self.arrived[position as usize * hidden..][..hidden],
        }
    }
}

/// Adds up the weighted outputs of each token, in order of k.
pub(super) fn add_up(routing: &Routing, outputs: Outputs<'_>, combined: &mut [bf16]) {
    versioned!(add_up_tokens(routing: &Routing, outputs: Outputs<'_>, combined: &mut [bf16]) -> ())
}

#[inline(always)]
fn add_up_tokens(routing: &Routing, outputs: Outputs<'_>, combined: &mut [bf16]) {
    let hidden = routing.shape().hidden() as usize;
    let mut chosen = Vec::with_capacity(routing.shape().top_k() as usize);
    for (token, combined) in combined.chunks_exact_mut(hidden).enumerate() {
        chosen.clear();
        let choices = routing.choices(token);
        chosen.extend(choices.map(|choice| (choice.weight, outputs.of(choice.position, hidden))));
        let (fused, rest) = chosen.as_chunks::<FUSED>();
        for (chunk, combined) in combined.chunks_mut(SUMS).enumerate() {
            let mut sums = [0.0_f32; SUMS];
            let sums = &mut sums[..combined.len()];
            for outputs in fused {
                add(sums, outputs, chunk * SUMS);
            }
            for output in rest {
                add(sums, &[*output], chunk * SUMS);
            }
            for (combined, sum) in combined.iter_mut().zip(sums) {
                *combined = to_bf16(*sum);
            }
        }
    }
}

/// Adds weighted outputs, from an element on, one after another.
#[inline(always)]
fn add<const N: usize>(sums: &mut [f32], outputs: &[(f32, &[bf16]); N], first: usize) {
    let len = sums.len();
    let elements = outputs.map(|(_, output)| &output[first..][..len]);
    for index in 0..len {
        let mut sum = sums[index];
        for ((weight, _), elements) in outputs.iter().zip(elements) {
            sum += *weight * widened(elements[index]);
        }
        sums[index] = sum;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each block's largest magnitude becomes 448; the rest is within half a unit in the last place
    /// of E4M3, which has 3 bits of fraction.
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
