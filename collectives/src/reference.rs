//! Reference results of collectives, for tests and `doorbell coll`.
//!
//! A [`Case`] defines the origin of each output element. Inputs are [derived](input_element) from a
//! seed. Reductions are compared by [`Number::agrees`]: exactly for integers, minima and maxima;
//! otherwise within an error bound that holds for any order of reduction.

use crate::kernel::{Element, F8E4M3, F8E5M2, bf16, f16};
use crate::plan::Collective;
use crate::types::{Rank, ReduceOp};

/// A collective with its counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Case {
    /// The collective.
    pub collective: Collective,
    /// The number of ranks.
    pub ranks: u32,
    /// The root, of collectives that have one.
    pub root: Rank,
    /// Elements: of the whole of all-reduce, broadcast and reduce; of each rank's part of the
    /// others; of all-to-all-v, the average of three parts.
    pub count: u64,
}

/// Origin of an output element.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// The reduction of this element of all inputs.
    Reduced(u64),
    /// This element of this rank's input.
    From(Rank, u64),
}

impl Case {
    /// Elements that `from` sends to `to`: of all-to-all-v, alternately half of the count, the
    /// count, and half more.
    #[must_use]
    pub fn part(&self, from: Rank, to: Rank) -> u64 {
        match self.collective {
            Collective::AllToAllV => match (from.0 + 2 * to.0) % 3 {
                0 => self.count - self.count / 2,
                1 => self.count,
                _ => self.count + self.count / 2,
            },
            _ => self.count,
        }
    }

    fn all(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.ranks).map(Rank)
    }

    /// Elements of `rank`'s input.
    #[must_use]
    pub fn input(&self, rank: Rank) -> u64 {
        match self.collective {
            Collective::AllReduce
            | Collective::Reduce
            | Collective::AllGather
            | Collective::Gather
            | Collective::SendRecv => self.count,
            Collective::Broadcast if rank == self.root => self.count,
            Collective::Scatter if rank == self.root => self.count * u64::from(self.ranks),
            Collective::ReduceScatter | Collective::AllToAll => self.count * u64::from(self.ranks),
            Collective::AllToAllV => self.all().map(|to| self.part(rank, to)).sum(),
            Collective::Broadcast | Collective::Scatter | Collective::Barrier => 0,
        }
    }

    /// Elements of `rank`'s output.
    #[must_use]
    pub fn output(&self, rank: Rank) -> u64 {
        match self.collective {
            Collective::AllReduce
            | Collective::Broadcast
            | Collective::ReduceScatter
            | Collective::Scatter
            | Collective::SendRecv => self.count,
            Collective::Reduce if rank == self.root => self.count,
            Collective::Gather if rank == self.root => self.count * u64::from(self.ranks),
            Collective::AllGather | Collective::AllToAll => self.count * u64::from(self.ranks),
            Collective::AllToAllV => self.all().map(|from| self.part(from, rank)).sum(),
            Collective::Reduce | Collective::Gather | Collective::Barrier => 0,
        }
    }

    /// The pieces of `rank`'s output: number of elements, and the origin of the first of them.
    #[must_use]
    pub fn pieces(&self, rank: Rank) -> Vec<(u64, Origin)> {
        let whole = |origin| vec![(self.output(rank), origin)];
        let own = u64::from(rank.0) * self.count;
        match self.collective {
            Collective::AllReduce | Collective::Reduce => whole(Origin::Reduced(0)),
            Collective::ReduceScatter => whole(Origin::Reduced(own)),
            Collective::Broadcast => whole(Origin::From(self.root, 0)),
            Collective::Scatter => whole(Origin::From(self.root, own)),
            Collective::SendRecv => whole(Origin::From(Rank((rank.0 + self.ranks - 1) % self.ranks), 0)),
            Collective::AllGather | Collective::Gather if self.output(rank) > 0 => {
                self.all().map(|from| (self.count, Origin::From(from, 0))).collect()
            }
            Collective::AllToAll => self.all().map(|from| (self.count, Origin::From(from, own))).collect(),
            Collective::AllToAllV => self
                .all()
                .map(|from| {
                    let before = self.all().take(rank.index()).map(|to| self.part(from, to)).sum();
                    (self.part(from, rank), Origin::From(from, before))
                })
                .collect(),
            Collective::AllGather | Collective::Gather | Collective::Barrier => Vec::new(),
        }
    }

    /// The number of wrong elements in `rank`'s output, for inputs derived from `seed`.
    ///
    /// # Panics
    /// When the output does not have [`output`](Self::output) elements.
    #[must_use]
    pub fn count_wrong<T: Number>(&self, op: ReduceOp, rank: Rank, seed: u64, output: &[T]) -> u64 {
        assert_eq!(output.len() as u64, self.output(rank), "the output's length");
        let mut rest = output;
        let mut wrong = 0;
        for (len, origin) in self.pieces(rank) {
            let (piece, after) = rest.split_at(len as usize);
            rest = after;
            wrong += (0..)
                .zip(piece)
                .filter(|&(index, &got)| match origin {
                    Origin::From(from, first) => !got.has_same_bits(input_element(seed, from, first + index)),
                    Origin::Reduced(first) => {
                        !got.agrees(op, self.ranks, |from| input_element(seed, Rank(from), first + index))
                    }
                })
                .count() as u64;
        }
        wrong
    }
}

/// The element of `rank`'s input at `index`.
#[must_use]
pub fn input_element<T: Number>(seed: u64, rank: Rank, index: u64) -> T {
    let mut bits = (seed ^ (u64::from(rank.0) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .wrapping_add(index.wrapping_mul(0xbf58_476d_1ce4_e5b9));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0x94d0_49bb_1331_11eb);
    T::from_random_bits(bits ^ (bits >> 31))
}

/// An element type with reference results.
pub trait Number: Element {
    /// Zero.
    const ZERO: Self;

    /// A number from random bits: any integer; for floats one of magnitude 3/4 to 5/4, so that sums
    /// and products over the tested numbers of ranks fit the smallest types.
    fn from_random_bits(bits: u64) -> Self;

    /// Bitwise equality.
    fn has_same_bits(self, other: Self) -> bool;

    /// The scalar of `rank` for [`ReduceOp::PreMulSum`].
    fn scalar(rank: Rank) -> Self::Accumulator;

    /// Whether it is the reduction of `given` over the ranks, up to rounding in any order.
    fn agrees(self, op: ReduceOp, ranks: u32, given: impl Fn(u32) -> Self) -> bool;
}

macro_rules! integers {
    ($($type:ty)*) => {
        $(
            impl Number for $type {
                const ZERO: Self = 0;

                fn from_random_bits(bits: u64) -> Self {
                    bits as Self
                }

                fn has_same_bits(self, other: Self) -> bool {
                    self == other
                }

                fn scalar(rank: Rank) -> Self {
                    (1 + rank.0 % 3) as Self
                }

                fn agrees(self, op: ReduceOp, ranks: u32, given: impl Fn(u32) -> Self) -> bool {
                    let all = (0..ranks).map(&given);
                    let sum = |all: &mut dyn Iterator<Item = Self>| all.fold(0, Self::wrapping_add);
                    self == match op {
                        ReduceOp::Sum => sum(&mut { all }),
                        ReduceOp::Prod => all.fold(1, Self::wrapping_mul),
                        ReduceOp::Min => all.fold(Self::MAX, Self::min),
                        ReduceOp::Max => all.fold(Self::MIN, Self::max),
                        ReduceOp::Avg => sum(&mut { all }).wrapping_div(ranks as Self),
                        ReduceOp::PreMulSum => {
                            sum(&mut (0..).map(Rank).zip(all).map(|(rank, value)| value.wrapping_mul(Self::scalar(rank))))
                        }
                    }
                }
            }
        )*
    };
}

integers! { i8 u8 i32 u32 i64 u64 }

/// Relative error bound of a sum or product of `terms` terms with unit roundoff `unit`, in any
/// order (Higham, *Accuracy and Stability*, 3.1): n·u / (1 − n·u).
fn gamma(terms: u32, unit: f64) -> f64 {
    let n = f64::from(terms) * unit;
    n / (1.0 - n)
}

/// Unit roundoff of elements and of partial results; and half of the least positive number.
struct Rounding {
    element: f64,
    partial: f64,
    least: f64,
}

impl Rounding {
    /// Error bound of `op` against its value in `f64`.
    fn bound(&self, op: ReduceOp, ranks: u32, exact: f64, magnitudes: f64) -> f64 {
        // One rounding per addition, and as many of the reference itself, which matter for f64.
        let sums = 2.0 * gamma(ranks, self.partial) * magnitudes;
        let partial = match op {
            ReduceOp::Min | ReduceOp::Max => return 0.0,
            ReduceOp::Sum => sums,
            ReduceOp::Prod => 2.0 * gamma(ranks, self.partial) * exact.abs(),
            ReduceOp::Avg => sums + 2.0 * self.partial * exact.abs(),
            ReduceOp::PreMulSum => {
                sums + (1.0 + gamma(ranks, self.partial)) * (self.element * magnitudes + f64::from(ranks) * self.least)
            }
        };
        partial + self.element * (exact.abs() + partial) + self.least
    }
}

macro_rules! floats {
    ($($type:ty: $accumulator:ty, $from:expr, $to:expr, $bits:expr, $partial:expr, $least:expr;)*) => {
        $(
            impl Number for $type {
                const ZERO: Self = Self::from_bits(0);

                fn from_random_bits(bits: u64) -> Self {
                    let fraction = f64::from_bits(0x3ff0_0000_0000_0000 | bits >> 12);
                    let magnitude = 0.25 + 0.5 * fraction;
                    $from(if bits & 1 == 0 { magnitude } else { -magnitude })
                }

                fn has_same_bits(self, other: Self) -> bool {
                    self.to_bits() == other.to_bits()
                }

                fn scalar(rank: Rank) -> $accumulator {
                    0.5 * (1 + rank.0 % 3) as $accumulator
                }

                fn agrees(self, op: ReduceOp, ranks: u32, given: impl Fn(u32) -> Self) -> bool {
                    const ROUNDING: Rounding = Rounding { element: exp2($bits), partial: exp2($partial), least: exp2($least) };
                    let (mut exact, mut magnitudes): (f64, f64) = match op {
                        ReduceOp::Prod => (1.0, 0.0),
                        ReduceOp::Min => (f64::INFINITY, 0.0),
                        ReduceOp::Max => (f64::NEG_INFINITY, 0.0),
                        _ => (0.0, 0.0),
                    };
                    for rank in 0..ranks {
                        let mut value: f64 = $to(given(rank));
                        match op {
                            ReduceOp::Prod => exact *= value,
                            ReduceOp::Min => exact = exact.min(value),
                            ReduceOp::Max => exact = exact.max(value),
                            ReduceOp::Sum | ReduceOp::Avg => exact += value,
                            ReduceOp::PreMulSum => {
                                value *= f64::from(Self::scalar(Rank(rank)));
                                exact += value;
                            }
                        }
                        magnitudes += value.abs();
                    }
                    if op == ReduceOp::Avg {
                        exact /= f64::from(ranks);
                        magnitudes /= f64::from(ranks);
                    }
                    // False for NaN.
                    ($to(self) - exact).abs() <= ROUNDING.bound(op, ranks, exact, magnitudes)
                }
            }
        )*
    };
}

floats! {
    f16: f32, |value: f64| f16::from_f32(value as f32), |value: f16| f64::from(value.to_f32()), -11, -24, -25;
    bf16: f32, |value: f64| bf16::from_f32(value as f32), |value: bf16| f64::from(value.to_f32()), -8, -24, -134;
    f32: f32, |value: f64| value as f32, f64::from, -24, -24, -150;
    f64: f64, |value: f64| value, |value: f64| value, -53, -53, -1022;
    F8E4M3: f32, |value: f64| F8E4M3::from_f32(value as f32), |value: F8E4M3| f64::from(value.to_f32()), -4, -24, -10;
    F8E5M2: f32, |value: f64| F8E5M2::from_f32(value as f32), |value: F8E5M2| f64::from(value.to_f32()), -3, -24, -17;
}

const fn exp2(power: i64) -> f64 {
    f64::from_bits(((1023 + power) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_errors_are_detected() {
        let case = Case {
            collective: Collective::AllReduce,
            ranks: 5,
            root: Rank(0),
            count: 100,
        };
        let sum = |index| {
            (0..5)
                .map(|rank| f64::from(input_element::<f32>(9, Rank(rank), index)))
                .sum::<f64>()
        };
        let mut sums: Vec<f32> = (0..100).map(|index| sum(index) as f32).collect();
        assert_eq!(case.count_wrong(ReduceOp::Sum, Rank(0), 9, &sums), 0);
        sums[7] += 1e-5;
        sums[8] = f32::NAN;
        assert_eq!(case.count_wrong(ReduceOp::Sum, Rank(0), 9, &sums), 2);
        assert!(
            case.count_wrong(ReduceOp::Sum, Rank(0), 8, &sums) > 90,
            "of another seed"
        );

        let sum = |index| {
            (0..5)
                .map(|rank| input_element::<i8>(9, Rank(rank), index))
                .fold(0, i8::wrapping_add)
        };
        let mut sums: Vec<i8> = (0..100).map(sum).collect();
        assert_eq!(case.count_wrong(ReduceOp::Sum, Rank(0), 9, &sums), 0);
        sums[99] = sums[99].wrapping_add(1);
        assert_eq!(case.count_wrong(ReduceOp::Sum, Rank(0), 9, &sums), 1);
    }

    #[test]
    fn error_bounds_are_a_few_roundings() {
        let off = |value: f64, op| {
            f16::from_f32(value as f32).agrees(op, 2, |rank| f16::from_f32(if rank == 0 { 1.0 } else { 0.75 }))
        };
        assert!(
            off(1.75, ReduceOp::Sum)
                && off(0.75, ReduceOp::Prod)
                && off(0.875, ReduceOp::Avg)
                && off(0.75, ReduceOp::Min)
        );
        for (value, op) in [
            (1.75 + 1.0 / 512.0, ReduceOp::Sum),
            (0.75 + 1.0 / 1024.0, ReduceOp::Prod),
            (0.875 + 1.0 / 1024.0, ReduceOp::Avg),
            (0.75 + 1.0 / 2048.0, ReduceOp::Min),
            (1.0 - 1.0 / 2048.0, ReduceOp::Max),
        ] {
            assert!(!off(value, op), "{value} {op}");
        }
        assert!(off(1.25, ReduceOp::PreMulSum) && !off(1.75, ReduceOp::PreMulSum));
    }

    #[test]
    fn all_pieces_are_the_output() {
        for &collective in Collective::ALL {
            for rank in (0..5).map(Rank) {
                let case = Case {
                    collective,
                    ranks: 5,
                    root: Rank(3),
                    count: 7,
                };
                let pieces: u64 = case.pieces(rank).iter().map(|piece| piece.0).sum();
                assert_eq!(pieces, case.output(rank), "{collective}, rank {rank}");
                for (len, origin) in case.pieces(rank) {
                    if let Origin::From(from, first) = origin {
                        assert!(first + len <= case.input(from), "{collective}: rank {rank} from {from}");
                    }
                }
            }
        }
    }
}
