//! The columns of the tables: head, value and meaning.
//!
//! The table, `--help` and docs/METRICS.md are all generated from this list; a test compares
//! the last.

use super::{BandwidthRow, Interval, LatencyRow};
use crate::plan::Kind;

const MIB: f64 = 1024.0 * 1024.0;
/// Bytes of 10^9 bits.
const GBIT: f64 = 125e6;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct OptionalColumns {
    /// Confidence interval of the mean over repeats.
    pub(crate) repeats: bool,
    pub(crate) cpu: bool,
    /// Bandwidths in bits instead of bytes.
    pub(crate) gbits: bool,
    /// Messages that have not arrived.
    pub(crate) lost: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Visibility {
    Always,
    /// Without `--gbits`.
    Bytes,
    Gbits,
    /// With `--repeat`.
    Repeated,
    RepeatedBytes,
    RepeatedGbits,
    CpuUtil,
    /// Where SENDs may be lost.
    Unreliable,
}

impl Visibility {
    fn is_shown(self, extra: OptionalColumns) -> bool {
        match self {
            Visibility::Always => true,
            Visibility::Bytes => !extra.gbits,
            Visibility::Gbits => extra.gbits,
            Visibility::Repeated => extra.repeats,
            Visibility::RepeatedBytes => extra.repeats && !extra.gbits,
            Visibility::RepeatedGbits => extra.repeats && extra.gbits,
            Visibility::CpuUtil => extra.cpu,
            Visibility::Unreliable => extra.lost,
        }
    }

    fn option(self) -> &'static str {
        match self {
            Visibility::Always | Visibility::Bytes => "",
            Visibility::Gbits => " (--gbits)",
            Visibility::Repeated | Visibility::RepeatedBytes => " (--repeat)",
            Visibility::RepeatedGbits => " (--repeat --gbits)",
            Visibility::CpuUtil => " (--cpu-util)",
            Visibility::Unreliable => " (send --transport uc, ud)",
        }
    }
}

struct Column<R> {
    head: &'static str,
    width: usize,
    visibility: Visibility,
    cell: fn(&R) -> String,
    key: &'static str,
    meaning: &'static str,
}

macro_rules! columns {
    ($($head:literal $width:literal $visibility:ident $key:literal |$row:ident| $cell:expr => $meaning:literal;)*) => {
        &[$(Column {
            head: $head,
            width: $width,
            visibility: Visibility::$visibility,
            cell: |$row| $cell,
            key: $key,
            meaning: $meaning,
        }),*]
    };
}

const BANDWIDTH: &[Column<BandwidthRow>] = columns! {
    "#bytes" 10 Always "bytes" |row| row.bytes.to_string()
        => "message size";
    "#iterations" 12 Always "iterations" |row| row.iterations.to_string()
        => "messages measured, over all queue pairs and repeats, without those of the warm-up";
    "BW peak[MiB/s]" 16 Bytes "bw_peak_bytes_per_s" |row| format!("{:.2}", row.bw_peak_bytes_per_s / MIB)
        => "the best stretch of at least max(n / 16, 4 * in flight) messages, of which the first in flight do not count; of any repeat; never below the average";
    "BW average[MiB/s]" 19 Bytes "bw_avg_bytes_per_s" |row| format!("{:.2}", row.bw_avg_bytes_per_s / MIB)
        => "messages * bytes / (last completion - clock before the first measured post); the mean over repeats";
    "BW peak[Gb/s]" 16 Gbits "bw_peak_bytes_per_s" |row| format!("{:.2}", row.bw_peak_bytes_per_s / GBIT)
        => "the same in 10^9 bits";
    "BW average[Gb/s]" 19 Gbits "bw_avg_bytes_per_s" |row| format!("{:.2}", row.bw_avg_bytes_per_s / GBIT)
        => "the same in 10^9 bits";
    "MsgRate[Mpps]" 15 Always "msg_rate_per_s" |row| format!("{:.6}", row.msg_rate_per_s / 1e6)
        => "messages / the same time; the mean over repeats";
    "#lost" 10 Unreliable "lost_messages" |row| row.lost_messages.map_or_else(|| "-".to_owned(), |lost| lost.to_string())
        => "messages sent that have not arrived, with those of the warm-up; the other columns are of those that have";
    "±95%[MiB/s]" 13 RepeatedBytes "bw_ci95_bytes_per_s" |row| interval(row.bw_ci95_bytes_per_s, MIB)
        => "half width of the 95 % confidence interval of BW average over k repeats: t(0.975, k - 1) * s / sqrt(k), s their standard deviation";
    "±95%[Gb/s]" 13 RepeatedGbits "bw_ci95_bytes_per_s" |row| interval(row.bw_ci95_bytes_per_s, GBIT)
        => "the same in 10^9 bits";
    "CPU user[cores]" 16 CpuUtil "cpu_user_cores" |row| format!("{:.3}", row.cpu_user_cores)
        => "processor time of this end's process in user mode / elapsed time, all threads, without the warm-up";
    "CPU system[cores]" 18 CpuUtil "cpu_system_cores" |row| format!("{:.3}", row.cpu_system_cores)
        => "the same in the kernel";
};

const LATENCY: &[Column<LatencyRow>] = columns! {
    "#bytes" 10 Always "bytes" |row| row.bytes.to_string()
        => "message size";
    "#iterations" 12 Always "iterations" |row| row.iterations.to_string()
        => "messages measured, over all repeats, without those of the warm-up";
    "min[us]" 10 Always "lat_min_ns" |row| us(row.lat_min_ns)
        => "the shortest. A message's time is (answer - post) / 2 of a ping-pong for write and send, completion - post for read and atomic; with --rate it begins when the message was due, and what it was late counts whole";
    "p50[us]" 10 Always "lat_p50_ns" |row| us(row.lat_p50_ns)
        => "the median: half of all messages took no longer. Percentiles are of the messages of all repeats together, from a histogram of three significant digits (0.1 %)";
    "avg[us]" 10 Always "lat_avg_ns" |row| us(row.lat_avg_ns)
        => "the mean, exact";
    "stddev[us]" 12 Always "lat_stddev_ns" |row| us(row.lat_stddev_ns)
        => "sqrt(sum((x - mean)^2) / (n - 1)), exact";
    "p90[us]" 10 Always "lat_p90_ns" |row| us(row.lat_p90_ns)
        => "nine of ten took no longer";
    "p99[us]" 10 Always "lat_p99_ns" |row| us(row.lat_p99_ns)
        => "99 of 100 took no longer; stands on ten messages or more from n = 1000";
    "p99.9[us]" 10 Always "lat_p999_ns" |row| us(row.lat_p999_ns)
        => "999 of 1000 took no longer; from n = 10000";
    "p99.99[us]" 10 Always "lat_p9999_ns" |row| us(row.lat_p9999_ns)
        => "9999 of 10000 took no longer; from n = 100000";
    "max[us]" 10 Always "lat_max_ns" |row| us(row.lat_max_ns)
        => "the longest, exact";
    "±95%[us]" 10 Repeated "lat_ci95_ns" |row| interval(row.lat_ci95_ns, 1e3)
        => "half width of the 95 % confidence interval of the mean of k repeats' medians: t(0.975, k - 1) * s / sqrt(k), s their standard deviation";
    "CPU user[cores]" 16 CpuUtil "cpu_user_cores" |row| format!("{:.3}", row.cpu_user_cores)
        => "processor time of this end's process in user mode / elapsed time, all threads, without the warm-up";
    "CPU system[cores]" 18 CpuUtil "cpu_system_cores" |row| format!("{:.3}", row.cpu_system_cores)
        => "the same in the kernel";
};

fn us(ns: f64) -> String {
    format!("{:.2}", ns / 1e3)
}

/// An interrupted repeat has none.
fn interval(half_width: Option<f64>, unit: f64) -> String {
    half_width.map_or_else(|| "-".to_owned(), |half| format!("{:.2}", half / unit))
}

pub(super) fn head(kind: Kind, extra: OptionalColumns) -> String {
    fn of<R>(columns: &[Column<R>], extra: OptionalColumns) -> String {
        join(columns, extra, |column| column.head.to_owned())
    }
    match kind {
        Kind::Bw => of(BANDWIDTH, extra),
        Kind::Lat => of(LATENCY, extra),
    }
}

pub(super) fn bandwidth(row: &BandwidthRow, extra: OptionalColumns) -> String {
    let line = join(BANDWIDTH, extra, |column| (column.cell)(row));
    match row.raw_copy_bytes_per_s {
        Some(raw) => format!(
            "{line}  raw copy {:.2} MiB/s, {:.3} of it",
            raw / MIB,
            row.bw_avg_bytes_per_s / raw
        ),
        None => line,
    }
}

/// The line of an interval, under the columns of the rows.
pub(super) fn interval_line(interval: &Interval, extra: OptionalColumns) -> String {
    match interval {
        Interval::Bandwidth(of) => {
            let unit = if extra.gbits { GBIT } else { MIB };
            format!(
                "# {:>6.2} s {:>12} {:>16} {:>19.2} {:>15.6}",
                of.end_s,
                of.iterations,
                "",
                of.bw_avg_bytes_per_s / unit,
                of.msg_rate_per_s / 1e6
            )
        }
        Interval::Latency(of) => format!(
            "# {:>6.2} s {:>12} {:>10} {:>10} {:>10} {:>12} {:>10} {:>10} {:>10} {:>10} {:>10}",
            of.end_s,
            of.iterations,
            "",
            us(of.lat_p50_ns),
            us(of.lat_avg_ns),
            "",
            "",
            us(of.lat_p99_ns),
            "",
            "",
            us(of.lat_max_ns)
        ),
    }
}

pub(super) fn latency(row: &LatencyRow, extra: OptionalColumns) -> String {
    join(LATENCY, extra, |column| (column.cell)(row))
}

fn join<R>(columns: &[Column<R>], extra: OptionalColumns, text: impl Fn(&Column<R>) -> String) -> String {
    let there = columns.iter().filter(|column| column.visibility.is_shown(extra));
    let cells: Vec<_> = there
        .map(|column| format!("{:>1$}", text(column), column.width))
        .collect();
    cells.join(" ")
}

pub(crate) fn help(kind: Kind) -> String {
    fn of<R>(columns: &[Column<R>]) -> Vec<String> {
        let line = |column: &Column<R>| {
            let Column {
                head,
                meaning,
                key,
                visibility,
                ..
            } = column;
            format!("  {head}{}\n          {meaning} [JSON: {key}]", visibility.option())
        };
        columns.iter().map(line).collect()
    }
    let lines = match kind {
        Kind::Bw => of(BANDWIDTH),
        Kind::Lat => of(LATENCY),
    };
    format!("Columns:\n{}", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::row::tests as rows;
    use super::super::{BandwidthInterval, LatencyInterval};
    use super::*;

    /// The same list as a table of docs/METRICS.md.
    fn documented() -> String {
        fn of<R>(columns: &[Column<R>]) -> String {
            let line = |column: &Column<R>| {
                let formula = column
                    .meaning
                    .replace(" * ", " × ")
                    .replace(" / ", " ÷ ")
                    .replace(" - ", " − ");
                format!(
                    "| `{}`{} | `{}` | {formula} |\n",
                    column.head,
                    column.visibility.option(),
                    column.key
                )
            };
            columns.iter().map(line).collect()
        }
        let table =
            |command: &str, lines: String| format!("| `{command}` | JSON | what it means |\n|---|---|---|\n{lines}");
        format!(
            "{}\n{}",
            table("doorbell bw", of(BANDWIDTH)),
            table("doorbell lat", of(LATENCY))
        )
    }

    #[test]
    fn the_documentation_has_the_same_list() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/METRICS.md");
        let docs = std::fs::read_to_string(file).unwrap();
        let wanted = documented();
        assert!(
            docs.contains(&wanted),
            "docs/METRICS.md, \"What each column means\", has to say:\n\n{wanted}"
        );
    }

    #[test]
    fn every_column_is_in_json() {
        let keys = |row: serde_json::Value| row.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let bandwidth = BandwidthRow {
            bw_ci95_bytes_per_s: Some(1.0),
            lost_messages: Some(1),
            ..rows::bandwidth()
        };
        let latency = LatencyRow {
            lat_ci95_ns: Some(1.0),
            ..rows::latency()
        };
        let (bw, lat) = (
            keys(serde_json::to_value(&bandwidth).unwrap()),
            keys(serde_json::to_value(&latency).unwrap()),
        );
        for column in BANDWIDTH {
            assert!(bw.iter().any(|key| key == column.key), "{}", column.key);
        }
        for column in LATENCY {
            assert!(lat.iter().any(|key| key == column.key), "{}", column.key);
        }
    }

    #[test]
    fn intervals_stand_under_the_columns() {
        let none = OptionalColumns::default();
        let bandwidth = BandwidthInterval {
            end_s: 1.5,
            iterations: 7,
            bw_avg_bytes_per_s: 2.0 * MIB,
            msg_rate_per_s: 3e6,
        };
        let latency = LatencyInterval {
            end_s: 1.5,
            iterations: 7,
            lat_p50_ns: 1e3,
            lat_avg_ns: 2e3,
            lat_p99_ns: 3e3,
            lat_max_ns: 4e3,
        };
        for (kind, interval, values) in [
            (Kind::Bw, Interval::Bandwidth(bandwidth), "# 1.50 s 7 2.00 3.000000"),
            (Kind::Lat, Interval::Latency(latency), "# 1.50 s 7 1.00 2.00 3.00 4.00"),
        ] {
            let line = interval_line(&interval, none);
            assert_eq!(line.len(), head(kind, none).len());
            assert_eq!(line.split_whitespace().collect::<Vec<_>>().join(" "), values);
        }
    }

    #[test]
    fn columns_line_up() {
        for (repeats, cpu) in [(false, false), (true, false), (false, true), (true, true)] {
            let extra = OptionalColumns {
                repeats,
                cpu,
                ..OptionalColumns::default()
            };
            for (kind, line) in [
                (Kind::Bw, bandwidth(&rows::bandwidth(), extra)),
                (Kind::Lat, latency(&rows::latency(), extra)),
            ] {
                let head = head(kind, extra);
                assert_eq!(line.chars().count(), head.chars().count(), "{head}\n{line}");
                assert_eq!((head.contains("±95%"), head.contains("CPU system")), (repeats, cpu));
            }
        }
    }
}
