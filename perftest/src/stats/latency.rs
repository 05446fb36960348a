//! Latency figures from single round trips.
//!
//! Round trips are recorded in whole nanoseconds. Minimum, maximum, average and standard deviation are exact (Welford's recurrence);
//! percentiles come from a high dynamic range histogram with three significant digits, so they are right within 0.1 %. The histogram
//! covers 1 ns to one minute and is allocated at once: recording never allocates.
//!
//! A ping-pong (write, send) reports half of each round trip; an operation that the peer's software takes no part in (read, atomic)
//! reports all of it.

use hdrhistogram::Histogram;

/// The longest round trip the histogram tells apart, in ns; longer ones count as this in percentiles.
const LONGEST_NS: u64 = 60_000_000_000;

/// How much of a round trip is reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Trip {
    /// Half: the two directions of a ping-pong are alike.
    Half,
    /// All of it.
    Full,
}

/// Round trips, as they are measured.
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

/// What the round trips come to; times in ns.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct LatencyFigures {
    /// Round trips measured.
    pub(crate) count: u64,
    /// Shortest.
    pub(crate) min: f64,
    /// Median.
    pub(crate) p50: f64,
    /// Mean.
    pub(crate) avg: f64,
    /// Standard deviation of the sample.
    pub(crate) stddev: f64,
    /// 99th percentile.
    pub(crate) p99: f64,
    /// 99.9th percentile.
    pub(crate) p999: f64,
    /// Longest.
    pub(crate) max: f64,
}

impl Latency {
    /// An empty record that reports so much of each round trip.
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

    /// Adds a round trip of so many ns.
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

    /// The figures, or `None` when nothing was measured.
    pub(crate) fn figures(&self) -> Option<LatencyFigures> {
        if self.count == 0 {
            return None;
        }
        let share = match self.trip {
            Trip::Half => 0.5,
            Trip::Full => 1.0,
        };
        let percentile = |quantile| self.histogram.value_at_quantile(quantile).clamp(self.min, self.max) as f64 * share;
        let variance = if self.count > 1 {
            self.squares / (self.count - 1) as f64
        } else {
            0.0
        };
        Some(LatencyFigures {
            count: self.count,
            min: self.min as f64 * share,
            p50: percentile(0.5),
            avg: self.mean * share,
            stddev: variance.sqrt() * share,
            p99: percentile(0.99),
            p999: percentile(0.999),
            max: self.max as f64 * share,
        })
    }
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
        for (got, want) in [(figures.p50, 5000.0), (figures.p99, 9900.0), (figures.p999, 9990.0)] {
            assert!((got - want).abs() <= want * 0.001 + 1.0, "{got} for {want}");
        }
        assert!((figures.stddev - 2886.896).abs() < 0.01, "{}", figures.stddev);
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
    fn no_sample_is_out_of_range() {
        let mut latency = Latency::new(Trip::Full);
        latency.record(0);
        latency.record(u64::MAX);
        let figures = latency.figures().unwrap();
        assert_eq!((figures.min, figures.max), (0.0, u64::MAX as f64));
    }
}
