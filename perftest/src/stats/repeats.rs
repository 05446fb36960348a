//! The confidence of a result, from repeated measurements.
//!
//! Repeats are few, so Student's t distribution is used: the 95 % confidence interval of the mean
//! of n samples is mean ± t(0.975, n − 1) · s ÷ √n, with s the standard deviation of the sample.

use std::f64::consts::FRAC_2_PI;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) mean: f64,
    /// Half width of the 95 % confidence interval; `None` for a single sample.
    pub(crate) ci95: Option<f64>,
}

impl Spread {
    /// `None` without samples.
    pub(crate) fn of(samples: &[f64]) -> Option<Spread> {
        let n = samples.len();
        if n == 0 {
            return None;
        }
        let mean = samples.iter().sum::<f64>() / n as f64;
        let squares: f64 = samples.iter().map(|sample| (sample - mean).powi(2)).sum();
        let freedom = u32::try_from(n - 1).unwrap_or(u32::MAX);
        let ci95 = (freedom > 0).then(|| {
            let deviation = (squares / f64::from(freedom)).sqrt();
            student_t975(freedom) * deviation / (n as f64).sqrt()
        });
        Some(Spread { mean, ci95 })
    }
}

/// The quantile t(0.975) for so many degrees of freedom.
fn student_t975(freedom: u32) -> f64 {
    // Beyond this, the series is long and t changes by less than 1e-5 per degree.
    let freedom = freedom.min(1000);
    let (mut low, mut high) = (1.9, 13.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if within(middle, freedom) < 0.95 {
            low = middle;
        } else {
            high = middle;
        }
    }
    (low + high) / 2.0
}

/// The probability that Student's t lies between −t and t: for whole degrees of freedom a finite
/// sum (Abramowitz and Stegun 26.7.3, 26.7.4).
fn within(t: f64, freedom: u32) -> f64 {
    let angle = (t / f64::from(freedom).sqrt()).atan();
    let (sin, cos) = angle.sin_cos();
    let odd = freedom % 2 == 1;
    // Each term is the previous one times cos² and the next fraction: even over odd numbers for odd
    // degrees of freedom, odd over even ones for even degrees.
    let (mut term, mut sum, first) = if odd { (cos, 0.0, 2) } else { (1.0, 0.0, 1) };
    for step in (first..).step_by(2).take((freedom / 2) as usize) {
        sum += term;
        term *= cos * cos * f64::from(step) / f64::from(step + 1);
    }
    if odd {
        FRAC_2_PI * (angle + sin * sum)
    } else {
        sin * sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn students_t_is_the_printed_tables() {
        for (freedom, t) in [
            (1, 12.706),
            (2, 4.303),
            (3, 3.182),
            (4, 2.776),
            (5, 2.571),
            (6, 2.447),
            (9, 2.262),
            (10, 2.228),
            (19, 2.093),
            (29, 2.045),
            (30, 2.042),
            (60, 2.000),
            (120, 1.980),
            (1_000_000, 1.962),
        ] {
            assert!(
                (student_t975(freedom) - t).abs() < 0.0006,
                "{freedom}: {}",
                student_t975(freedom)
            );
        }
    }

    #[test]
    fn the_interval_follows_the_spread_of_the_samples() {
        assert_eq!(Spread::of(&[]), None);
        assert_eq!(Spread::of(&[3.0]), Some(Spread { mean: 3.0, ci95: None }));
        let same = Spread::of(&[5.0; 4]).unwrap();
        assert_eq!((same.mean, same.ci95), (5.0, Some(0.0)));
        // s = 1, n = 3, t = 4.3027.
        let three = Spread::of(&[1.0, 2.0, 3.0]).unwrap();
        assert_eq!(three.mean, 2.0);
        assert!((three.ci95.unwrap() - 2.4841).abs() < 0.0005, "{three:?}");
    }
}
