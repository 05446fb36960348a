//! Rows: tokens as dispatch carries them, and the sums of combine.

use super::quantise::quantise_blocks;
use super::{FP8_BLOCK, Payload, Routing};
use crate::kernel::{F8E4M3, Version, bf16, versioned};

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
            let (scales, padding) = rest.split_at_mut(token.len() / FP8_BLOCK * 4);
            quantise_blocks(
                Version::best(),
                token.as_chunks().0,
                elements.as_chunks_mut().0,
                scales.as_chunks_mut().0,
            );
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
pub(super) fn widened(element: bf16) -> f32 {
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

versioned! {
    /// Adds up the weighted outputs of each token, in order of k.
    pub(super) fn add_up(routing: &Routing, outputs: Outputs<'_>, combined: &mut [bf16]) = add_up_tokens
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
