//! Conversions between floats of 16 and 8 bits and `f32`, as branchless integer arithmetic that
//! vectorises.
//!
//! To `f32` is exact; back rounds to nearest, ties to even. No intermediate value is a denormal
//! `f32`, so a processor that flushes denormals gives the same results. Every NaN becomes the quiet
//! NaN without a sign. Floats of 16 bits overflow to infinity, as IEEE 754 says; those of 8 bits
//! saturate, as OCP's FP8 specification (OFP8, revision 1.0, table 3) and GPUs do: E4M3 has no
//! infinity.

const MAGNITUDE: u32 = 0x7fff_ffff;
/// The bits of infinity; a larger magnitude is NaN.
const INFINITY: u32 = 0x7f80_0000;

const fn exponent(power: i32) -> u32 {
    ((127 + power) as u32) << 23
}

/// The value of a magnitude whose exponent and fraction were shifted to the `f32`'s, with an
/// exponent bias of `bias` and a denormal where the exponent is zero. Not for infinities and NaNs.
#[inline(always)]
fn widen(shifted: u32, bias: i32) -> u32 {
    let normal = shifted + exponent(-bias);
    // A denormal's fraction, read with the minimum exponent, is too large by the leading bit.
    let least = exponent(1 - bias);
    let denormal = (f32::from_bits(shifted + least) - f32::from_bits(least)).to_bits();
    if shifted < 1 << 23 { denormal } else { normal }
}

/// Rounds to `fraction` bits and exponent bias `bias`; overflow runs on into the exponent.
#[inline(always)]
fn narrow(magnitude: u32, bias: i32, fraction: u32) -> u32 {
    let shift = 23 - fraction;
    let odd = (magnitude >> shift) & 1;
    let normal = (magnitude
        .wrapping_sub(exponent(-bias))
        .wrapping_add((1 << (shift - 1)) - 1 + odd))
        >> shift;
    // The sum is rounded at the last bit of a denormal: this power of two has its weight.
    let unit = exponent(1 - bias + shift as i32);
    let denormal = (f32::from_bits(magnitude) + f32::from_bits(unit))
        .to_bits()
        .wrapping_sub(unit);
    if magnitude < exponent(1 - bias) {
        denormal
    } else {
        normal
    }
}

#[inline(always)]
pub(super) fn f16_to_f32(bits: u16) -> f32 {
    let shifted = (u32::from(bits) & 0x7fff) << 13;
    let finite = widen(shifted, 15);
    let magnitude = if shifted >= 0x7c00 << 13 {
        shifted + 2 * exponent(-15)
    } else {
        finite
    };
    f32::from_bits(magnitude | (u32::from(bits) & 0x8000) << 16)
}

#[inline(always)]
pub(super) fn f32_to_f16(value: f32) -> u16 {
    let magnitude = value.to_bits() & MAGNITUDE;
    let sign = value.to_bits() >> 16 & 0x8000;
    let finite = sign | narrow(magnitude, 15, 10);
    let rounded = if magnitude >= exponent(16) {
        sign | 0x7c00
    } else {
        finite
    };
    (if magnitude > INFINITY { 0x7e00 } else { rounded }) as u16
}

#[inline(always)]
pub(super) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline(always)]
pub(super) fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if bits & MAGNITUDE > INFINITY { 0x7fc0 } else { rounded }) as u16
}

#[inline(always)]
pub(super) fn f8e4m3_to_f32(bits: u8) -> f32 {
    let shifted = (u32::from(bits) & 0x7f) << 20;
    let finite = widen(shifted, 7) | (u32::from(bits) & 0x80) << 24;
    f32::from_bits(if shifted == 0x7f << 20 {
        f32::NAN.to_bits()
    } else {
        finite
    })
}

#[inline(always)]
pub(super) fn f32_to_f8e4m3(value: f32) -> u8 {
    let magnitude = value.to_bits() & MAGNITUDE;
    let sign = value.to_bits() >> 24 & 0x80;
    let rounded = sign | narrow(magnitude.min(448f32.to_bits()), 7, 3);
    (if magnitude > INFINITY { 0x7f } else { rounded }) as u8
}

/// As [`f32_to_f8e4m3`], for magnitudes that round to 448 at most: one sum rounds normal numbers
/// and denormals alike, which takes half the instructions. Bits above the lower eight are
/// undefined.
#[inline(always)]
pub(crate) fn magnitude_to_f8e4m3(magnitude: f32) -> u32 {
    const SHIFT: u32 = 20;
    /// What is subtracted from a code, for the bias of `f32`'s exponent in it; modulo 256.
    const BIAS: u32 = 0_u32.wrapping_sub(exponent(-6) >> SHIFT) & 0xff;
    // Where E4M3 is denormal, its last bit has the weight of the least exponent.
    let power = (magnitude.to_bits() & INFINITY).max(exponent(-6));
    // The sum with this is rounded at the last bit of E4M3. The bias is even: ties go to even.
    let unit = power + (SHIFT << 23) + BIAS;
    let rounded = (magnitude + f32::from_bits(unit)).to_bits();
    rounded + (power >> SHIFT)
}

/// E5M2 as `f32`: the upper byte of a binary16.
#[inline(always)]
pub(super) fn f8e5m2_to_f32(bits: u8) -> f32 {
    f16_to_f32(u16::from(bits) << 8)
}

/// `f32` as E5M2, saturating.
#[inline(always)]
pub(super) fn f32_to_f8e5m2(value: f32) -> u8 {
    let magnitude = value.to_bits() & MAGNITUDE;
    let sign = value.to_bits() >> 24 & 0x80;
    let rounded = sign | narrow(magnitude.min(57344f32.to_bits()), 15, 2);
    (if magnitude > INFINITY { 0x7f } else { rounded }) as u8
}
