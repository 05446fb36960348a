//! Floats of 8 bits, as the OCP's FP8 specification (OFP8, revision 1.0) defines them.

use core::{cmp::Ordering, fmt};

use super::convert;

macro_rules! float8 {
    ($(#[$meta:meta])* $type:ident, $from:ident, $to:ident) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Default)]
        #[repr(transparent)]
        pub struct $type(u8);

        impl $type {
            /// The number with these bits.
            #[must_use]
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// Its bits.
            #[must_use]
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// The nearest number, ties to even; larger magnitudes saturate. NaN stays NaN.
            #[must_use]
            #[inline]
            pub fn from_f32(value: f32) -> Self {
                Self(convert::$from(value))
            }

            /// The same value.
            #[must_use]
            pub fn to_f32(self) -> f32 {
                convert::$to(self.0)
            }
        }

        impl From<$type> for f32 {
            fn from(value: $type) -> Self {
                value.to_f32()
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.to_f32(), f)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.to_f32(), f)
            }
        }

        impl PartialEq for $type {
            fn eq(&self, other: &Self) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $type {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }
    };
}

float8! {
    /// Sign, 4 bits of exponent, 3 of fraction: up to 448, no infinity, one NaN of each sign.
    F8E4M3, f32_to_f8e4m3, f8e4m3_to_f32
}

float8! {
    /// Sign, 5 bits of exponent, 2 of fraction: up to 57344, infinities, NaNs.
    F8E5M2, f32_to_f8e5m2, f8e5m2_to_f32
}
