//! Reduction kernels: element types, operators, and the loops that reduce memory.
//!
//! Nothing here allocates, locks or makes a system call. [`lines`] is the data layout of LL and
//! LL128.
//!
//! Guarantees for results:
//!
//! - Sources are reduced in the given order, ((s₀ ⊕ s₁) ⊕ s₂) …, in the accumulator type
//!   ([`DataType::accumulator`](crate::DataType::accumulator)): `f32` for the floats of 16 and 8
//!   bits. Elements are rounded once, when they are stored; partial results are not rounded.
//! - The same bits for every instruction set, alignment and number of elements. No multiplication
//!   is fused with an addition.
//! - Integers wrap. `Avg` divides the sum when elements are stored: integers truncate towards zero.
//! - `Min` and `Max` of floats are minimum and maximum of IEEE 754-2019: a NaN operand gives NaN,
//!   and −0 is less than +0. C's `fmin` would hide a rank with invalid numbers.
//! - NaNs of elements are the one quiet NaN without a sign; in partial results payloads and signs
//!   are unspecified. Results of user-defined operators are canonicalised only for 16 and 8 bits.
//! - Denormals may be flushed to zero, by the caller's processor mode.

mod arithmetic;
mod convert;
mod element;
mod float8;
mod function;
#[cfg(target_arch = "x86_64")]
mod fused;
pub mod lines;
mod operator;
#[cfg(test)]
pub(crate) mod tests;
mod versions;

pub(crate) use convert::magnitude_to_f8e4m3;
pub use element::{Accumulator, Element};
pub use float8::{F8E4M3, F8E5M2};
pub use function::Function;
pub use half::{bf16, f16};
pub use operator::{Op, Scalar, TypeMismatch, UserOperator};
pub(crate) use versions::{Version, versioned};
