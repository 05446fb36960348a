//! Welch's t-test: the confidence interval of the difference of two means.

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

/// The quantile of Student's t distribution for a probability of at least one half, by bisection.
fn student_t_quantile(probability: f64, freedom: f64) -> f64 {
    // P(|T| > t) is I_x(freedom/2, 1/2) with x = freedom / (freedom + t^2) (Abramowitz and Stegun
    // 26.7.1), which grows with x.
    let tail = 2.0 * (1.0 - probability);
    let (mut low, mut high) = (0.0, 1.0);
    while let x = f64::midpoint(low, high)
        && low < x
        && x < high
    {
        if incomplete_beta(x, freedom / 2.0, 0.5) < tail {
            low = x;
        } else {
            high = x;
        }
    }
    (freedom * (1.0 / high - 1.0)).sqrt()
}

/// The regularized incomplete beta function I_x(a, b), 0 < x < 1, by its continued fraction
/// (Abramowitz and Stegun 26.5.8), evaluated with Lentz's algorithm.
fn incomplete_beta(x: f64, a: f64, b: f64) -> f64 {
    if x > (a + 1.0) / (a + b + 2.0) {
        // Where the fraction converges slowly.
        return 1.0 - incomplete_beta(1.0 - x, b, a);
    }
    let ln_beta = ln_gamma(a) + ln_gamma(b) - ln_gamma(a + b);
    let front = (a * x.ln() + b * (-x).ln_1p() - ln_beta).exp() / a;
    let (mut c, mut d, mut fraction) = (1.0, 0.0, 1.0);
    for i in 0..300 {
        let m = f64::from(i / 2);
        let numerator = match i {
            0 => 1.0,
            even if even % 2 == 0 => m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m)),
            _ => -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0)),
        };
        d = 1.0 / (1.0 + numerator * d);
        c = 1.0 + numerator / c;
        fraction *= c * d;
        if (c * d - 1.0).abs() < f64::EPSILON {
            break;
        }
    }
    front * (fraction - 1.0)
}

/// Lanczos' approximation with g = 7 and nine terms; its relative error is below 1e-14.
fn ln_gamma(x: f64) -> f64 {
    const TERMS: [f64; 8] = [
        676.520_368_121_885_1,
        -1_259.139_216_722_402_8,
        771.323_428_777_653_1,
        -176.615_029_162_140_6,
        12.507_343_278_686_905,
        -0.138_571_095_265_720_12,
        9.984_369_578_019_572e-6,
        1.505_632_735_149_311_6e-7,
    ];
    let x = x - 1.0;
    let shifted = x + 7.5;
    let terms = (1..).zip(TERMS).map(|(i, term)| term / (x + f64::from(i)));
    let sum = 0.999_999_999_999_809_9 + terms.sum::<f64>();
    (2.0 * std::f64::consts::PI).sqrt().ln() + (x + 0.5) * shifted.ln() - shifted + sum.ln()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use statrs::distribution::{ContinuousCDF, StudentsT};

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
        fn quantiles_are_those_of_another_implementation(probability in 0.51f64..0.9999, freedom in 1.0f64..300.0) {
            let expected = StudentsT::new(0.0, 1.0, freedom).unwrap().inverse_cdf(probability);
            let ours = student_t_quantile(probability, freedom);
            prop_assert!((ours / expected - 1.0).abs() < 1e-6, "{ours} instead of {expected}");
        }

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
