//! The confidence of a result, from repeated measurements.
//!
//! Repeats are few, so Student's t distribution is used: the 95 % confidence interval of the mean
//! of n samples is mean ± t(0.975, n − 1) · s ÷ √n, with s the standard deviation of the sample.

use super::student_t_quantile;

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
        let freedom = (n - 1) as f64;
        let ci95 = (n > 1).then(|| {
            let deviation = (squares / freedom).sqrt();
            student_t_quantile(0.975, freedom) * deviation / (n as f64).sqrt()
        });
        Some(Spread { mean, ci95 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn students_t_is_the_printed_tables() {
        for (freedom, t) in [
            (1.0, 12.706),
            (2.0, 4.303),
            (3.0, 3.182),
            (4.0, 2.776),
            (5.0, 2.571),
            (6.0, 2.447),
            (9.0, 2.262),
            (10.0, 2.228),
            (19.0, 2.093),
            (29.0, 2.045),
            (30.0, 2.042),
            (60.0, 2.000),
            (120.0, 1.980),
            (1e6, 1.960),
        ] {
            assert!(
                (student_t_quantile(0.975, freedom) - t).abs() < 0.0006,
                "{freedom}: {}",
                student_t_quantile(0.975, freedom)
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
