//! Welch's t-test: the confidence interval of the difference of two means.

use crate::stats::student_t_quantile;

#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Interval {
    pub(super) means: (f64, f64),
    /// Lower bound of the second mean less the first.
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Interval {
    /// The interval of the second mean less the first; none unless both samples have at least two
    /// values.
    pub(super) fn of_difference(first: &[f64], second: &[f64], confidence: f64) -> Option<Interval> {
        let (a, b) = (Sample::of(first)?, Sample::of(second)?);
        let difference = b.mean - a.mean;
        let means = (a.mean, b.mean);
        let squared = a.error_squared + b.error_squared;
        if squared <= 0.0 {
            // Both samples have zero variance.
            return Some(Interval {
                means,
                low: difference,
                high: difference,
            });
        }
        // The Welch-Satterthwaite equation.
        let freedom = squared * squared
            / (a.error_squared * a.error_squared / (a.count - 1.0)
                + b.error_squared * b.error_squared / (b.count - 1.0));
        let half = student_t_quantile(0.5 + confidence / 2.0, freedom) * squared.sqrt();
        Some(Interval {
            means,
            low: difference - half,
            high: difference + half,
        })
    }
}

struct Sample {
    count: f64,
    mean: f64,
    /// The square of the standard error of the mean.
    error_squared: f64,
}

impl Sample {
    fn of(values: &[f64]) -> Option<Sample> {
        if values.len() < 2 {
            return None;
        }
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
        Some(Sample {
            count,
            mean,
            error_squared: variance / count,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Two samples of unequal size and variance; t and the degrees of freedom computed by hand, the
    /// quantile from printed tables.
    #[test]
    fn a_known_example() {
        // Means 10 and 14, variances 4 and 1, counts 4 and 9: the error is sqrt(4/4 + 1/9) =
        // 1.0541, the degrees of freedom (10/9)^2 / (1/3 + (1/9)^2/8) = 3.6866.
        let first = [8.0, 9.0, 11.0, 12.0].map(|v: f64| 10.0 + (v - 10.0) * (4.0f64 / (10.0 / 3.0)).sqrt());
        let second: Vec<f64> = (-4..=4).map(|v| 14.0 + f64::from(v) * (1.0f64 / 7.5).sqrt()).collect();
        let interval = Interval::of_difference(&first, &second, 0.95).unwrap();
        assert!((interval.means.0 - 10.0).abs() < 1e-9 && (interval.means.1 - 14.0).abs() < 1e-9);
        let half = (interval.high - interval.low) / 2.0;
        // Tables: t(0.975) is 3.1824 at 3 degrees of freedom and 2.7764 at 4.
        let t = half / (10.0f64 / 9.0).sqrt();
        assert!((2.7764..3.1824).contains(&t), "{t}");
    }

    #[test]
    fn quantiles_are_those_of_printed_tables() {
        // Two samples of the same size and variance have 2 (n - 1) degrees of freedom.
        for (count, confidence, quantile) in [
            (2, 0.95, 4.3027),
            (3, 0.95, 2.7764),
            (6, 0.95, 2.2281),
            (3, 0.99, 4.6041),
            (11, 0.90, 1.7247),
        ] {
            let sample: Vec<f64> = (0..count).map(f64::from).collect();
            let interval = Interval::of_difference(&sample, &sample, confidence).unwrap();
            let count = f64::from(count);
            let mean = (count - 1.0) / 2.0;
            let variance = (0..count as i32).map(|v| (f64::from(v) - mean).powi(2)).sum::<f64>() / (count - 1.0);
            let t = interval.high / (2.0 * variance / count).sqrt();
            assert!((t - quantile).abs() < 5e-4, "{count} {confidence}: {t}");
        }
    }

    #[test]
    fn one_value_has_no_noise_and_equal_ones_have_none() {
        assert_eq!(Interval::of_difference(&[1.0], &[1.0, 2.0], 0.95), None);
        assert_eq!(Interval::of_difference(&[], &[], 0.95), None);
        let exact = Interval::of_difference(&[1.0, 1.0], &[3.0, 3.0], 0.95).unwrap();
        assert_eq!((exact.low, exact.high), (2.0, 2.0));
    }

    proptest! {
        #[test]
        fn the_interval_holds_the_difference_and_mirrors(
            first in prop::collection::vec(1.0f64..1e12, 2..8),
            second in prop::collection::vec(1.0f64..1e12, 2..8),
        ) {
            let there = Interval::of_difference(&first, &second, 0.95).unwrap();
            let back = Interval::of_difference(&second, &first, 0.95).unwrap();
            let difference = there.means.1 - there.means.0;
            prop_assert!(there.low <= difference && difference <= there.high);
            let scale = there.high.abs().max(there.low.abs()).max(1.0);
            prop_assert!((there.low + back.high).abs() / scale < 1e-6 && (there.high + back.low).abs() / scale < 1e-6);
        }
    }
}
