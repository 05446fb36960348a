//! The Prometheus exporter: text exposition format 0.0.4, for node_exporter's textfile collector or
//! a push gateway.
//!
//! Base units only, in the names: seconds, bytes, bytes per second. A file is replaced atomically,
//! so that a collector never reads half of it.

use std::fmt::Write as _;
use std::path::Path;
use std::time::SystemTime;

use super::{BandwidthRow, LatencyRow, Report, Row};
use crate::failure::Failure;
use crate::output::Output;

/// Values, each with an additional label if it has one.
type Samples = Vec<(Option<(&'static str, &'static str)>, Option<f64>)>;

/// A metric of rows of one kind.
struct Metric<R> {
    name: &'static str,
    help: &'static str,
    /// Rows without a value have no sample.
    samples: fn(&R) -> Samples,
}

macro_rules! metrics {
    ($($name:literal |$row:ident| $samples:expr => $help:literal;)*) => {
        &[$(Metric { name: $name, help: $help, samples: |$row| $samples }),*]
    };
}

const BANDWIDTH: &[Metric<BandwidthRow>] = metrics! {
    "doorbell_bandwidth_average_bytes_per_second" |row| one(row.bw_avg_bytes_per_s)
        => "Payload over the whole measurement, the mean over repeats.";
    "doorbell_bandwidth_peak_bytes_per_second" |row| one(row.bw_peak_bytes_per_s)
        => "Payload over the best stretch.";
    "doorbell_bandwidth_ci95_bytes_per_second" |row| vec![(None, row.bw_ci95_bytes_per_s)]
        => "Half width of the 95 % confidence interval of the average over repeats.";
    "doorbell_messages_per_second" |row| one(row.msg_rate_per_s)
        => "Messages over the whole measurement, the mean over repeats.";
    "doorbell_measured_messages" |row| one(row.iterations as f64)
        => "Messages that were measured.";
    "doorbell_lost_messages" |row| vec![(None, row.lost_messages.map(|lost| lost as f64))]
        => "Messages that have not arrived, on a transport that may lose them.";
    "doorbell_cpu_cores" |row| cpu(row.cpu_user_cores, row.cpu_system_cores)
        => "Processor time of the measuring process over elapsed time.";
};

const LATENCY: &[Metric<LatencyRow>] = metrics! {
    "doorbell_latency_seconds" |row| quantiles(row)
        => "Time per message, by quantile.";
    "doorbell_latency_minimum_seconds" |row| one(row.lat_min_ns / 1e9)
        => "Time of the shortest message.";
    "doorbell_latency_average_seconds" |row| one(row.lat_avg_ns / 1e9)
        => "Mean time per message.";
    "doorbell_latency_stddev_seconds" |row| one(row.lat_stddev_ns / 1e9)
        => "Standard deviation of the time per message.";
    "doorbell_latency_maximum_seconds" |row| one(row.lat_max_ns / 1e9)
        => "Time of the longest message.";
    "doorbell_latency_ci95_seconds" |row| vec![(None, row.lat_ci95_ns.map(|ns| ns / 1e9))]
        => "Half width of the 95 % confidence interval of the mean of the repeats' medians.";
    "doorbell_measured_messages" |row| one(row.iterations as f64)
        => "Messages that were measured.";
    "doorbell_cpu_cores" |row| cpu(row.cpu_user_cores, row.cpu_system_cores)
        => "Processor time of the measuring process over elapsed time.";
};

fn quantiles(row: &LatencyRow) -> Samples {
    [
        ("0.5", row.lat_p50_ns),
        ("0.9", row.lat_p90_ns),
        ("0.99", row.lat_p99_ns),
        ("0.999", row.lat_p999_ns),
        ("0.9999", row.lat_p9999_ns),
    ]
    .map(|(quantile, ns)| (Some(("quantile", quantile)), Some(ns / 1e9)))
    .to_vec()
}

fn one(value: f64) -> Samples {
    vec![(None, Some(value))]
}

fn cpu(user: f64, system: f64) -> Samples {
    vec![
        (Some(("mode", "user")), Some(user)),
        (Some(("mode", "system")), Some(system)),
    ]
}

pub(crate) fn exposition(report: &Report, finished: SystemTime) -> String {
    let mode = report
        .settings
        .as_ref()
        .map(|settings| settings.mode)
        .unwrap_or_default();
    // The labels of a one-way test over RC are those that it always had.
    let mode = match mode.name() {
        name if name.is_empty() => name,
        name => format!(",mode=\"{name}\""),
    };
    let of_all = format!(
        "test=\"{}\",device=\"{}\",link=\"{}\",memory=\"{}\"{mode}",
        escape(&report.test),
        escape(&report.device),
        report.link.name(),
        escape(&report.memory)
    );
    let (mut bandwidth, mut latency) = (Vec::new(), Vec::new());
    for row in &report.results {
        match row {
            Row::Bandwidth(row) => bandwidth.push((labels(&of_all, row.bytes, row.qps), row)),
            Row::Latency(row) => latency.push((labels(&of_all, row.bytes, row.qps), row)),
        }
    }
    let mut text = String::new();
    write_all(&mut text, BANDWIDTH, &bandwidth);
    write_all(&mut text, LATENCY, &latency);
    if let Ok(since) = finished.duration_since(SystemTime::UNIX_EPOCH) {
        let name = "doorbell_finished_timestamp_seconds";
        header(&mut text, name, "When the test had finished, since 1970.");
        sample(&mut text, name, &of_all, since.as_secs_f64());
    }
    text
}

fn labels(of_all: &str, bytes: u64, qps: u32) -> String {
    format!("{of_all},bytes=\"{bytes}\",qps=\"{qps}\"")
}

fn write_all<R>(text: &mut String, metrics: &[Metric<R>], rows: &[(String, &R)]) {
    for metric in metrics {
        let samples: Vec<_> = rows
            .iter()
            .flat_map(|(labels, row)| (metric.samples)(row).into_iter().map(move |sample| (labels, sample)))
            .filter_map(|(labels, (own, value))| Some((labels, own, value?)))
            .collect();
        if samples.is_empty() {
            continue;
        }
        header(text, metric.name, metric.help);
        for (labels, own, value) in samples {
            let labels = match own {
                Some((name, of)) => format!("{labels},{name}=\"{of}\""),
                None => labels.clone(),
            };
            sample(text, metric.name, &labels, value);
        }
    }
}

fn header(text: &mut String, name: &str, help: &str) {
    // Writing to a String does not fail.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge");
}

fn sample(text: &mut String, name: &str, labels: &str, value: f64) {
    let _ = writeln!(text, "{name}{{{labels}}} {value}");
}

fn escape(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[derive(Debug)]
pub(crate) enum Metrics {
    Stdout,
    File(Output),
}

impl Metrics {
    /// Opens the destination, before anything is measured.
    pub(crate) fn begin(path: &Path) -> Result<Metrics, Failure> {
        if path == Path::new("-") {
            Ok(Metrics::Stdout)
        } else {
            Output::begin(path).map(Metrics::File)
        }
    }

    pub(crate) fn finish(self, text: &str) -> Result<(), Failure> {
        match self {
            Metrics::Stdout => super::print_line(text.trim_end()),
            Metrics::File(output) => output.finish(text.as_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::LinkKind;
    use super::super::row::tests as rows;
    use super::*;

    #[test]
    fn units_are_base_units() {
        let mut report = Report::new("write_lat".into(), "so\"ft\\0\n".into(), LinkKind::SoftLocal);
        report.results = vec![Row::Latency(LatencyRow {
            bytes: 2,
            lat_p99_ns: 12_500.0,
            ..rows::latency()
        })];
        let text = exposition(&report, SystemTime::UNIX_EPOCH + std::time::Duration::from_millis(1500));
        let of_all = r#"test="write_lat",device="so\"ft\\0\n",link="soft-local",memory="host""#;
        for line in [
            format!(r#"doorbell_latency_seconds{{{of_all},bytes="2",qps="1",quantile="0.99"}} 0.0000125"#),
            format!("doorbell_finished_timestamp_seconds{{{of_all}}} 1.5"),
            "# TYPE doorbell_latency_seconds gauge".to_owned(),
        ] {
            assert!(text.lines().any(|one| one == line), "{line}\n{text}");
        }
        assert!(!text.contains("bandwidth") && !text.contains("ci95"), "{text}");
    }
}
