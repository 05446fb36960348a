//! Results as one JSON object on stdout.

use serde::Serialize;

use crate::failure::Failure;

/// Prints a value as one line of JSON.
pub(crate) fn print(value: &impl Serialize) -> Result<(), Failure> {
    let text =
        serde_json::to_string(value).map_err(|e| Failure::test(format!("cannot write the results as JSON: {e}")))?;
    super::print_line(&text)
}

/// Prints a result as one line of JSON, which begins with the tool and its version.
pub(crate) fn print_result(result: &impl Serialize) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Named<'a, R> {
        tool: &'static str,
        version: &'static str,
        #[serde(flatten)]
        result: &'a R,
    }
    print(&Named {
        tool: "doorbell",
        version: env!("CARGO_PKG_VERSION"),
        result,
    })
}

#[cfg(test)]
mod tests {
    use super::super::row::tests::{bandwidth, latency};
    use super::super::{LinkKind, Report, Row};

    #[test]
    fn keys_are_the_contracts_and_what_is_written_is_read() {
        let mut report = Report::new("write_bw".into(), "soft0".into(), LinkKind::SoftUdp);
        report.results = vec![Row::Bandwidth(bandwidth()), Row::Latency(latency())];
        let text = serde_json::to_string(&report).unwrap();
        assert!(
            text.starts_with(&format!(
                r#"{{"tool":"doorbell","version":"{}","test":"write_bw","device":"soft0","link":"soft-udp","memory":"host","#,
                env!("CARGO_PKG_VERSION")
            )),
            "{text}"
        );
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        for (row, keys) in [
            (
                0,
                "bytes iterations bw_peak_bytes_per_s bw_avg_bytes_per_s msg_rate_per_s qps tx_depth inline_bytes post_list repeats bw_samples_bytes_per_s cpu_user_cores cpu_system_cores",
            ),
            (
                1,
                "bytes iterations lat_min_ns lat_p50_ns lat_avg_ns lat_stddev_ns lat_p90_ns lat_p99_ns lat_p999_ns lat_p9999_ns lat_max_ns qps tx_depth inline_bytes repeats lat_samples_ns \
                 cpu_user_cores cpu_system_cores lat_cdf coordinated_omission",
            ),
        ] {
            let row = value["results"][row].as_object().unwrap();
            let missing: Vec<_> = keys.split_whitespace().filter(|&key| !row.contains_key(key)).collect();
            assert!(missing.is_empty(), "{missing:?}");
        }
        let read: Report = serde_json::from_str(&text).unwrap();
        assert_eq!(read.results, report.results);
    }
}
