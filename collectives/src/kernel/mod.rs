//! The arithmetic of reductions: types of elements, operators, and the loops that reduce one memory into another.
//!
//! The executor holds a [`Function`] for each operation, chosen once for a data type, an operator and the instruction sets of the machine, and calls [`Function::reduce`] with raw memory: nothing here
//! allocates, locks or makes a system call. [`lines`] is how the protocols LL and LL128 lay data out between flags.
//!
//! What is promised of results:
//!
//! - Sources are reduced in the order given, ((s₀ ⊕ s₁) ⊕ s₂) …, in the type that accumulates ([`DataType::accumulator`](crate::DataType::accumulator)): `f32` for the floats of 16 and 8 bits. Elements are
//!   rounded once, when they are stored; partial results are not rounded at all.
//! - The same bits from every instruction set, and whatever the alignment and the number of elements are. No multiplication is fused with an addition.
//! - Integers wrap. `Avg` divides the sum by the number of ranks when elements are stored: integers truncate towards zero, floats are divided in the type that accumulates.
//! - `Min` and `Max` of floats are minimum and maximum of IEEE 754-2019: a NaN among the operands is the result, and −0 is less than +0. With C's `fmin`, which leaves NaNs out, a rank whose numbers went wrong would hide.
//! - NaN has no payload: elements are stored with the one quiet NaN that has no sign. In partial results payloads and signs of NaNs are unspecified. Of an operator of the user's, only NaNs of 16 and 8 bits are made so.
//! - The processor's mode is the caller's: with denormals flushed to zero (as `-ffast-math` switches on), they are.

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
mod tests;
mod versions;

pub use element::{Accumulator, Element};
pub use float8::{F8E4M3, F8E5M2};
pub use function::Function;
pub use half::{bf16, f16};
pub use operator::{Op, Scalar, Unfit, UserOperator};
