//! Student's t distribution.

/// The quantile of Student's t distribution for a probability of at least one half, by bisection.
pub(crate) fn student_t_quantile(probability: f64, freedom: f64) -> f64 {
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

    proptest! {
        #[test]
        fn quantiles_are_those_of_another_implementation(probability in 0.51f64..0.9999, freedom in 1.0f64..300.0) {
            let expected = StudentsT::new(0.0, 1.0, freedom).unwrap().inverse_cdf(probability);
            let ours = student_t_quantile(probability, freedom);
            prop_assert!((ours / expected - 1.0).abs() < 1e-6, "{ours} instead of {expected}");
        }
    }
}
