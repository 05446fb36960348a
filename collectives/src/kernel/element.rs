//! Rust's types as elements of collectives.

use half::{bf16, f16};

use super::float8::{F8E4M3, F8E5M2};
use crate::types::DataType;

mod sealed {
    /// Restricts [`Element`](super::Element) to types whose every bit pattern is a value.
    pub trait Sealed {}
}

/// An element type of buffers. Every bit pattern is a value of the size of [`TYPE`](Self::TYPE).
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The data type.
    const TYPE: DataType;
    /// The accumulator type of partial results.
    type Accumulator: Accumulator;
}

/// An element that is its own accumulator: the type of partial results, operators and scalars.
pub trait Accumulator: Element<Accumulator = Self> {}

macro_rules! elements {
    ($($type:ty: $name:ident, $accumulator:ty;)*) => {
        $(
            const _: () = assert!(size_of::<$type>() == DataType::$name.bytes());

            impl sealed::Sealed for $type {}

            impl Element for $type {
                const TYPE: DataType = DataType::$name;
                type Accumulator = $accumulator;
            }
        )*
    };
}

elements! {
    i8: I8, i8;
    u8: U8, u8;
    i32: I32, i32;
    u32: U32, u32;
    i64: I64, i64;
    u64: U64, u64;
    f16: F16, f32;
    bf16: Bf16, f32;
    f32: F32, f32;
    f64: F64, f64;
    F8E4M3: F8E4M3, f32;
    F8E5M2: F8E5M2, f32;
}

macro_rules! accumulators {
    ($($type:ty)*) => {
        $(
            const _: () = assert!(<$type as Element>::TYPE as u8 == <$type as Element>::TYPE.accumulator() as u8);

            impl Accumulator for $type {}
        )*
    };
}

accumulators! { i8 u8 i32 u32 i64 u64 f32 f64 }
