//! Whether there are enough samples for percentiles, and whether repeats agree.
//!
//! Of n samples about n × (1 − q) lie above the true q-quantile. Ten of them vary by about √10 from
//! test to test, a third, so a percentile needs n ≥ 10 ÷ (1 − q) samples.

use crate::report::{Code, Warning};
use crate::stats::samples_needed;

/// Largest coefficient of variation of repeats that agree, in percent.
const SPREAD: f64 = 5.0;

/// `percentiles`: names and quantiles in order.
pub(super) fn few(samples: u64, percentiles: &[(&str, f64)]) -> Option<Warning> {
    let weak = percentiles
        .iter()
        .filter(|(_, quantile)| samples < samples_needed(*quantile));
    let weak: Vec<_> = weak.collect();
    let want = samples_needed(weak.last()?.1);
    let names: Vec<&str> = weak.iter().map(|(name, _)| *name).collect();
    let have = if names.len() == 1 {
        "has fewer than ten above it"
    } else {
        "have fewer than ten above them"
    };
    Some(Code::FewSamples.warning(format!(
        "{samples} samples are few: {} {have}: -n {want}, or a longer -D",
        names.join(", ")
    )))
}

/// A warning of the size whose repeats differ most; of each size the bytes and a value per repeat.
pub(super) fn spread<'a>(sizes: impl IntoIterator<Item = (u64, &'a [f64])>) -> Option<Warning> {
    let worst = sizes
        .into_iter()
        .filter_map(|(bytes, figures)| Some((bytes, figures.len(), variation(figures)?)))
        .max_by(|one, two| one.2.total_cmp(&two.2))?;
    let (bytes, repeats, percent) = worst;
    (percent > SPREAD).then(|| {
        Code::Spread.warning(format!(
                "{repeats} repeats of {bytes} B differ by {percent:.0} % (standard deviation ÷ mean): find out what else runs, or judge by the confidence interval of more repeats"
            ))
    })
}

/// Coefficient of variation in percent: sample standard deviation over mean; `None` for fewer than
/// two values, or without a number.
fn variation(figures: &[f64]) -> Option<f64> {
    let n = figures.len();
    let mean = figures.iter().sum::<f64>() / n as f64;
    let squares: f64 = figures.iter().map(|figure| (figure - mean).powi(2)).sum();
    let percent = 100.0 * (squares / n.checked_sub(1)? as f64).sqrt() / mean;
    (n > 1 && mean > 0.0 && percent.is_finite()).then_some(percent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_need_ten_samples_above_them() {
        let shown = [("p99", 0.99), ("p99.9", 0.999)];
        let text = |samples| few(samples, &shown).map(|warning| warning.to_string());
        assert_eq!(text(10_000), None);
        assert_eq!(
            text(9999).as_deref(),
            Some("9999 samples are few: p99.9 has fewer than ten above it: -n 10000, or a longer -D")
        );
        assert!(text(1000).unwrap().contains("few: p99.9 has"));
        assert!(text(999).unwrap().contains("few: p99, p99.9 have"));
        assert_eq!(few(1, &shown).unwrap().code, Code::FewSamples);
        assert_eq!(few(1, &[]), None);
    }

    #[test]
    fn repeats_that_differ_are_noticed() {
        let steady = [100.0, 101.0, 99.0];
        let (wild, worse) = ([100.0, 120.0, 80.0], [100.0, 160.0, 40.0]);
        assert_eq!(spread([(64, &steady[..])]), None);
        let warning = spread([(64, &steady[..]), (4096, &worse[..]), (128, &wild[..])]).unwrap();
        assert_eq!(warning.code, Code::Spread);
        assert!(
            warning.to_string().starts_with("3 repeats of 4096 B differ by 60 %"),
            "{warning}"
        );
        for none in [&[][..], &[5.0], &[0.0, 0.0], &[f64::NAN, 1.0]] {
            assert_eq!(spread([(64, none)]), None, "{none:?}");
        }
    }
}
