//! The loops, compiled for several instruction sets, with run-time dispatch: on x86-64 SSE2
//! (baseline), AVX2 with F16C, and AVX-512 (F, BW, DQ, VL); elsewhere the build's target. Only the
//! conversions of binary16 are the processor's, with the same rounding.

use super::arithmetic::{Average, Binary, Canonical, Finish, Keep, Max, Min, Prod, Sum, Wide, each, pair};
use super::convert;
#[cfg(target_arch = "x86_64")]
use super::fused;
use crate::plan::BlockForm;
use crate::types::{DataType, ReduceOp};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Version {
    Baseline,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Version {
    /// Those that this machine supports, the best last.
    pub(crate) fn available() -> impl DoubleEndedIterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let all = {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            [
                Some(Self::Baseline),
                avx2.then_some(Self::Avx2),
                avx512.then_some(Self::Avx512),
            ]
        };
        #[cfg(not(target_arch = "x86_64"))]
        let all = [Some(Self::Baseline)];
        all.into_iter().flatten()
    }

    pub(crate) fn best() -> Self {
        Self::available().next_back().unwrap_or(Self::Baseline)
    }

    pub(crate) fn is_available(self) -> bool {
        Self::available().any(|version| version == self)
    }
}

/// Defines a function that calls an `#[inline(always)]` one, compiled for the version that is its
/// first argument, and panics where the processor lacks it. The results have the same bits, as no
/// multiplication is fused with an addition.
macro_rules! versioned {
    ($(#[$meta:meta])* $visibility:vis fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? = $function:ident) => {
        $(#[$meta])*
        $visibility fn $name(version: $crate::kernel::Version, $($argument: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c")]
            fn avx2($($argument: $type),*) $(-> $result)? {
                $function($($argument),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512($($argument: $type),*) $(-> $result)? {
                $function($($argument),*)
            }
            assert!(version.is_available(), "{version:?} on this processor");
            match version {
                $crate::kernel::Version::Baseline => $function($($argument),*),
                // SAFETY: the processor has these instructions, as asserted.
                #[cfg(target_arch = "x86_64")]
                $crate::kernel::Version::Avx2 => unsafe { avx2($($argument),*) },
                // SAFETY: the same.
                #[cfg(target_arch = "x86_64")]
                $crate::kernel::Version::Avx512 => unsafe { avx512($($argument),*) },
            }
        }
    };
}
pub(crate) use versioned;

/// `into[i] = finish(a[i] op b[i])` of the accumulator type: a, b, into, elements, ranks.
///
/// Safe to call where [`pair`]'s contract holds and the machine supports the version.
pub(super) type Pair = unsafe fn(*const u8, *const u8, *mut u8, usize, u32);
/// `into[i] = finish(from[i])` of the accumulator type: from, into, elements, ranks. Safety: as
/// [`each`], and as for [`Pair`].
pub(super) type Single = unsafe fn(*const u8, *mut u8, usize, u32);
/// `into[i] = from[i] × scalar` of the accumulator type: from, into, elements, the scalar's
/// address. Safety: as [`each`], and as for [`Pair`]; the scalar is of that type.
pub(super) type Scale = unsafe fn(*const u8, *mut u8, usize, *const u8);
/// Elements as `f32` or back: from, into, elements. Safety: as [`each`], and as for [`Pair`].
pub(super) type Convert = unsafe fn(*const u8, *mut u8, usize);

/// Reduces `sources` into `into`, divided by the number of ranks if given and elements are stored.
/// Returns how many of the elements were processed, from the first on.
///
/// Safe to call where the contract of [`Function::reduce`](super::Function::reduce) holds, there is
/// a source, and the machine supports the version.
pub(super) type Fused = unsafe fn(
    sources: &[(BlockForm, *const u8)],
    into: (BlockForm, *mut u8),
    elements: usize,
    ranks: Option<f32>,
) -> usize;

#[derive(Clone, Copy)]
pub(super) struct Loops {
    pub(super) accumulate: Pair,
    pub(super) finish: Pair,
    pub(super) single: Single,
    pub(super) scale: Scale,
}

/// The conversions of a type whose accumulator is `f32`, for one instruction set.
#[derive(Clone, Copy)]
pub(super) struct Narrow {
    pub(super) decode: Convert,
    /// From `f32`, rounding.
    pub(super) encode: Convert,
}

macro_rules! version {
    ($module:ident, $(#[$target:meta])?) => {
        mod $module {
            use super::*;

            $(#[$target])?
            unsafe fn pair_<W: Wide, O: Binary, F: Finish>(a: *const u8, b: *const u8, into: *mut u8, elements: usize, ranks: u32) {
                // SAFETY: the caller's contract is the same.
                unsafe { pair::<W, O, F>(a.cast(), b.cast(), into.cast(), elements, ranks) }
            }

            $(#[$target])?
            unsafe fn single<W: Wide, F: Finish>(from: *const u8, into: *mut u8, elements: usize, ranks: u32) {
                // SAFETY: the caller's contract is the same.
                unsafe { each(from.cast::<W>(), into.cast::<W>(), elements, |value| F::apply(value, ranks)) }
            }

            $(#[$target])?
            unsafe fn scale<W: Wide>(from: *const u8, into: *mut u8, elements: usize, scalar: *const u8) {
                // SAFETY: the caller's contract is the same; the scalar is of the type `W`.
                unsafe {
                    let scalar = scalar.cast::<W>().read_unaligned();
                    each(from.cast::<W>(), into.cast::<W>(), elements, |value| value.product(scalar));
                }
            }

            fn loops_of<W: Wide>(op: ReduceOp) -> Loops {
                fn with<W: Wide, O: Binary, F: Finish>() -> Loops {
                    Loops { accumulate: pair_::<W, O, Keep>, finish: pair_::<W, O, F>, single: single::<W, F>, scale: scale::<W> }
                }
                match op {
                    ReduceOp::Sum | ReduceOp::PreMulSum => with::<W, Sum, Canonical>(),
                    ReduceOp::Prod => with::<W, Prod, Canonical>(),
                    ReduceOp::Min => with::<W, Min, Canonical>(),
                    ReduceOp::Max => with::<W, Max, Canonical>(),
                    ReduceOp::Avg => with::<W, Sum, Average>(),
                }
            }

            pub(super) fn loops(data: DataType, op: ReduceOp) -> Loops {
                match data.accumulator() {
                    DataType::I8 => loops_of::<i8>(op),
                    DataType::U8 => loops_of::<u8>(op),
                    DataType::I32 => loops_of::<i32>(op),
                    DataType::U32 => loops_of::<u32>(op),
                    DataType::I64 => loops_of::<i64>(op),
                    DataType::U64 => loops_of::<u64>(op),
                    DataType::F64 => loops_of::<f64>(op),
                    _ => loops_of::<f32>(op),
                }
            }

            version!(@convert $(#[$target])? decode_bf16: u16, f32, convert::bf16_to_f32);
            version!(@convert $(#[$target])? encode_bf16: f32, u16, convert::f32_to_bf16);
            version!(@convert $(#[$target])? decode_f16: u16, f32, convert::f16_to_f32);
            version!(@convert $(#[$target])? encode_f16: f32, u16, convert::f32_to_f16);
            version!(@convert $(#[$target])? decode_f8e4m3: u8, f32, convert::f8e4m3_to_f32);
            version!(@convert $(#[$target])? encode_f8e4m3: f32, u8, convert::f32_to_f8e4m3);
            version!(@convert $(#[$target])? decode_f8e5m2: u8, f32, convert::f8e5m2_to_f32);
            version!(@convert $(#[$target])? encode_f8e5m2: f32, u8, convert::f32_to_f8e5m2);

            pub(super) fn narrow(data: DataType) -> Option<Narrow> {
                match data {
                    DataType::F16 => Some(Narrow { decode: decode_f16, encode: encode_f16 }),
                    DataType::Bf16 => Some(Narrow { decode: decode_bf16, encode: encode_bf16 }),
                    DataType::F8E4M3 => Some(Narrow { decode: decode_f8e4m3, encode: encode_f8e4m3 }),
                    DataType::F8E5M2 => Some(Narrow { decode: decode_f8e5m2, encode: encode_f8e5m2 }),
                    _ => None,
                }
            }
        }
    };
    (@convert $(#[$target:meta])? $name:ident: $from:ty, $into:ty, $with:path) => {
        $(#[$target])?
        unsafe fn $name(from: *const u8, into: *mut u8, elements: usize) {
            // SAFETY: the caller's contract is the same.
            unsafe { each(from.cast::<$from>(), into.cast::<$into>(), elements, |value| $with(value)) }
        }
    };
}

version!(baseline,);
#[cfg(target_arch = "x86_64")]
version!(avx2, #[target_feature(enable = "avx2,f16c")]);
#[cfg(target_arch = "x86_64")]
version!(avx512, #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]);

impl Version {
    pub(super) fn loops(self, data: DataType, op: ReduceOp) -> Loops {
        match self {
            Self::Baseline => baseline::loops(data, op),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::loops(data, op),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::loops(data, op),
        }
    }

    /// The conversions of `data`, if its accumulator is another type.
    pub(super) fn narrow(self, data: DataType) -> Option<Narrow> {
        match (self, data) {
            (Self::Baseline, _) => baseline::narrow(data),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx2, DataType::F16) => Some(Narrow {
                decode: fused::avx2::decode_f16,
                encode: fused::avx2::encode_f16,
            }),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx2, _) => avx2::narrow(data),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512, DataType::F16) => Some(Narrow {
                decode: fused::avx512::decode_f16,
                encode: fused::avx512::encode_f16,
            }),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512, _) => avx512::narrow(data),
        }
    }

    /// The reduction of `data` by `op` in one pass, where there is one: on x86-64.
    pub(super) fn fused(self, data: DataType, op: ReduceOp) -> Option<Fused> {
        match (self, data, op) {
            (Self::Baseline, ..) => None,
            #[cfg(target_arch = "x86_64")]
            (Self::Avx2, ..) => fused::avx2::fused(data, op),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx512, ..) => fused::avx512::fused(data, op),
        }
    }
}
