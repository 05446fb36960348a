//! Arithmetic of the accumulator types per element, and the loops over it. All is inlined into the
//! functions of [`versions`](super::versions), which are compiled once per instruction set.

pub(super) trait Wide: Copy {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn minimum(self, other: Self) -> Self;
    fn maximum(self, other: Self) -> Self;
    /// The average, if `self` is the sum of `ranks` numbers.
    fn divide(self, ranks: u32) -> Self;
    /// The canonical NaN without a payload, if NaN.
    fn canonical(self) -> Self;
}

macro_rules! integer {
    ($($type:ty: |$value:ident, $ranks:ident| $quotient:expr;)*) => {
        $(impl Wide for $type {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                self.max(other)
            }

            #[inline(always)]
            fn divide(self, $ranks: u32) -> Self {
                let $value = self;
                $quotient
            }

            #[inline(always)]
            fn canonical(self) -> Self {
                self
            }
        })*
    };
}

// Up to 32 bits the quotient as `f64`, which vectorises, truncates to the integer quotient: its
// fraction is zero, or further from the next integer than `f64` rounds.
integer! {
    i8: |value, ranks| (f64::from(value) / f64::from(ranks)) as i8;
    u8: |value, ranks| (f64::from(value) / f64::from(ranks)) as u8;
    i32: |value, ranks| (f64::from(value) / f64::from(ranks)) as i32;
    u32: |value, ranks| (f64::from(value) / f64::from(ranks)) as u32;
    i64: |value, ranks| value / i64::from(ranks);
    u64: |value, ranks| value / u64::from(ranks);
}

macro_rules! float {
    ($($type:ty: $sign:literal;)*) => {
        $(impl Wide for $type {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self * other
            }

            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                let first = (self < other) | ((self == other) & (self.to_bits() >> $sign != 0)) | self.is_nan();
                if first { self } else { other }
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                let first = (self > other) | ((self == other) & (self.to_bits() >> $sign == 0)) | self.is_nan();
                if first { self } else { other }
            }

            #[inline(always)]
            fn divide(self, ranks: u32) -> Self {
                self / ranks as $type
            }

            #[inline(always)]
            fn canonical(self) -> Self {
                if self.is_nan() { <$type>::NAN } else { self }
            }
        })*
    };
}

float! {
    f32: 31;
    f64: 63;
}

pub(super) trait Binary {
    fn apply<W: Wide>(a: W, b: W) -> W;
}

pub(super) trait Finish {
    fn apply<W: Wide>(value: W, ranks: u32) -> W;
}

macro_rules! unit {
    ($trait:ident: $($name:ident |$a:ident: $at:ty, $b:ident: $bt:ty| $body:expr;)*) => {
        $(pub(super) struct $name;

        impl $trait for $name {
            #[inline(always)]
            fn apply<W: Wide>($a: $at, $b: $bt) -> W {
                $body
            }
        })*
    };
}

unit! { Binary:
    Sum |a: W, b: W| a.sum(b);
    Prod |a: W, b: W| a.product(b);
    Min |a: W, b: W| a.minimum(b);
    Max |a: W, b: W| a.maximum(b);
}

unit! { Finish:
    /* A partial result. */
    Keep |value: W, _ranks: u32| value;
    Canonical |value: W, _ranks: u32| value.canonical();
    Average |value: W, ranks: u32| value.divide(ranks).canonical();
}

/// `into[i] = finish(a[i] op b[i])`.
///
/// # Safety
/// `a` and `b` are valid for reads and `into` for writes of `elements`, at any alignment; `into` is
/// `a` or `b` or overlaps neither.
#[inline(always)]
pub(super) unsafe fn pair<W: Wide, O: Binary, F: Finish>(
    a: *const W,
    b: *const W,
    into: *mut W,
    elements: usize,
    ranks: u32,
) {
    // One loop per aliasing case, so that the compiler sees that elements are independent.
    if core::ptr::eq(into, a) {
        for i in 0..elements {
            // SAFETY: `i` is less than `elements`.
            unsafe {
                into.add(i).write_unaligned(F::apply(
                    O::apply(into.add(i).read_unaligned(), b.add(i).read_unaligned()),
                    ranks,
                ))
            };
        }
    } else if core::ptr::eq(into, b) {
        for i in 0..elements {
            // SAFETY: as above.
            unsafe {
                into.add(i).write_unaligned(F::apply(
                    O::apply(a.add(i).read_unaligned(), into.add(i).read_unaligned()),
                    ranks,
                ))
            };
        }
    } else {
        for i in 0..elements {
            // SAFETY: as above.
            unsafe {
                into.add(i).write_unaligned(F::apply(
                    O::apply(a.add(i).read_unaligned(), b.add(i).read_unaligned()),
                    ranks,
                ))
            };
        }
    }
}

/// `into[i] = f(from[i])`.
///
/// # Safety
/// `from` is valid for reads and `into` for writes of `elements`, at any alignment; they are the
/// same or disjoint.
#[inline(always)]
pub(super) unsafe fn each<T: Copy, U: Copy>(from: *const T, into: *mut U, elements: usize, f: impl Fn(T) -> U) {
    // If the memories are the same, so are the element sizes, and each element is read before it is
    // written.
    if core::ptr::eq(from.cast::<U>(), into) {
        for i in 0..elements {
            // SAFETY: `i` is less than `elements`.
            unsafe { into.add(i).write_unaligned(f(into.cast::<T>().add(i).read_unaligned())) };
        }
    } else {
        for i in 0..elements {
            // SAFETY: as above.
            unsafe { into.add(i).write_unaligned(f(from.add(i).read_unaligned())) };
        }
    }
}
