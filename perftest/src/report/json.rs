//! Results as one JSON object on stdout.

use serde::Serialize;

use crate::failure::Failure;

/// Prints a value as one line of JSON.
///
/// # Errors
/// As [`print_line`](super::print_line).
pub(crate) fn print(value: &impl Serialize) -> Result<(), Failure> {
    let text =
        serde_json::to_string(value).map_err(|e| Failure::test(format!("cannot write the results as JSON: {e}")))?;
    super::print_line(&text)
}

#[cfg(test)]
mod tests {
    use super::super::{BandwidthRow, LatencyRow, LinkKind, Report, Row};
    use crate::stats::{Bandwidth, Latency, Trip};

    #[test]
    fn keys_are_the_contracts() {
        let mut report = Report::new("write_bw".into(), "soft0".into(), LinkKind::SoftUdp);
        let figures = Bandwidth {
            messages: 10,
            average_per_s: 2.0,
            peak_per_s: 4.0,
        };
        report.results.push(Row::Bandwidth(BandwidthRow::new(64, &figures)));
        assert_eq!(
            serde_json::to_string(&report).unwrap(),
            format!(
                concat!(
                    r#"{{"tool":"doorbell","version":"{}","test":"write_bw","device":"soft0","link":"soft-udp","memory":"host","#,
                    r#""results":[{{"bytes":64,"iterations":10,"bw_peak_bytes_per_s":256.0,"bw_avg_bytes_per_s":128.0,"msg_rate_per_s":2.0}}],"warnings":[]}}"#
                ),
                env!("CARGO_PKG_VERSION")
            )
        );
        let mut latency = Latency::new(Trip::Half);
        latency.record(2000);
        let row = serde_json::to_value(LatencyRow::new(2, &latency.figures().unwrap())).unwrap();
        let mut keys: Vec<_> = row.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(
            keys,
            [
                "bytes",
                "iterations",
                "lat_avg_ns",
                "lat_max_ns",
                "lat_min_ns",
                "lat_p50_ns",
                "lat_p999_ns",
                "lat_p99_ns",
                "lat_stddev_ns"
            ]
        );
    }
}
