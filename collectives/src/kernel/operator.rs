//! Operators of reductions: built-in and user-defined.

use std::sync::Arc;

use super::element::Accumulator;
use crate::types::{DataType, ReduceOp};

/// An operator.
#[derive(Clone, Debug)]
pub enum Op {
    /// A built-in operator.
    Builtin(ReduceOp),
    /// A user-defined operator.
    User(UserOperator),
}

impl Op {
    /// Its name, for results and errors.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Builtin(op) => op.name(),
            Self::User(op) => op.name(),
        }
    }
}

impl From<ReduceOp> for Op {
    fn from(op: ReduceOp) -> Self {
        Self::Builtin(op)
    }
}

impl From<UserOperator> for Op {
    fn from(op: UserOperator) -> Self {
        Self::User(op)
    }
}

/// Combines `elements` at the second pointer into those at the first.
type Combine = dyn Fn(*mut u8, *const u8, usize) + Send + Sync;

/// A user-defined operator: a function of two slices that combines each element of the second into
/// that of the first.
///
/// It is over the accumulator type: `f32` for the floats of 16 and 8 bits, rounded once.
///
/// ```
/// # use doorbell_collectives::kernel::UserOperator;
/// let bits = UserOperator::new("or", |into: &mut [u64], from: &[u64]| into.iter_mut().zip(from).for_each(|(a, b)| *a |= b));
/// ```
#[doc(alias = "MPI_Op_create")]
#[derive(Clone)]
pub struct UserOperator {
    name: Arc<str>,
    over: DataType,
    combine: Arc<Combine>,
}

impl UserOperator {
    /// The operator that `combine` computes. Both slices have one length, which varies between
    /// calls and is unrelated to the operation's; neither is memory of the operation itself.
    ///
    /// `combine` must be associative (but for rounding) and commutative, and treat each element
    /// alike: algorithms differ in order and cuts. A panic in it propagates to the thread that
    /// drives the operation.
    pub fn new<A: Accumulator>(name: &str, combine: impl Fn(&mut [A], &[A]) + Send + Sync + 'static) -> Self {
        let combine = move |into: *mut u8, from: *const u8, elements: usize| {
            // SAFETY: `combine` below is called with two tiles, aligned for every element and of at
            // least `elements` initialised elements of `A`, as `over` was compared with their type.
            let (into, from) = unsafe {
                (
                    core::slice::from_raw_parts_mut(into.cast::<A>(), elements),
                    core::slice::from_raw_parts(from.cast::<A>(), elements),
                )
            };
            combine(into, from);
        };
        Self {
            name: name.into(),
            over: A::TYPE,
            combine: Arc::new(combine),
        }
    }

    /// Its name, for results and errors.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The accumulator type that it combines.
    #[must_use]
    pub fn over(&self) -> DataType {
        self.over
    }

    /// # Safety
    /// Both are aligned for the operator's type, hold that many elements of it, are disjoint, and
    /// not accessed by others meanwhile.
    pub(super) unsafe fn combine(&self, into: *mut u8, from: *const u8, elements: usize) {
        (self.combine)(into, from, elements);
    }
}

debug_fields!(UserOperator, self, name = self.name, over = self.over);

/// The scalar of [`ReduceOp::PreMulSum`], in the accumulator type.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Scalar {
    over: DataType,
    bits: u64,
}

impl Scalar {
    /// `value` as a scalar.
    #[must_use]
    pub fn of<A: Accumulator>(value: A) -> Self {
        let mut bits = 0;
        // SAFETY: `A` is at most eight bytes long (its type is one of `DataType`'s), and has no
        // padding.
        unsafe { core::ptr::from_mut(&mut bits).cast::<A>().write(value) };
        Self { over: A::TYPE, bits }
    }

    /// Its type.
    #[must_use]
    pub fn over(self) -> DataType {
        self.over
    }

    #[cfg(feature = "gpu")]
    pub(crate) fn bits(self) -> u64 {
        let bits = u64::from_le_bytes(self.bits.to_ne_bytes());
        match self.over.bytes() {
            8 => self.bits,
            bytes => bits & ((1 << (8 * bytes)) - 1),
        }
    }

    pub(super) fn address(&self) -> *const u8 {
        core::ptr::from_ref(&self.bits).cast()
    }
}

/// An operator or a scalar has another type than the data requires.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what} is over {over}, but {data} accumulates in {}: make it over that type", data.accumulator())]
pub struct TypeMismatch {
    /// The operator's name, or "the scalar".
    pub what: String,
    /// The type that it is over.
    pub over: DataType,
    /// The elements' type.
    pub data: DataType,
}
