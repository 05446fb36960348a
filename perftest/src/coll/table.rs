//! Results: nccl-tests' table, and one JSON object.

use std::fmt::Display;

use doorbell_collectives::tune;
use serde::Serialize;

use crate::failure::Failure;
use crate::report::{LinkKind, Machine, ReportedWarning, now, print_line, print_result};

#[derive(Debug, Serialize)]
pub(crate) struct Report<R = Row> {
    test: &'static str,
    pub(crate) device: String,
    pub(crate) link: LinkKind,
    /// `host`; for GPUs `peer` with peer access, or `staged`.
    pub(crate) memory: &'static str,
    time: String,
    /// Of rank 0.
    machine: Machine,
    pub(crate) warnings: Vec<ReportedWarning>,
    pub(crate) results: Vec<R>,
}

/// What is chosen for a size, in rows of predictions.
#[derive(Debug, Serialize)]
pub(crate) struct Chosen {
    pub(crate) bytes: u64,
    algorithm: &'static str,
    protocol: &'static str,
    channels: u32,
    slice_bytes: u64,
}

impl Chosen {
    pub(crate) fn new(bytes: u64, choice: &tune::Choice) -> Self {
        Self {
            bytes,
            algorithm: choice.algorithm.name(),
            protocol: choice.protocol.name(),
            channels: choice.channels,
            slice_bytes: choice.slice_bytes,
        }
    }

    pub(crate) fn head() -> String {
        columns("#bytes", "algorithm", "protocol", "channels", "slice")
    }

    pub(crate) fn columns(&self) -> String {
        let (bytes, channels, slice) = (self.bytes, self.channels, self.slice_bytes);
        columns(bytes, self.algorithm, self.protocol, channels, slice)
    }
}

fn columns<T: Display, U: Display>(bytes: T, algorithm: &str, protocol: &str, channels: U, slice: T) -> String {
    format!("{bytes:>12} {algorithm:<20} {protocol:<8} {channels:>8} {slice:>10}")
}

/// The result of one size, out of place.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) bytes: u64,
    pub(crate) count: u64,
    pub(crate) dtype: &'static str,
    /// `none` without a reduction.
    pub(crate) op: &'static str,
    /// -1 where there is none.
    pub(crate) root: i64,
    pub(crate) algorithm: &'static str,
    pub(crate) protocol: &'static str,
    pub(crate) channels: u32,
    pub(crate) ranks: u32,
    pub(crate) iterations: u32,
    #[serde(flatten)]
    pub(crate) measurement: Measurement,
    /// The result in place, where the operation supports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) in_place: Option<Measurement>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Measurement {
    /// The mean over all ranks.
    pub(crate) time_us: f64,
    pub(crate) algbw_bytes_per_s: f64,
    pub(crate) busbw_bytes_per_s: f64,
    /// Wrong elements on all ranks; none where nothing was checked.
    pub(crate) wrong: Option<u64>,
}

impl Row {
    /// Sets the algorithm and protocol.
    pub(crate) fn chosen_by(mut self, choice: &tune::Choice) -> Self {
        self.algorithm = choice.algorithm.name();
        self.protocol = choice.protocol.name();
        self.channels = choice.channels;
        self
    }

    pub(crate) fn wrong(&self) -> u64 {
        let of = |measurement: &Measurement| measurement.wrong.unwrap_or(0);
        of(&self.measurement) + self.in_place.as_ref().map_or(0, of)
    }
}

impl<R: Serialize> Report<R> {
    pub(crate) fn new(test: &'static str, device: String, link: LinkKind) -> Self {
        Self {
            test,
            device,
            link,
            memory: "host",
            time: now(),
            machine: Machine::this(),
            warnings: Vec::new(),
            results: Vec::new(),
        }
    }

    pub(crate) fn print(&self) -> Result<(), Failure> {
        print_result(self)
    }

    /// Prints what was measured where, and the heads of the columns.
    pub(crate) fn print_title(&self, ranks: u32, head: &str) -> Result<(), Failure> {
        print_line(&format!(
            "# doorbell coll {}: {ranks} ranks on {}, {}\n{head}",
            self.test,
            self.device,
            self.link.name(),
        ))
    }
}

impl Report {
    pub(crate) fn print_head(&self, ranks: u32) -> Result<(), Failure> {
        self.print_title(ranks, &head())
    }

    /// Prints the table's foot: whether all results were right, and the mean bus bandwidth.
    pub(crate) fn print_foot(&self) -> Result<(), Failure> {
        let all = || {
            self.results
                .iter()
                .flat_map(|row| [Some(row.measurement), row.in_place])
                .flatten()
        };
        let mean = all().map(|measurement| measurement.busbw_bytes_per_s).sum::<f64>() / (all().count().max(1) as f64);
        let wrong: u64 = self.results.iter().map(Row::wrong).sum();
        let checked = if all().any(|measurement| measurement.wrong.is_none()) {
            "not checked".to_owned()
        } else {
            format!("{wrong} {}", if wrong == 0 { "OK" } else { "FAILED" })
        };
        print_line(&format!(
            "# Wrong values     : {checked}\n# Avg bus bandwidth: {:.4} GB/s",
            mean / 1e9
        ))
    }
}

fn head() -> String {
    let measurement = format!(" {:>9} {:>7} {:>7} {:>6}", "time", "algbw", "busbw", "#wrong");
    let units = format!(" {:>9} {:>7} {:>7} {:>6}", "(us)", "(GB/s)", "(GB/s)", "");
    format!(
        "#{:>57}{:^33}{:^33}\n#{:>12} {:>13} {:>8} {:>10} {:>7}   {measurement}{measurement}\n#{:>12} {:>13} {:>8} {:>10} {:>7}   {units}{units}",
        "", "out-of-place", "in-place", "size", "count", "type", "redop", "root", "(B)", "(elements)", "", "", ""
    )
}

impl Row {
    pub(crate) fn line(&self) -> String {
        let Self {
            bytes,
            count,
            dtype,
            op,
            root,
            ..
        } = self;
        let in_place = self.in_place.as_ref().map_or_else(
            || format!(" {:>9} {:>7} {:>7} {:>6}", "N/A", "N/A", "N/A", "N/A"),
            Measurement::columns,
        );
        format!(
            " {bytes:>12} {count:>13} {dtype:>8} {op:>10} {root:>7}   {}{in_place}",
            self.measurement.columns()
        )
    }
}

impl Measurement {
    fn columns(&self) -> String {
        let wrong = self.wrong.map_or_else(|| "N/A".to_owned(), |wrong| wrong.to_string());
        // Up to four digits.
        let time = match self.time_us {
            us if us < 100.0 => format!("{us:.2}"),
            us if us < 1000.0 => format!("{us:.1}"),
            us => format!("{us:.0}"),
        };
        format!(
            " {time:>9} {:>7.2} {:>7.2} {wrong:>6}",
            self.algbw_bytes_per_s / 1e9,
            self.busbw_bytes_per_s / 1e9
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        let measurement = Measurement {
            time_us: 34.56,
            algbw_bytes_per_s: 1e9,
            busbw_bytes_per_s: 2e9,
            wrong: Some(0),
        };
        Row {
            bytes: 1 << 20,
            count: 1 << 18,
            dtype: "f32",
            op: "sum",
            root: -1,
            algorithm: "ring",
            protocol: "simple",
            channels: 1,
            ranks: 2,
            iterations: 20,
            measurement,
            in_place: None,
        }
    }

    #[test]
    fn columns_line_up_and_are_nccl_tests() {
        let line = row().line();
        assert_eq!(
            line.split_whitespace().collect::<Vec<_>>(),
            [
                "1048576", "262144", "f32", "sum", "-1", "34.56", "1.00", "2.00", "0", "N/A", "N/A", "N/A", "N/A"
            ]
        );
        let both = Row {
            in_place: Some(row().measurement),
            ..row()
        };
        for head in head().lines() {
            assert!(
                head.len() == line.len() && both.line().len() == line.len(),
                "{head}\n{line}"
            );
        }
    }

    #[test]
    fn json_keys_are_as_documented() {
        let value = serde_json::to_value(row()).unwrap();
        for key in [
            "bytes",
            "count",
            "dtype",
            "op",
            "algorithm",
            "protocol",
            "ranks",
            "time_us",
            "algbw_bytes_per_s",
            "busbw_bytes_per_s",
            "wrong",
        ] {
            assert!(value.get(key).is_some(), "{key}");
        }
    }
}
