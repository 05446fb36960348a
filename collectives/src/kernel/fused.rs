//! Fused reductions in `f32` of any number of sources in one pass, with the partial results in
//! registers: as the loops over tiles, without their traffic through the L1 cache.
//!
//! The compiler does not vectorise binary16, and keeps several sources of several forms out of
//! registers, so these are written with intrinsics, for x86-64 only. Each processes whole blocks of
//! elements and leaves the rest to the tiles. Floats of 8 bits are not fused: most of their work is
//! the conversion, which the compiler vectorises.

use core::arch::x86_64::*;

use super::arithmetic::each;
use super::convert;
use super::versions::Fused;
use crate::plan::BlockForm;
use crate::types::{DataType, ReduceOp};

/// A vector of `f32`. Its functions are sound where the machine has the instruction set, and
/// pointers are valid for a vector at any alignment.
trait Vector: Copy {
    const LANES: usize;
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const u8) -> Self;
    unsafe fn store(self, into: *mut u8);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn multiply(self, other: Self) -> Self;
    /// As of [`Wide`](super::arithmetic::Wide), except for a NaN's payload; so is `maximum`.
    unsafe fn minimum(self, other: Self) -> Self;
    unsafe fn maximum(self, other: Self) -> Self;
    unsafe fn divide(self, by: Self) -> Self;
    unsafe fn canonical(self) -> Self;
    unsafe fn load_f16(from: *const u8) -> Self;
    unsafe fn store_f16(self, into: *mut u8);
    unsafe fn load_bf16(from: *const u8) -> Self;
    unsafe fn store_bf16(self, into: *mut u8);
}

/// Memory format of elements. Where `store` narrows, a NaN has no payload: that of bfloat16 would
/// round some to infinity.
trait Codec<V> {
    const BYTES: usize;
    unsafe fn load(from: *const u8) -> V;
    unsafe fn store(value: V, into: *mut u8);
}

struct F16;
struct Bf16;
struct F32;

macro_rules! codec {
    ($($name:ident: $bytes:literal, $load:ident, $store:ident;)*) => {
        $(impl<V: Vector> Codec<V> for $name {
            const BYTES: usize = $bytes;

            #[inline(always)]
            unsafe fn load(from: *const u8) -> V {
                // SAFETY: the caller's contract is the same.
                unsafe { V::$load(from) }
            }

            #[inline(always)]
            unsafe fn store(value: V, into: *mut u8) {
                // SAFETY: the caller's contract is the same.
                unsafe { value.$store(into) }
            }
        })*
    };
}

codec! {
    F16: 2, load_f16, store_f16;
    Bf16: 2, load_bf16, store_bf16;
    F32: 4, load, store;
}

/// An operator on two vectors. Sound where the vectors are.
trait Operation {
    unsafe fn apply<V: Vector>(a: V, b: V) -> V;
}

struct Sum;
struct Prod;
struct Min;
struct Max;

macro_rules! operation {
    ($($name:ident: $function:ident;)*) => {
        $(impl Operation for $name {
            #[inline(always)]
            unsafe fn apply<V: Vector>(a: V, b: V) -> V {
                // SAFETY: the caller's contract is the same.
                unsafe { a.$function(b) }
            }
        })*
    };
}

operation! {
    Sum: add;
    Prod: multiply;
    Min: minimum;
    Max: maximum;
}

/// Vectors of a block: the number of independent dependency chains.
const BLOCK: usize = 4;

/// # Safety
/// As [`Fused`].
#[inline(always)]
unsafe fn reduce<V: Vector, C: Codec<V>, O: Operation>(
    sources: &[(BlockForm, *const u8)],
    into: (BlockForm, *mut u8),
    elements: usize,
    ranks: Option<f32>,
) -> usize {
    let Some((&first, others)) = sources.split_first() else {
        return 0;
    };
    let step = BLOCK * V::LANES;
    let mut at = 0;
    while at + step <= elements {
        // SAFETY: a block from `at` on is within `elements` of every memory. `into` is written when
        // all sources were read.
        unsafe {
            let mut acc = load_block::<V, C>(first, at);
            for &source in others {
                let more = load_block::<V, C>(source, at);
                for (acc, more) in acc.iter_mut().zip(more) {
                    *acc = O::apply(*acc, more);
                }
            }
            match into {
                (BlockForm::Partial, into) => {
                    for (index, acc) in acc.into_iter().enumerate() {
                        acc.store(into.add((at + index * V::LANES) * size_of::<f32>()));
                    }
                }
                (BlockForm::Element, into) => {
                    if let Some(ranks) = ranks {
                        let ranks = V::splat(ranks);
                        acc.iter_mut().for_each(|acc| *acc = acc.divide(ranks));
                    }
                    for (index, acc) in acc.into_iter().enumerate() {
                        C::store(acc.canonical(), into.add((at + index * V::LANES) * C::BYTES));
                    }
                }
            }
        }
        at += step;
    }
    at
}

/// # Safety
/// A block from element `at` on is valid for reads.
#[inline(always)]
unsafe fn load_block<V: Vector, C: Codec<V>>((form, from): (BlockForm, *const u8), at: usize) -> [V; BLOCK] {
    // SAFETY: by contract.
    unsafe {
        match form {
            BlockForm::Element => core::array::from_fn(|index| C::load(from.add((at + index * V::LANES) * C::BYTES))),
            BlockForm::Partial => {
                core::array::from_fn(|index| V::load(from.add((at + index * V::LANES) * size_of::<f32>())))
            }
        }
    }
}

/// Functions of a vector, each an expression of intrinsics.
macro_rules! functions {
    ($(fn $name:ident($($argument:tt)*) $(-> $result:ty)? = $body:expr;)*) => {
        $(#[inline(always)]
        unsafe fn $name($($argument)*) $(-> $result)? {
            // SAFETY: the contract of `Vector`.
            unsafe { $body }
        })*
    };
}

/// AVX2 and F16C.
#[derive(Clone, Copy)]
struct Avx2(__m256);

impl Vector for Avx2 {
    const LANES: usize = 8;

    functions! {
        fn splat(value: f32) -> Self = Self(_mm256_set1_ps(value));
        fn load(from: *const u8) -> Self = Self(_mm256_loadu_ps(from.cast()));
        fn store(self, into: *mut u8) = _mm256_storeu_ps(into.cast(), self.0);
        fn add(self, other: Self) -> Self = Self(_mm256_add_ps(self.0, other.0));
        fn multiply(self, other: Self) -> Self = Self(_mm256_mul_ps(self.0, other.0));
        // The instruction returns the second operand if both are zeros or one is NaN: OR-ing the
        // results of both orders gives, of two zeros, the one with the sign, and of NaN bits a NaN.
        fn minimum(self, other: Self) -> Self = Self(_mm256_or_ps(
            _mm256_min_ps(self.0, other.0),
            _mm256_min_ps(other.0, self.0),
        ));
        fn maximum(self, other: Self) -> Self = {
            let both = _mm256_and_ps(_mm256_max_ps(self.0, other.0), _mm256_max_ps(other.0, self.0));
            let is_nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, other.0);
            Self(_mm256_blendv_ps(both, _mm256_set1_ps(f32::NAN), is_nan))
        };
        fn divide(self, by: Self) -> Self = Self(_mm256_div_ps(self.0, by.0));
        fn canonical(self) -> Self = {
            let is_nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0);
            Self(_mm256_blendv_ps(self.0, _mm256_set1_ps(f32::NAN), is_nan))
        };
        fn load_f16(from: *const u8) -> Self = Self(_mm256_cvtph_ps(_mm_loadu_si128(from.cast())));
        fn store_f16(self, into: *mut u8) =
            _mm_storeu_si128(into.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0));
        fn load_bf16(from: *const u8) -> Self = {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)))
        };
        fn store_bf16(self, into: *mut u8) = {
            let bits = _mm256_castps_si256(self.0);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let words =
                _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))));
            // Packing works per half of the register; the results of the halves are then joined.
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(words, words));
            _mm_storeu_si128(into.cast(), _mm256_castsi256_si128(packed))
        };
    }
}

/// AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
struct Avx512(__m512);

impl Vector for Avx512 {
    const LANES: usize = 16;

    functions! {
        fn splat(value: f32) -> Self = Self(_mm512_set1_ps(value));
        fn load(from: *const u8) -> Self = Self(_mm512_loadu_ps(from.cast()));
        fn store(self, into: *mut u8) = _mm512_storeu_ps(into.cast(), self.0);
        fn add(self, other: Self) -> Self = Self(_mm512_add_ps(self.0, other.0));
        fn multiply(self, other: Self) -> Self = Self(_mm512_mul_ps(self.0, other.0));
        // As of `Avx2`.
        fn minimum(self, other: Self) -> Self = Self(_mm512_or_ps(
            _mm512_min_ps(self.0, other.0),
            _mm512_min_ps(other.0, self.0),
        ));
        fn maximum(self, other: Self) -> Self = {
            let both = _mm512_and_ps(_mm512_max_ps(self.0, other.0), _mm512_max_ps(other.0, self.0));
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, other.0);
            Self(_mm512_mask_mov_ps(both, is_nan, _mm512_set1_ps(f32::NAN)))
        };
        fn divide(self, by: Self) -> Self = Self(_mm512_div_ps(self.0, by.0));
        fn canonical(self) -> Self = {
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            Self(_mm512_mask_mov_ps(self.0, is_nan, _mm512_set1_ps(f32::NAN)))
        };
        fn load_f16(from: *const u8) -> Self = Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())));
        fn store_f16(self, into: *mut u8) =
            _mm256_storeu_si256(into.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0));
        fn load_bf16(from: *const u8) -> Self = {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)))
        };
        fn store_bf16(self, into: *mut u8) = {
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let words =
                _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))));
            _mm256_storeu_si256(into.cast(), _mm512_cvtepi32_epi16(words))
        };
    }
}

macro_rules! version {
    ($module:ident, $vector:ident, $target:meta) => {
        pub(super) mod $module {
            use super::{
                Bf16, BlockForm, Codec, DataType, F16, F32, Fused, Max, Min, Operation, Prod, ReduceOp, Sum, convert,
                each, $vector,
            };

            #[$target]
            unsafe fn reduce<C: Codec<$vector>, O: Operation>(
                sources: &[(BlockForm, *const u8)],
                into: (BlockForm, *mut u8),
                elements: usize,
                ranks: Option<f32>,
            ) -> usize {
                // SAFETY: the caller's contract is the same, and this function has the instruction
                // set of the vectors.
                unsafe { super::reduce::<$vector, C, O>(sources, into, elements, ranks) }
            }

            fn of_operator<C: Codec<$vector>>(op: ReduceOp) -> Fused {
                match op {
                    ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum => reduce::<C, Sum>,
                    ReduceOp::Prod => reduce::<C, Prod>,
                    ReduceOp::Min => reduce::<C, Min>,
                    ReduceOp::Max => reduce::<C, Max>,
                }
            }

            pub(in super::super) fn fused(data: DataType, op: ReduceOp) -> Option<Fused> {
                match data {
                    DataType::F16 => Some(of_operator::<F16>(op)),
                    DataType::Bf16 => Some(of_operator::<Bf16>(op)),
                    DataType::F32 => Some(of_operator::<F32>(op)),
                    _ => None,
                }
            }

            /// Binary16 as `f32`: a [`Convert`](super::super::versions::Convert).
            pub(in super::super) unsafe fn decode_f16(from: *const u8, into: *mut u8, elements: usize) {
                // SAFETY: the caller's contract is the same. The rest begins after the processed
                // elements, in both.
                unsafe {
                    let done = reduce::<F16, Sum>(
                        &[(BlockForm::Element, from)],
                        (BlockForm::Partial, into),
                        elements,
                        None,
                    );
                    each(
                        from.cast::<u16>().add(done),
                        into.cast::<f32>().add(done),
                        elements - done,
                        convert::f16_to_f32,
                    );
                }
            }

            /// `f32` as binary16: a [`Convert`](super::super::versions::Convert).
            pub(in super::super) unsafe fn encode_f16(from: *const u8, into: *mut u8, elements: usize) {
                // SAFETY: as above.
                unsafe {
                    let done = reduce::<F16, Sum>(
                        &[(BlockForm::Partial, from)],
                        (BlockForm::Element, into),
                        elements,
                        None,
                    );
                    each(
                        from.cast::<f32>().add(done),
                        into.cast::<u16>().add(done),
                        elements - done,
                        convert::f32_to_f16,
                    );
                }
            }
        }
    };
}

version!(avx2, Avx2, target_feature(enable = "avx2,f16c"));
version!(
    avx512,
    Avx512,
    target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
);
