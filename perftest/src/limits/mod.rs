//! `doorbell limits`: the machine's own limits, and how close the userspace device comes to them.
//!
//! A round measures a limit before each test that is compared with it (limit, test, limit, test),
//! so that disturbances affect both. Rounds are short and many, as the speed of a shared machine
//! changes. A value is the median of its rounds, a ratio that of the rounds' ratios; a wide range
//! shows a busy machine.

mod cores;
mod machine;
mod soft;

use std::time::Duration;

use serde::Serialize;

use crate::cli::LimitsArgs;
use crate::diagnose::{self, Sources};
use crate::failure::{Failure, one_line};
use crate::report::{self, Caveats};

use cores::CpuPair;
pub(crate) use cores::{SELF, processors, set_of};
use soft::DeviceTest;

/// Rounds, unless `--quick` requests one.
const ROUNDS: u32 = 7;

/// The limits in the report of a sweep: those whose names are a contract, and a copy within caches,
/// as a repeated WRITE between processes is.
const CEILINGS: [&str; 5] = [
    "memcpy",
    "memcpy_again_64k",
    "udp_gso",
    "shm_pingpong",
    "process_vm_writev",
];

/// How long an idle device is observed, and with `--quick`.
const IDLE: Duration = Duration::from_secs(10);
const IDLE_QUICK: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Measurement {
    BytesPerS(f64),
    Ns(f64),
    PerS(f64),
}

impl Measurement {
    const fn value(self) -> f64 {
        match self {
            Measurement::BytesPerS(value) | Measurement::Ns(value) | Measurement::PerS(value) => value,
        }
    }

    const fn with(self, value: f64) -> Self {
        match self {
            Measurement::BytesPerS(_) => Measurement::BytesPerS(value),
            Measurement::Ns(_) => Measurement::Ns(value),
            Measurement::PerS(_) => Measurement::PerS(value),
        }
    }

    fn text(self) -> String {
        match self {
            Measurement::BytesPerS(rate) => format!("{:.2} GB/s", rate / 1e9),
            Measurement::Ns(ns) => format!("{ns:.1} ns"),
            Measurement::PerS(rate) => format!("{:.2} M/s", rate / 1e6),
        }
    }
}

#[derive(Debug, PartialEq, Serialize)]
struct Entry {
    name: &'static str,
    #[serde(flatten)]
    value: Measurement,
    #[serde(flatten)]
    compared: Option<Comparison>,
}

#[derive(Debug, PartialEq, Serialize)]
struct Comparison {
    /// Message size; 0 where there are no messages.
    bytes: u64,
    against: &'static str,
    #[serde(flatten)]
    ratio: Ratio,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Ratio {
    /// The median of the rounds.
    #[serde(rename = "ratio")]
    pub(crate) median: f64,
    #[serde(rename = "ratio_min")]
    pub(crate) least: f64,
    #[serde(rename = "ratio_max")]
    pub(crate) greatest: f64,
}

impl Ratio {
    /// `None` without a round.
    pub(crate) fn of(rounds: &[f64]) -> Option<Self> {
        Some(Self {
            median: median(rounds.to_vec())?,
            least: rounds.iter().copied().min_by(f64::total_cmp)?,
            greatest: rounds.iter().copied().max_by(f64::total_cmp)?,
        })
    }
}

#[derive(Debug, Serialize)]
struct Report {
    test: &'static str,
    memory: &'static str,
    time: String,
    machine: report::Machine,
    warnings: Vec<report::ReportedWarning>,
    results: Vec<Entry>,
}

#[derive(Debug)]
struct Column {
    figures: Vec<Measurement>,
    ratios: Vec<f64>,
    /// It cannot be measured here; reported once.
    refused: bool,
}

impl Column {
    const NEW: Self = Self {
        figures: Vec::new(),
        ratios: Vec::new(),
        refused: false,
    };

    fn record(&mut self, name: &str, measured: Result<Measurement, String>) -> Option<Measurement> {
        match measured {
            Ok(value) => {
                self.figures.push(value);
                Some(value)
            }
            Err(reason) => {
                self.refused = true;
                eprintln!("doorbell: {name} left out: {}", one_line(&reason));
                None
            }
        }
    }

    fn value(&self) -> Option<Measurement> {
        let unit = *self.figures.first()?;
        let values = self.figures.iter().map(|value| value.value()).collect();
        median(values).map(|value| unit.with(value))
    }
}

/// Measures and prints. What cannot be measured here is left out, with a line on stderr.
///
/// # Errors
/// [`Failure::Usage`] for an unknown name; [`Failure::Test`] when nothing could be measured or
/// printed.
pub(crate) fn run(args: &LimitsArgs) -> Result<(), Failure> {
    let selection = Selection::new(&args.only)?;
    let mut caveats = Caveats::new(args.verbose);
    caveats.add(diagnose::of_machine(&Sources::of_this_machine(), 2));
    let warnings = caveats.finish();
    let rounds = if args.quick { 1 } else { ROUNDS };
    let round_time = Duration::from_secs_f64(args.duration) / rounds;
    let mut limits = machine::LIMITS.map(|_| Column::NEW);
    let mut subjects = soft::DEVICE_TESTS.map(|_| Column::NEW);
    for round in 0..rounds {
        for (limit, column) in machine::LIMITS.iter().zip(&mut limits) {
            if column.refused || !selection.limit(limit.name) {
                continue;
            }
            let _pair = limit.one_core_a_side.then(|| CpuPair::bind(round as usize));
            let compared = soft::DEVICE_TESTS.iter().zip(&mut subjects);
            let compared = compared.filter(|(device_test, column)| {
                device_test.against == limit.name && !column.refused && selection.named(device_test.name)
            });
            alternate(
                || column.record(limit.name, (limit.measure)(round_time)),
                compared,
                |device_test| device_test.measure(round_time),
            );
        }
    }
    let limits = machine::LIMITS.iter().zip(&limits).filter_map(|(limit, column)| {
        Some(Entry {
            name: limit.name,
            value: column.value()?,
            compared: None,
        })
    });
    let compared = soft::DEVICE_TESTS.iter().zip(&subjects);
    let compared = compared.filter_map(|(device_test, column)| {
        Some(Entry {
            name: device_test.name,
            value: column.value()?,
            compared: Some(Comparison {
                bytes: device_test.bytes,
                against: device_test.against,
                ratio: Ratio::of(&column.ratios)?,
            }),
        })
    });
    let mut results: Vec<_> = limits.chain(compared).collect();
    if selection.named(soft::IDLE) {
        results.extend(idle(if args.quick { IDLE_QUICK } else { IDLE }));
    }
    if results.is_empty() {
        return Err(Failure::test("no limit could be measured on this machine"));
    }
    print(args, warnings, results)
}

/// Measures a limit before each of the tests that are compared with it; once if there is none.
fn alternate<'a>(
    mut limit: impl FnMut() -> Option<Measurement>,
    compared: impl Iterator<Item = (&'a DeviceTest, &'a mut Column)>,
    measure: impl Fn(&DeviceTest) -> Result<Measurement, String>,
) {
    let mut compared = compared.peekable();
    if compared.peek().is_none() {
        limit();
    }
    for (device_test, column) in compared {
        let Some(value) = limit() else { return };
        if let Some(of) = column.record(device_test.name, measure(device_test)) {
            column.ratios.push(device_test.ratio(of.value(), value.value()));
        }
    }
}

/// The machine's own limits that a result is compared with, the median of three rounds each. What
/// cannot be measured here is left out.
pub(crate) fn ceilings(round_time: Duration) -> Vec<report::Limit> {
    let named = machine::LIMITS.iter().filter(|limit| CEILINGS.contains(&limit.name));
    named
        .filter_map(|limit| {
            let mut column = Column::NEW;
            for round in 0..3 {
                let _pair = limit.one_core_a_side.then(|| CpuPair::bind(round));
                column.record(limit.name, (limit.measure)(round_time))?;
            }
            let value = column.value()?;
            let (bytes_per_s, ns) = match value {
                Measurement::BytesPerS(rate) => (Some(rate), None),
                Measurement::Ns(ns) => (None, Some(ns)),
                Measurement::PerS(_) => return None,
            };
            Some(report::Limit {
                name: limit.name.to_owned(),
                bytes_per_s,
                ns,
            })
        })
        .collect()
}

/// The CPU use of an idle device, compared with elapsed time.
fn idle(period: Duration) -> Option<Entry> {
    let mut column = Column::NEW;
    let value = column.record(soft::IDLE, soft::idle(period))?;
    Some(Entry {
        name: soft::IDLE,
        value,
        compared: Some(Comparison {
            bytes: 0,
            against: "elapsed_time",
            ratio: Ratio::of(&[value.value() / period.as_nanos() as f64])?,
        }),
    })
}

fn print(args: &LimitsArgs, warnings: Vec<report::ReportedWarning>, results: Vec<Entry>) -> Result<(), Failure> {
    if args.json {
        return report::print_result(&Report {
            test: "limits",
            memory: "host",
            time: report::now(),
            machine: report::Machine::this(),
            warnings,
            results,
        });
    }
    report::print_line(&format!(
        "{:<28} {:>9} {:>12} {:>8} {:>15}  {:<22} what it is",
        "#limit", "bytes", "value", "ratio", "rounds", "of"
    ))?;
    for entry in &results {
        report::print_line(&line(entry))?;
    }
    Ok(())
}

/// All that is measured, by name, and what it is.
fn known() -> Vec<(&'static str, &'static str)> {
    let limits = machine::LIMITS.map(|limit| (limit.name, limit.what));
    let device_tests = soft::DEVICE_TESTS.map(|device_test| (device_test.name, device_test.what));
    let idle = [(soft::IDLE, soft::IDLE_WHAT)];
    [&limits[..], &device_tests, &idle].concat()
}

fn line(entry: &Entry) -> String {
    let what = known().into_iter().find(|(name, _)| *name == entry.name);
    let what = what.map_or("", |(_, what)| what);
    let (name, value) = (entry.name, entry.value.text());
    match &entry.compared {
        None => format!(
            "{name:<28} {:>9} {value:>12} {:>8} {:>15}  {:<22} {what}",
            "-", "-", "-", "-"
        ),
        Some(compared) => {
            let bytes = if compared.bytes == 0 {
                "-".to_owned()
            } else {
                compared.bytes.to_string()
            };
            let (ratio, against) = (compared.ratio.median, compared.against);
            let rounds = format!("{:.2}..{:.2}", compared.ratio.least, compared.ratio.greatest);
            format!("{name:<28} {bytes:>9} {value:>12} {ratio:>8.2} {rounds:>15}  {against:<22} {what}")
        }
    }
}

struct Selection<'a> {
    /// Names; empty for all.
    only: &'a [String],
}

impl<'a> Selection<'a> {
    fn new(only: &'a [String]) -> Result<Self, Failure> {
        let mut names: Vec<_> = known().into_iter().map(|(name, _)| name).collect();
        match only.iter().find(|name| !names.contains(&name.as_str())) {
            None => Ok(Self { only }),
            Some(unknown) => {
                names.dedup();
                Err(Failure::usage(format!(
                    "no limit '{}': there is {}",
                    one_line(unknown),
                    names.join(", ")
                )))
            }
        }
    }

    fn named(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }

    /// A limit is measured if it is wanted, or a value compared with it is.
    fn limit(&self, name: &str) -> bool {
        self.named(name)
            || soft::DEVICE_TESTS
                .iter()
                .any(|device_test| device_test.against == name && self.named(device_test.name))
    }
}

pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    if values.len() % 2 == 1 {
        return Some(upper);
    }
    Some((values[values.len() / 2 - 1] + upper) / 2.0)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn keys_are_the_contracts() {
        let raw = Entry {
            name: "memcpy",
            value: Measurement::BytesPerS(1.5),
            compared: None,
        };
        assert_eq!(
            serde_json::to_string(&raw).unwrap(),
            r#"{"name":"memcpy","bytes_per_s":1.5}"#
        );
        let compared = Entry {
            name: "soft_local_msg_rate",
            value: Measurement::PerS(3e6),
            compared: Some(Comparison {
                bytes: 64,
                against: "shm_pingpong",
                ratio: Ratio::of(&[0.5, 0.75, 0.25]).unwrap(),
            }),
        };
        assert_eq!(
            serde_json::to_string(&compared).unwrap(),
            r#"{"name":"soft_local_msg_rate","per_s":3000000.0,"bytes":64,"against":"shm_pingpong","ratio":0.5,"ratio_min":0.25,"ratio_max":0.75}"#
        );
    }

    #[test]
    fn the_contracts_names_are_there() {
        let names = machine::LIMITS.map(|limit| limit.name);
        for name in ["memcpy", "udp_gso", "shm_pingpong", "process_vm_writev"] {
            assert!(names.contains(&name), "{name}");
        }
        for device_test in &soft::DEVICE_TESTS {
            assert!(names.contains(&device_test.against), "{}", device_test.name);
        }
    }

    #[test]
    fn a_ratio_is_to_the_limit_measured_directly_before() {
        let log = RefCell::new(Vec::new());
        let mut values = [10.0, 20.0].into_iter();
        let mut columns = [Column::NEW, Column::NEW];
        let latencies = soft::DEVICE_TESTS.iter().filter(|test| test.name.contains("_lat"));
        alternate(
            || {
                log.borrow_mut().push("limit");
                values.next().map(Measurement::Ns)
            },
            latencies.zip(&mut columns),
            |device_test| {
                log.borrow_mut().push(device_test.name);
                Ok(Measurement::Ns(40.0))
            },
        );
        let order = ["limit", "soft_local_write_lat", "limit", "soft_local_write_lat_foreign"];
        assert_eq!(log.into_inner(), order);
        assert_eq!(columns.map(|column| column.ratios), [[4.0], [2.0]]);
    }

    #[test]
    fn a_selected_test_selects_its_limit() {
        let only = ["soft_udp_write_bw".to_owned()];
        let selection = Selection::new(&only).unwrap();
        let limits: Vec<_> = machine::LIMITS
            .iter()
            .filter(|limit| selection.limit(limit.name))
            .map(|limit| limit.name)
            .collect();
        assert_eq!(limits, ["udp_gso"]);
        assert!(!selection.named(soft::IDLE));
        assert_eq!(
            Selection::new(&["speed".to_owned()])
                .err()
                .map(|failure| failure.status()),
            Some(2)
        );
    }

    #[test]
    fn medians() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0]), Some(2.5));
        assert_eq!(Ratio::of(&[]), None);
    }
}
