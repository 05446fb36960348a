//! FP8 with a scale for each block.

use super::FP8_BLOCK;
use super::row::widened;
use crate::kernel::{F8E4M3, bf16, magnitude_to_f8e4m3, versioned};

/// The least magnitude by which a block is scaled, as in DeepEP: a block of zeros has a scale.
const LEAST_AMAX: f32 = 1e-4;
/// The largest number of E4M3.
const FP8_MAX: f32 = 448.0;

const SIGN: u16 = 0x8000;
const INFINITY: u16 = bf16::INFINITY.to_bits();

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
    let largest = largest_magnitude(block);
    if largest >= INFINITY {
        return quantise_special(block, into);
    }
    let amax = amax_of(largest);
    encode(block, into, FP8_MAX / amax);
    scale_of(amax)
}

versioned! {
    /// Quantises blocks: for each its elements, and the scale in the byte order of the host.
    pub(super) fn quantise_blocks(
        blocks: &[[bf16; FP8_BLOCK]], into: &mut [[u8; FP8_BLOCK]], scales: &mut [[u8; 4]]
    ) = each_block
}

/// Blocks whose maxima are found before the first is encoded. Block by block, each encoding would
/// wait for its maximum and a division, which takes as long again.
const AHEAD: usize = 64;

#[inline(always)]
fn each_block(blocks: &[[bf16; FP8_BLOCK]], into: &mut [[u8; FP8_BLOCK]], scales: &mut [[u8; 4]]) {
    let mut factors = [0.0_f32; AHEAD];
    let chunks = blocks.chunks(AHEAD).zip(into.chunks_mut(AHEAD));
    for ((blocks, into), scales) in chunks.zip(scales.chunks_mut(AHEAD)) {
        let mut largest = 0;
        for (block, amax) in blocks.iter().zip(&mut factors) {
            let magnitude = largest_magnitude(block);
            largest = magnitude.max(largest);
            *amax = amax_of(magnitude);
        }
        if largest >= INFINITY {
            quantise_each(blocks, into, scales);
            continue;
        }
        for (factor, scale) in factors.iter_mut().zip(scales) {
            *scale = scale_of(*factor).to_ne_bytes();
            *factor = FP8_MAX / *factor;
        }
        for ((block, into), factor) in blocks.iter().zip(into).zip(&factors) {
            encode(block, into, *factor);
        }
    }
}

/// Blocks of which one has a NaN or an infinity.
#[cold]
fn quantise_each(blocks: &[[bf16; FP8_BLOCK]], into: &mut [[u8; FP8_BLOCK]], scales: &mut [[u8; 4]]) {
    for ((block, into), scale) in blocks.iter().zip(into).zip(scales) {
        *scale = quantise(block, into).to_ne_bytes();
    }
}

/// Magnitudes are in the order of their bits.
#[inline(always)]
fn largest_magnitude(block: &[bf16]) -> u16 {
    let magnitudes = block.iter().map(|element| element.to_bits() & !SIGN);
    magnitudes.fold(0, |largest, magnitude| largest.max(magnitude))
}

#[inline(always)]
fn amax_of(largest: u16) -> f32 {
    LEAST_AMAX.max(widened(bf16::from_bits(largest)))
}

#[inline(always)]
fn scale_of(amax: f32) -> f32 {
    amax * (1.0 / FP8_MAX)
}

/// The E4M3 nearest to each element times a factor. No product exceeds 448 but by its rounding.
#[inline(always)]
fn encode(block: &[bf16], into: &mut [u8], factor: f32) {
    let (pairs, last) = block.as_chunks();
    let (into_pairs, into_last) = into.as_chunks_mut();
    for (into, pair) in into_pairs.iter_mut().zip(pairs) {
        *into = encode_pair(*pair, factor);
    }
    for (into, element) in into_last.iter_mut().zip(last) {
        *into = encode_pair([*element, bf16::ZERO], factor)[0];
    }
}

/// Two elements in one word: vectors of words need no shuffles to be widened and narrowed.
#[inline(always)]
fn encode_pair(pair: [bf16; 2], factor: f32) -> [u8; 2] {
    let [low, high] = pair.map(|element| u32::from(element.to_bits()));
    let word = high << 16 | low;
    let code = |magnitude: u32| magnitude_to_f8e4m3(f32::from_bits(magnitude & 0x7fff_0000) * factor);
    let codes = code(word << 16) & 0x7f | code(word) << 8 & 0x7f00;
    let signs = word >> 8 & 0x80 | word >> 16 & 0x8000;
    ((codes | signs) as u16).to_le_bytes()
}

/// A block with a NaN or an infinity. For every block this is the definition, in several times the
/// time.
#[cold]
fn quantise_special(elements: &[bf16], into: &mut [u8]) -> f32 {
    let numbers = elements.iter().filter(|element| !element.is_nan());
    let amax = numbers.fold(LEAST_AMAX, |amax, element| amax.max(element.to_f32().abs()));
    let scale = FP8_MAX / amax;
    for (into, element) in into.iter_mut().zip(elements) {
        *into = F8E4M3::from_f32(element.to_f32() * scale).to_bits();
    }
    amax * (1.0 / FP8_MAX)
}

#[cfg(test)]
mod tests {
    use super::super::Payload;
    use super::super::row::{dequantise, write_row};
    use super::*;
    use crate::kernel::Version;
    use crate::kernel::tests::Random;

    /// Quantises blocks by all versions. All have to give the definition's bits.
    fn check(blocks: &[[bf16; FP8_BLOCK]]) {
        let mut wanted = vec![[0; FP8_BLOCK]; blocks.len()];
        let scales = blocks.iter().zip(&mut wanted);
        let scales: Vec<_> = scales
            .map(|(block, wanted)| quantise_special(block, wanted).to_ne_bytes())
            .collect();
        for version in Version::available() {
            let mut into = vec![[0x55; FP8_BLOCK]; blocks.len()];
            let mut given = vec![[0x55; 4]; blocks.len()];
            quantise_blocks(version, blocks, &mut into, &mut given);
            assert_eq!(given, scales, "{version:?}");
            for (block, (into, wanted)) in blocks.iter().zip(into.iter().zip(&wanted)) {
                assert!(into == wanted, "{version:?}: {block:?}: {into:x?}, not {wanted:x?}");
            }
        }
    }

    /// Each number of bf16 that is not larger, beside a largest magnitude.
    #[test]
    fn every_element_has_the_bits_of_the_definition_beside_every_kind_of_largest() {
        let step = if cfg!(miri) { 509 } else { 1 };
        let largest = [
            0.0,
            1e-6,
            1e-4,
            0.017,
            1.0,
            3.984_375,
            448.0,
            5e8,
            3.38e38,
            f32::INFINITY,
            f32::NAN,
        ];
        for largest in largest.map(bf16::from_f32) {
            let all = (0..=u16::MAX).step_by(step).map(bf16::from_bits);
            let all: Vec<_> = all
                .filter(|element| largest.is_nan() || element.to_f32().abs() <= largest.to_f32())
                .collect();
            let blocks: Vec<_> = all
                .chunks(FP8_BLOCK - 1)
                .map(|elements| {
                    let mut block = [largest; FP8_BLOCK];
                    block[..elements.len()].copy_from_slice(elements);
                    block
                })
                .collect();
            check(&blocks);
        }
    }

    #[test]
    fn random_blocks_of_all_lengths_have_the_bits_of_the_definition() {
        let mut random = Random::new(26);
        for round in 0..if cfg!(miri) { 4 } else { 300 } {
            // Exponents of a few neighbours, as in tokens, or all; rarely NaNs and infinities.
            let exponents = 1 + random.below(if round % 2 == 0 { 12 } else { 255 });
            let (first, all) = (random.below(255), if round % 8 == 0 { 256 } else { 255 });
            let mut element = || {
                let exponent = (first + random.below(exponents)) % all;
                bf16::from_bits(random.next() as u16 & 0x807f | (exponent as u16) << 7)
            };
            let blocks: Vec<_> = (0..1 + round % 70)
                .map(|_| [(); FP8_BLOCK].map(|()| element()))
                .collect();
            check(&blocks);
            let elements = &blocks.as_flattened()[..1 + round % FP8_BLOCK];
            let (mut into, mut wanted) = (vec![0; elements.len()], vec![0; elements.len()]);
            let scale = quantise(elements, &mut into);
            assert_eq!(scale.to_bits(), quantise_special(elements, &mut wanted).to_bits());
            assert_eq!(into, wanted, "{elements:?}");
        }
    }

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
