//! Thresholds (`--min-bw`, `--min-msg-rate`, `--max-p99`): a size that misses one is reported, and
//! the test has failed.
//!
//! The printed values are compared: with `--repeat` the mean over repeats, and percentiles of all
//! messages.

use std::time::Duration;

use super::{Report, Row};

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Thresholds {
    /// Least average, bytes per second.
    pub(crate) min_bytes_per_s: Option<f64>,
    /// Least average, messages per second.
    pub(crate) min_msg_per_s: Option<f64>,
    /// Largest 99th percentile.
    pub(crate) max_p99: Option<Duration>,
}

impl Thresholds {
    /// One line for each size that missed any, in the order they ran.
    pub(crate) fn missed(&self, report: &Report) -> Vec<String> {
        let misses = |row: &Row| {
            let mut misses = Vec::new();
            let bytes = match row {
                Row::Bandwidth(row) => {
                    let (average, rate) = (row.bw_avg_bytes_per_s, row.msg_rate_per_s);
                    if let Some(least) = self.min_bytes_per_s.filter(|least| average < *least) {
                        let (average, least) = (bandwidth(average), bandwidth(least));
                        misses.push(format!("{average} on average, at least {least} wanted"));
                    }
                    if let Some(least) = self.min_msg_per_s.filter(|least| rate < *least) {
                        misses.push(format!("{rate:.0} messages per second, at least {least:.0} wanted"));
                    }
                    row.bytes
                }
                Row::Latency(row) => {
                    let most = self.max_p99.map(|most| most.as_nanos() as f64);
                    if let Some(most) = most.filter(|most| row.lat_p99_ns > *most) {
                        let (p99_us, most_us) = (row.lat_p99_ns / 1e3, most / 1e3);
                        misses.push(format!("p99 is {p99_us:.3} us, at most {most_us:.3} us wanted"));
                    }
                    row.bytes
                }
            };
            (!misses.is_empty()).then(|| format!("{} {bytes} B missed: {}", report.test, misses.join("; ")))
        };
        report.results.iter().filter_map(misses).collect()
    }
}

/// In both of the usual units.
fn bandwidth(bytes_per_s: f64) -> String {
    format!("{:.3} GB/s ({:.3} Gb/s)", bytes_per_s / 1e9, bytes_per_s * 8.0 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::super::row::tests as rows;
    use super::super::{BandwidthRow, LatencyRow, LinkKind};
    use super::*;

    fn report(results: Vec<Row>) -> Report {
        let mut report = Report::new("some_test".into(), "soft0".into(), LinkKind::SoftUdp);
        report.results = results;
        report
    }

    #[test]
    fn each_size_that_missed_is_one_line() {
        let of = |bytes, rate: f64| {
            Row::Bandwidth(BandwidthRow {
                bytes,
                bw_avg_bytes_per_s: rate * bytes as f64,
                msg_rate_per_s: rate,
                ..rows::bandwidth()
            })
        };
        let report = report(vec![of(64, 1e6), of(4096, 1e5), of(65536, 1e5)]);
        let both = Thresholds {
            min_bytes_per_s: Some(1e8),
            min_msg_per_s: Some(5e5),
            ..Thresholds::default()
        };
        let missed = both.missed(&report);
        assert_eq!(
            missed,
            [
                "some_test 64 B missed: 0.064 GB/s (0.512 Gb/s) on average, at least 0.100 GB/s (0.800 Gb/s) wanted",
                "some_test 4096 B missed: 100000 messages per second, at least 500000 wanted",
                "some_test 65536 B missed: 100000 messages per second, at least 500000 wanted"
            ]
        );
        let low = Thresholds {
            min_bytes_per_s: Some(64e6),
            ..Thresholds::default()
        };
        assert!(low.missed(&report).is_empty(), "just enough is enough");
        assert!(Thresholds::default().missed(&report).is_empty());
    }

    #[test]
    fn p99_is_compared_with_its_threshold() {
        let row = LatencyRow {
            lat_p99_ns: 12_001.0,
            ..rows::latency()
        };
        let report = report(vec![Row::Latency(row)]);
        let of = |us| Thresholds {
            max_p99: Some(Duration::from_micros(us)),
            ..Thresholds::default()
        };
        assert_eq!(of(13).missed(&report).len(), 0);
        let missed = of(12).missed(&report);
        assert_eq!(
            missed,
            ["some_test 8388608 B missed: p99 is 12.001 us, at most 12.000 us wanted"]
        );
    }
}
