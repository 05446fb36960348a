//! Latency percentiles of round trips.
//!
//! Minimum, maximum, average and standard deviation are exact (Welford's algorithm); percentiles
//! come from an HDR histogram with three significant digits, so they are within 0.1 %. It covers
//! 1 ns to one minute and is allocated at once.
//!
//! A ping-pong reports half round trips, a one-sided operation whole ones. In an open loop
//! ([`Pacer`](super::Pacer)) only the sender is late, so its lateness counts whole in both.

use hdrhistogram::Histogram;

/// The longest round trip of the histogram, in ns; longer ones count as this in percentiles.
const LONGEST_NS: u64 = 60_000_000_000;

/// How much of a round trip is reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Trip {
    /// Half round trip: the two directions of a ping-pong are alike.
    Half,
    Full,
}

#[derive(Debug)]
pub(crate) struct Latency {
    histogram: Histogram<u64>,
    trip: Trip,
    count: u64,
    min: u64,
    max: u64,
    mean: f64,
    squares: f64,
}

/// The samples needed for ten of them to lie above a percentile.
pub(crate) fn samples_needed(quantile: f64) -> u64 {
    // 1 − 0.999 is not 0.001, but nearly.
    (10.0 / (1.0 - quantile) - 1e-6).ceil() as u64
}

/// The result of the round trips; times in ns.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct LatencySummary {
    pub(crate) count: u64,
    pub(crate) min: f64,
    pub(crate) p50: f64,
    pub(crate) avg: f64,
    /// Standard deviation of the sample.
    pub(crate) stddev: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) p9999: f64,
    pub(crate) max: f64,
    /// The distribution: fractions, and the values they did not exceed.
    pub(crate) cdf: Vec<(f64, f64)>,
}

impl Latency {
    pub(crate) fn new(trip: Trip) -> Latency {
        let histogram = Histogram::new_with_bounds(1, LONGEST_NS, 3).expect("constant bounds that the histogram takes");
        Latency {
            histogram,
            trip,
            count: 0,
            min: u64::MAX,
            max: 0,
            mean: 0.0,
            squares: 0.0,
        }
    }

    /// Records a round trip that began `late_ns` after it was due.
    #[inline]
    pub(crate) fn record_late(&mut self, late_ns: u64, ns: u64) {
        let whole = match self.trip {
            Trip::Half => late_ns.saturating_mul(2),
            Trip::Full => late_ns,
        };
        self.record(whole.saturating_add(ns));
    }

    #[inline]
    pub(crate) fn record(&mut self, ns: u64) {
        self.histogram.saturating_record(ns.max(1));
        self.count += 1;
        self.min = self.min.min(ns);
        self.max = self.max.max(ns);
        let from_mean = ns as f64 - self.mean;
        self.mean += from_mean / self.count as f64;
        self.squares += from_mean * (ns as f64 - self.mean);
    }

    /// Merges another record of the same kind (Chan's sums of squares).
    pub(crate) fn absorb(&mut self, other: &Latency) {
        debug_assert_eq!(self.trip, other.trip);
        if other.count == 0 {
            return;
        }
        // Both have the same bounds, so every value fits.
        let added = self.histogram.add(&other.histogram);
        debug_assert_eq!(added, Ok(()));
        let (ours, theirs) = (self.count as f64, other.count as f64);
        let apart = other.mean - self.mean;
        self.count += other.count;
        self.mean += apart * theirs / (ours + theirs);
        self.squares += other.squares + apart * apart * ours * theirs / (ours + theirs);
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    fn share(&self) -> f64 {
        match self.trip {
            Trip::Half => 0.5,
            Trip::Full => 1.0,
        }
    }

    fn percentile(&self, quantile: f64) -> f64 {
        self.histogram.value_at_quantile(quantile).clamp(self.min, self.max) as f64 * self.share()
    }

    /// The distribution in a hundred steps of one percent, then in nine per decade towards 1, as
    /// far as a step holds a message. Starts with the minimum at 0 and ends with the maximum at 1.
    fn cdf(&self) -> Vec<(f64, f64)> {
        let share = self.share();
        let mut steps = fractions(self.count).into_iter().peekable();
        let mut points = vec![(0.0, self.min as f64 * share)];
        let mut seen = 0;
        for bucket in self.histogram.iter_recorded() {
            seen += bucket.count_since_last_iteration();
            while let Some(fraction) = steps.next_if(|fraction| fraction * self.count as f64 <= seen as f64) {
                let value = self.histogram.highest_equivalent(bucket.value_iterated_to());
                points.push((fraction, value.clamp(self.min, self.max) as f64 * share));
            }
        }
        points.push((1.0, self.max as f64 * share));
        points
    }

    /// The result, or `None` when nothing was measured.
    pub(crate) fn figures(&self) -> Option<LatencySummary> {
        if self.count == 0 {
            return None;
        }
        let share = self.share();
        let variance = if self.count > 1 {
            self.squares / (self.count - 1) as f64
        } else {
            0.0
        };
        Some(LatencySummary {
            count: self.count,
            min: self.min as f64 * share,
            p50: self.percentile(0.5),
            avg: self.mean * share,
            stddev: variance.sqrt() * share,
            p90: self.percentile(0.9),
            p99: self.percentile(0.99),
            p999: self.percentile(0.999),
            p9999: self.percentile(0.9999),
            max: self.max as f64 * share,
            cdf: self.cdf(),
        })
    }
}

/// The fractions at which the distribution of so many samples is sampled, between 0 and 1.
fn fractions(count: u64) -> Vec<f64> {
    let percents = (1..=99).map(|percent| f64::from(percent) / 100.0);
    let tails = [1e3, 1e4, 1e5, 1e6]
        .into_iter()
        .flat_map(|parts: f64| (1..=9).rev().map(move |left| (parts - f64::from(left)) / parts));
    percents
        .chain(tails)
        .filter(|fraction| fraction * count as f64 >= 1.0 && (1.0 - fraction) * count as f64 >= 1.0)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_measured_is_no_figure() {
        assert_eq!(Latency::new(Trip::Full).figures(), None);
    }

    #[test]
    fn figures_are_right() {
        let mut latency = Latency::new(Trip::Full);
        for ns in 1..=10_000 {
            latency.record(ns);
        }
        let figures = latency.figures().unwrap();
        assert_eq!(
            (figures.count, figures.min, figures.max, figures.avg),
            (10_000, 1.0, 10_000.0, 5000.5)
        );
        for (got, want) in [
            (figures.p50, 5000.0),
            (figures.p90, 9000.0),
            (figures.p99, 9900.0),
            (figures.p999, 9990.0),
            (figures.p9999, 9999.0),
        ] {
            assert!((got - want).abs() <= want * 0.001 + 1.0, "{got} for {want}");
        }
        assert!((figures.stddev - 2886.896).abs() < 0.01, "{}", figures.stddev);
    }

    #[test]
    fn the_distribution_is_that_of_the_samples() {
        let mut latency = Latency::new(Trip::Full);
        for ns in (1..=100_000).rev() {
            latency.record(ns);
        }
        let cdf = latency.figures().unwrap().cdf;
        assert!(cdf.len() <= 200 && cdf.len() > 100, "{}", cdf.len());
        assert!(cdf.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{cdf:?}");
        assert_eq!((cdf[0], cdf[cdf.len() - 1]), ((0.0, 1.0), (1.0, 100_000.0)));
        for (fraction, ns) in cdf {
            assert!((ns - fraction * 1e5).abs() <= ns * 0.001 + 1.0, "{fraction}: {ns}");
        }
        let mut few = Latency::new(Trip::Half);
        few.record(4000);
        few.record(2000);
        let cdf = few.figures().unwrap().cdf;
        assert_eq!((cdf[0], cdf[cdf.len() - 1]), ((0.0, 1000.0), (1.0, 2000.0)));
        assert!(
            cdf.len() > 2 && cdf.iter().all(|&(fraction, ns)| ns < 1001.0 || fraction > 0.5),
            "{cdf:?}"
        );
    }

    #[test]
    fn records_put_together_are_as_one() {
        let (mut all, mut parts) = (Latency::new(Trip::Full), Latency::new(Trip::Full));
        for part in 0..3 {
            let mut one = Latency::new(Trip::Full);
            for ns in 0..1000 {
                let ns = (ns * 7919) % 1009 + part * 5000 + 1;
                all.record(ns);
                one.record(ns);
            }
            parts.absorb(&one);
        }
        parts.absorb(&Latency::new(Trip::Full));
        let (all, parts) = (all.figures().unwrap(), parts.figures().unwrap());
        assert!((all.avg - parts.avg).abs() < 1e-6 && (all.stddev - parts.stddev).abs() < 1e-6);
        assert_eq!((all.min, all.p50, all.max), (parts.min, parts.p50, parts.max));
        assert_eq!(all.cdf, parts.cdf);
    }

    #[test]
    fn a_percentile_needs_ten_samples_above_it() {
        for (quantile, needed) in [(0.5, 20), (0.9, 100), (0.99, 1000), (0.999, 10_000), (0.9999, 100_000)] {
            assert_eq!(samples_needed(quantile), needed);
        }
    }

    #[test]
    fn half_a_trip_is_half_of_everything() {
        let mut latency = Latency::new(Trip::Half);
        for ns in [1001, 3001] {
            latency.record(ns);
        }
        let figures = latency.figures().unwrap();
        assert_eq!((figures.min, figures.avg, figures.max), (500.5, 1000.5, 1500.5));
        assert!((figures.stddev - 707.1068).abs() < 0.001);
    }

    #[test]
    fn lateness_counts_whole() {
        for (trip, want) in [(Trip::Half, 600.0), (Trip::Full, 700.0)] {
            let mut latency = Latency::new(trip);
            latency.record_late(500, 200);
            assert_eq!(latency.figures().unwrap().max, want);
        }
    }

    #[test]
    fn no_sample_is_out_of_range() {
        let mut latency = Latency::new(Trip::Full);
        latency.record(0);
        latency.record(u64::MAX);
        let figures = latency.figures().unwrap();
        assert_eq!((figures.min, figures.max), (0.0, u64::MAX as f64));
    }
}
