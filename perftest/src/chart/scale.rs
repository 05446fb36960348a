//! Scales of axes: positions of values, and ticks.

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Scale {
    /// From 0.
    Linear {
        max: f64,
        step: f64,
    },
    Log2 {
        min: f64,
        max: f64,
    },
    Log10 {
        min: f64,
        max: f64,
    },
    /// Fractions by their number of nines: 0.9, 0.99 and 0.999 are equidistant. 1 lies at the end.
    Nines {
        max: f64,
    },
}

impl Scale {
    /// From 0 to the first tick at or past `most`.
    pub(crate) fn linear(most: f64) -> Scale {
        let most = if most > 0.0 { most } else { 1.0 };
        let rough = most / 5.0;
        let decade = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0]
            .into_iter()
            .map(|digit| digit * decade)
            .find(|step| *step >= rough * 0.999)
            .unwrap_or(decade * 10.0);
        Scale::Linear {
            max: (most / step - 1e-9).ceil().max(1.0) * step,
            step,
        }
    }

    /// Powers of two around these values.
    pub(crate) fn log2(values: &[f64]) -> Scale {
        let (least, most) = ends(values);
        let (min, max) = (least.log2().floor(), most.log2().ceil());
        // A single value lies in the middle.
        let wider = if min >= max { 1.0 } else { 0.0 };
        Scale::Log2 {
            min: (min - wider).exp2(),
            max: (max + wider).exp2(),
        }
    }

    /// 1, 2 and 5 times powers of ten around these values.
    pub(crate) fn log10(values: &[f64]) -> Scale {
        let (least, most) = ends(values);
        let below = |value: f64| {
            let decade = 10f64.powf(value.log10().floor());
            let digits = [5.0, 2.0, 1.0];
            let digit = digits.iter().find(|digit| **digit * decade <= value * 1.000_001);
            digit.unwrap_or(&1.0) * decade
        };
        let above = |value: f64| {
            let decade = 10f64.powf(value.log10().floor());
            let digits = [1.0, 2.0, 5.0];
            let digit = digits.iter().find(|digit| **digit * decade >= value * 0.999_999);
            digit.unwrap_or(&10.0) * decade
        };
        let (min, max) = (below(least), above(most));
        if max / min < 2.5 {
            return Scale::Log10 {
                min: below(min * 0.7),
                max: above(max * 1.4),
            };
        }
        Scale::Log10 { min, max }
    }

    /// As many nines as these fractions have, and some space for 1.
    pub(crate) fn nines(fractions: &[f64]) -> Scale {
        let most = fractions
            .iter()
            .filter(|fraction| **fraction < 1.0)
            .map(|fraction| nines(*fraction))
            .fold(1.0, f64::max);
        Scale::Nines { max: most + 0.35 }
    }

    pub(crate) fn place(&self, value: f64) -> f64 {
        let place = match *self {
            Scale::Linear { max, .. } => value / max,
            Scale::Log2 { min, max } | Scale::Log10 { min, max } => {
                if value <= 0.0 {
                    return 0.0;
                }
                (value / min).ln() / (max / min).ln()
            }
            Scale::Nines { max } => {
                if value >= 1.0 {
                    return 1.0;
                }
                nines(value) / max
            }
        };
        place.clamp(0.0, 1.0)
    }

    pub(crate) fn ticks(&self, most: usize) -> Vec<f64> {
        let most = most.max(2);
        match *self {
            Scale::Linear { max, step } => {
                let count = (max / step).round() as usize;
                (0..=count).map(|tick| tick as f64 * step).collect()
            }
            Scale::Log2 { min, max } => {
                let (first, last) = (min.log2().round() as i32, max.log2().round() as i32);
                let every = every(last - first + 1, most);
                (first..=last)
                    .step_by(every as usize)
                    .map(|power| f64::from(power).exp2())
                    .collect()
            }
            Scale::Log10 { min, max } => {
                let (first, last) = (min.log10().floor() as i32, max.log10().ceil() as i32);
                let within = |value: &f64| (min * 0.999..=max * 1.001).contains(value);
                let of = |digits: &'static [f64]| {
                    (first..=last)
                        .flat_map(move |power| digits.iter().map(move |digit| digit * 10f64.powi(power)))
                        .filter(within)
                        .collect::<Vec<_>>()
                };
                let candidates = [of(&[1.0, 2.0, 5.0]), of(&[1.0, 3.0]), of(&[1.0])];
                let fits = candidates.iter().find(|ticks| ticks.len() <= most);
                fits.cloned().unwrap_or_else(|| {
                    let every = every(last - first + 1, most);
                    (first..=last)
                        .step_by(every as usize)
                        .map(|power| 10f64.powi(power))
                        .filter(within)
                        .collect()
                })
            }
            Scale::Nines { max } => {
                let nines = (1..=max.floor() as i32).map(|nines| 1.0 - 10f64.powi(-nines));
                [0.0, 0.5].into_iter().chain(nines).chain([1.0]).collect()
            }
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Scale::Linear { .. } => "linear",
            Scale::Log2 { .. } | Scale::Log10 { .. } => "log",
            Scale::Nines { .. } => "nines",
        }
    }
}

/// The number of nines of a fraction: 0.9 has 1, 0.5 a third.
fn nines(fraction: f64) -> f64 {
    -(1.0 - fraction.clamp(0.0, 1.0 - 1e-12)).log10()
}

fn every(count: i32, most: usize) -> i32 {
    let most = i32::try_from(most).unwrap_or(i32::MAX);
    (1..).find(|every| (count - 1) / every < most).unwrap_or(1)
}

/// The least and the greatest value above 0; both 1 where there is none.
fn ends(values: &[f64]) -> (f64, f64) {
    let positive = || values.iter().copied().filter(|value| *value > 0.0);
    match (positive().min_by(f64::total_cmp), positive().max_by(f64::total_cmp)) {
        (Some(least), Some(most)) => (least, most),
        _ => (1.0, 1.0),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ticks_are_round() {
        assert_eq!(Scale::linear(9.3).ticks(6), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(Scale::linear(10.0).ticks(6), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(Scale::linear(0.0).ticks(6).len(), 6);
        let sizes = Scale::log2(&[2.0, 8388608.0]);
        assert_eq!(sizes.ticks(30).len(), 23);
        assert_eq!(
            sizes.ticks(8),
            [2.0, 16.0, 128.0, 1024.0, 8192.0, 65536.0, 524288.0, 4194304.0]
        );
        assert_eq!(Scale::log10(&[150.0, 40_000.0]).ticks(9).len(), 9);
        assert_eq!(Scale::log10(&[1.0, 1e9]).ticks(6), [1.0, 1e2, 1e4, 1e6, 1e8]);
        assert_eq!(
            Scale::nines(&[0.5, 0.999, 1.0]).ticks(9),
            [0.0, 0.5, 0.9, 0.99, 0.999, 1.0]
        );
    }

    #[test]
    fn places_are_where_they_should_be() {
        let places = |scale: Scale, values: &[f64]| -> Vec<f64> {
            values
                .iter()
                .map(|v| (scale.place(*v) * 1000.0).round() / 1000.0)
                .collect()
        };
        assert_eq!(
            places(Scale::linear(10.0), &[0.0, 5.0, 10.0, 20.0]),
            [0.0, 0.5, 1.0, 1.0]
        );
        assert_eq!(
            places(Scale::log2(&[1.0, 16.0]), &[1.0, 4.0, 16.0, 0.0]),
            [0.0, 0.5, 1.0, 0.0]
        );
        assert_eq!(
            places(Scale::Nines { max: 4.0 }, &[0.0, 0.9, 0.99, 1.0]),
            [0.0, 0.25, 0.5, 1.0]
        );
        assert_eq!(places(Scale::log2(&[64.0]), &[64.0]), [0.5]);
    }

    proptest! {
        #[test]
        fn greater_values_lie_further_and_all_lie_within(mut values in prop::collection::vec(1e-3f64..1e15, 1..40)) {
            values.sort_unstable_by(f64::total_cmp);
            let most = values[values.len() - 1];
            for scale in [Scale::linear(most), Scale::log2(&values), Scale::log10(&values)] {
                let places: Vec<_> = values.iter().map(|value| scale.place(*value)).collect();
                prop_assert!(places.is_sorted() && places.iter().all(|place| (0.0..=1.0).contains(place)), "{scale:?}");
                // Nothing is cut off at the end.
                prop_assert!((scale.place(most * 1.000_001) - places[places.len() - 1]).abs() < 1e-4);
                let ticks = scale.ticks(8);
                prop_assert!((2..=13).contains(&ticks.len()) && ticks.is_sorted(), "{scale:?} {ticks:?}");
            }
        }
    }
}
