//! Cost per byte by size: of messages, and of operations, whose data fits a cache or not.

use serde::{Deserialize, Serialize};

/// Sizes at which scales have values. Up to [`NEAR`] they are message sizes, in small operations;
/// above, operation sizes, with long messages.
pub const MARKS: [u64; 11] = [
    64,
    512,
    4 << 10,
    16 << 10,
    32 << 10,
    128 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
    4 << 20,
    16 << 20,
];

/// Size of a processor's nearest cache: up to this size an operation's bytes cost the same.
pub const NEAR: u64 = MARKS[5];

/// ns per byte at the [`MARKS`].
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Scale([f64; MARKS.len()]);

impl Scale {
    /// From measurements at some of the marks: (mark, ns per byte). Other marks have the value of
    /// the next lower or, without one, higher measurement. `None` without a measurement.
    #[must_use]
    pub fn of(measured: &[(u64, f64)]) -> Option<Self> {
        let mut last = measured.iter().min_by_key(|(mark, _)| *mark)?.1.max(0.0);
        Some(Self(MARKS.map(|mark| {
            if let Some((_, rate)) = measured.iter().find(|(at, _)| *at == mark) {
                last = rate.max(0.0);
            }
            last
        })))
    }

    /// ns per byte of a message of so many bytes, in an operation with so many per rank.
    #[must_use]
    pub fn ns_per_byte(&self, message: f64, whole: f64) -> f64 {
        let near = NEAR as f64;
        let farther = (self.at(whole.max(message).max(near)) - self.at(near)).max(0.0);
        self.at(message.min(near)) + farther
    }

    /// ns per byte at a size: the total time is interpolated linearly between marks.
    fn at(&self, bytes: f64) -> f64 {
        let at = &self.0;
        let Some(above) = MARKS.iter().position(|&mark| bytes <= mark as f64) else {
            return at[MARKS.len() - 1];
        };
        let Some(below) = above.checked_sub(1) else {
            return at[0];
        };
        let (low, high) = (MARKS[below] as f64, MARKS[above] as f64);
        let (first, last) = (low * at[below], high * at[above]);
        // Of two weights, so that no rounding makes it negative beside a rate of zero.
        let weight = (bytes - low) / (high - low);
        (first * (1.0 - weight) + last * weight) / bytes
    }

    /// The part of these costs that exceeds others.
    pub(crate) fn above(&self, others: &Self) -> Self {
        let mut above = self.0;
        above
            .iter_mut()
            .zip(others.0)
            .for_each(|(rate, other)| *rate = (*rate - other).max(0.0));
        Self(above)
    }

    pub(crate) fn marks(&self) -> impl Iterator<Item = (u64, f64)> + use<> {
        MARKS.into_iter().zip(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_is_what_was_measured_and_lines_between() {
        assert_eq!(Scale::of(&[]), None);
        let scale = Scale::of(&[(512, 0.5), (4 << 10, 0.25)]).unwrap();
        for (bytes, rate) in [(8.0, 0.5), (512.0, 0.5), (4096.0, 0.25), (1e9, 0.25)] {
            assert!((scale.at(bytes) - rate).abs() < 1e-12, "{bytes}");
        }
        let between = (256.0 + 1024.0) / 2.0;
        assert!((scale.at(2304.0) * 2304.0 - between).abs() < 1e-9);
        assert_eq!(Scale::of(&[(64, -1.0)]).unwrap().at(64.0), 0.0);
    }

    #[test]
    fn no_cost_is_negative_beside_a_rate_of_zero() {
        let scale = Scale::of(&[(512, 0.7), (4 << 10, 0.0)]).unwrap();
        for bytes in (1..=4 << 10).map(f64::from) {
            assert!(scale.at(bytes) >= 0.0, "{bytes}: {}", scale.at(bytes));
        }
    }

    #[test]
    fn an_operation_that_has_more_than_caches_hold_adds_to_what_its_messages_cost() {
        let scale = Scale::of(&[(4 << 10, 0.2), (NEAR, 0.05), (2 << 20, 0.06), (16 << 20, 0.1)]).unwrap();
        for (message, whole, rate) in [
            (4096.0, 4096.0, 0.2),
            (4096.0, 1e5, 0.2),
            (4096.0, 64e6, 0.25),
            (1e6, 64e6, 0.1),
            (64e6, 0.0, 0.1),
        ] {
            assert!(
                (scale.ns_per_byte(message, whole) - rate).abs() < 1e-9,
                "{message} of {whole}"
            );
        }
    }
}
