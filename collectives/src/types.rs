//! Common types: ranks, data types, operators, protocols.

use core::fmt;

/// A rank of a communicator, counted from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize)]
pub struct Rank(pub u32);

impl Rank {
    /// The rank as a table index.
    #[inline]
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A name that is not one of an enum's values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no {what} {name:?}: one of {known}")]
pub struct UnknownName {
    /// The kind of name.
    pub what: &'static str,
    /// The given name.
    pub name: String,
    /// The valid names.
    pub known: String,
}

/// An enum whose values have names in options and output, and for serde.
macro_rules! named {
    ($(#[$meta:meta])* $type:ident, $what:literal { $($(#[$doc:meta])* $variant:ident = $name:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum $type {
            $($(#[$doc])* $variant,)*
        }

        impl $type {
            /// All values.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The name in options and output.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }

        impl core::fmt::Display for $type {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.pad(self.name())
            }
        }

        impl core::str::FromStr for $type {
            type Err = $crate::UnknownName;

            fn from_str(name: &str) -> Result<Self, $crate::UnknownName> {
                Self::ALL.iter().copied().find(|value| value.name() == name).ok_or_else(|| $crate::UnknownName {
                    what: $what,
                    name: name.to_owned(),
                    known: Self::ALL.iter().map(|value| value.name()).collect::<Vec<_>>().join(", "),
                })
            }
        }

        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let name = <String as serde::Deserialize>::deserialize(deserializer)?;
                name.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}
pub(crate) use named;

named! {
    /// The type of an element.
    #[doc(alias("ncclDataType_t", "MPI_Datatype"))]
    DataType, "data type" {
        /// Signed, 8 bits.
        #[doc(alias("ncclInt8", "ncclChar", "MPI_INT8_T"))]
        I8 = "i8",
        /// Unsigned, 8 bits.
        #[doc(alias("ncclUint8", "MPI_UINT8_T"))]
        U8 = "u8",
        /// Signed, 32 bits.
        #[doc(alias("ncclInt32", "ncclInt", "MPI_INT32_T"))]
        I32 = "i32",
        /// Unsigned, 32 bits.
        #[doc(alias("ncclUint32", "MPI_UINT32_T"))]
        U32 = "u32",
        /// Signed, 64 bits.
        #[doc(alias("ncclInt64", "MPI_INT64_T"))]
        I64 = "i64",
        /// Unsigned, 64 bits.
        #[doc(alias("ncclUint64", "MPI_UINT64_T"))]
        U64 = "u64",
        /// IEEE 754 binary16.
        #[doc(alias("ncclFloat16", "ncclHalf"))]
        F16 = "f16",
        /// bfloat16: the upper half of a binary32.
        #[doc(alias = "ncclBfloat16")]
        Bf16 = "bf16",
        /// IEEE 754 binary32.
        #[doc(alias("ncclFloat32", "ncclFloat", "MPI_FLOAT"))]
        F32 = "f32",
        /// IEEE 754 binary64.
        #[doc(alias("ncclFloat64", "ncclDouble", "MPI_DOUBLE"))]
        F64 = "f64",
        /// 8 bits: sign, 4 of exponent, 3 of mantissa (OCP FP8, E4M3): no infinity, one NaN.
        #[doc(alias = "ncclFloat8e4m3")]
        F8E4M3 = "f8e4m3",
        /// 8 bits: sign, 5 of exponent, 2 of mantissa (OCP FP8, E5M2).
        #[doc(alias = "ncclFloat8e5m2")]
        F8E5M2 = "f8e5m2",
    }
}

impl DataType {
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

    /// The accumulator type of partial results: `f32` for floats of 16 and 8 bits, else itself.
    #[must_use]
    pub const fn accumulator(self) -> Self {
        match self {
            Self::F16 | Self::Bf16 | Self::F8E4M3 | Self::F8E5M2 => Self::F32,
            other => other,
        }
    }
}

named! {
    /// A reduction operator. All are associative but for rounding, and commutative.
    #[doc(alias("ncclRedOp_t", "MPI_Op"))]
    ReduceOp, "operator" {
        /// The sum; integers wrap.
        #[doc(alias("ncclSum", "MPI_SUM"))]
        Sum = "sum",
        /// The product; integers wrap.
        #[doc(alias("ncclProd", "MPI_PROD"))]
        Prod = "prod",
        /// The minimum.
        #[doc(alias("ncclMin", "MPI_MIN"))]
        Min = "min",
        /// The maximum.
        #[doc(alias("ncclMax", "MPI_MAX"))]
        Max = "max",
        /// The sum, divided by the number of ranks; integers truncate towards zero.
        #[doc(alias = "ncclAvg")]
        Avg = "avg",
        /// The sum of the contributions, each multiplied by its rank's scalar.
        #[doc(alias = "ncclRedOpCreatePreMulSum")]
        PreMulSum = "premulsum",
    }
}

named! {
    /// The protocol of a message, as in NCCL.
    #[doc(alias = "NCCL_PROTO")]
    Protocol, "protocol" {
        /// Rendezvous: a WRITE to granted memory, then a sequence number. Short messages are eager.
        #[doc(alias = "NCCL_PROTO_SIMPLE")]
        Simple = "simple",
        /// Low latency: words of 4 bytes of data and 4 of flag; no grant, half of the bandwidth.
        #[doc(alias = "NCCL_PROTO_LL")]
        Ll = "ll",
        /// Lines of 120 bytes of data and 8 of flag: as LL, with 15/16 of the bandwidth.
        #[doc(alias = "NCCL_PROTO_LL128")]
        Ll128 = "ll128",
    }
}
