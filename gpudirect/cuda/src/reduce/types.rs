//! Types, operators and scalars of reductions; they mirror those of the collectives.

use core::fmt;

/// The type of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DataType {
    /// Signed, 8 bits.
    I8,
    /// Unsigned, 8 bits.
    U8,
    /// Signed, 32 bits.
    I32,
    /// Unsigned, 32 bits.
    U32,
    /// Signed, 64 bits.
    I64,
    /// Unsigned, 64 bits.
    U64,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
    /// 8 bits: sign, 4 of exponent, 3 of fraction (OCP FP8, E4M3).
    F8E4M3,
    /// 8 bits: sign, 5 of exponent, 2 of fraction (OCP FP8, E5M2).
    F8E5M2,
}

impl DataType {
    /// All types.
    pub const ALL: [Self; 12] = [
        Self::I8,
        Self::U8,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
        Self::F8E4M3,
        Self::F8E5M2,
    ];

    /// Its name in kernels and options.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I64 => "i64",
            Self::U64 => "u64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F8E4M3 => "f8e4m3",
            Self::F8E5M2 => "f8e5m2",
        }
    }

    /// Bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// The type of partial results: `f32` for 16- and 8-bit floats, otherwise the type itself.
    #[must_use]
    pub const fn accumulator(self) -> Self {
        match self {
            Self::F16 | Self::Bf16 | Self::F8E4M3 | Self::F8E5M2 => Self::F32,
            other => other,
        }
    }

    /// Bytes per element, for an operand kind.
    #[must_use]
    pub const fn bytes_of(self, kind: OperandKind) -> usize {
        match kind {
            OperandKind::Element => self.bytes(),
            OperandKind::Partial => self.accumulator().bytes(),
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The contents of an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OperandKind {
    /// Elements.
    Element,
    /// Partial results in the [accumulator type](DataType::accumulator), not rounded or divided.
    Partial,
}

/// A reduction operator. A sum may scale each source first ([`Scalar`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operator {
    /// The sum; integers wrap.
    Sum,
    /// The product; integers wrap.
    Prod,
    /// The minimum; NaN if any operand is. −0 is less than 0.
    Min,
    /// The maximum; NaN if any operand is. −0 is less than 0.
    Max,
    /// The average: a sum divided when elements are finished; integers truncate towards zero.
    Avg {
        /// The divisor, 1 or more: the number of sources, unless some are partial results.
        ranks: u32,
    },
}

impl Operator {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg { .. } => "avg",
        }
    }
}

/// A factor for a source's elements, in their [accumulator type](DataType::accumulator).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scalar {
    data_type: DataType,
    bits: u64,
}

impl Scalar {
    /// Its type.
    #[must_use]
    pub const fn data_type(self) -> DataType {
        self.data_type
    }

    /// Its bits; types of less than 8 bytes use the lowest.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.bits
    }

    pub(super) fn one(data: DataType) -> Self {
        match data.accumulator() {
            DataType::F32 => 1f32.into(),
            DataType::F64 => 1f64.into(),
            data_type => Self { data_type, bits: 1 },
        }
    }
}

macro_rules! scalars {
    ($($type:ty: $name:ident, |$value:ident| $bits:expr;)*) => {
        $(impl From<$type> for Scalar {
            fn from($value: $type) -> Self {
                Self { data_type: DataType::$name, bits: $bits }
            }
        })*
    };
}

// 8-bit integers are sign-extended, as their kernels accumulate in 32 bits.
scalars! {
    i8: I8, |value| u64::from(i32::from(value) as u32);
    u8: U8, |value| value.into();
    i32: I32, |value| u64::from(value as u32);
    u32: U32, |value| value.into();
    i64: I64, |value| value as u64;
    u64: U64, |value| value;
    f32: F32, |value| value.to_bits().into();
    f64: F64, |value| value.to_bits();
}
