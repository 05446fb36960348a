//! The experiments of the command, each a function that returns tables.

mod convergence;
mod incast;
mod loss;
mod model;
mod parking_lot;
mod ring;
mod sleepers;
mod victim;

use std::fmt;
use std::time::Duration;

use doorbell_roce_proto::Instant;
use doorbell_roce_proto::congestion::{Algorithm, DcqcnConfig, DelayConfig};

use crate::fabric::Config;
use crate::host::HostConfig;

pub use convergence::{Interval, convergence};
pub use incast::{Incast, completion, incast};
pub use loss::{Loss, loss};
pub use model::{FixedPoint, fixed_point, model, open_loop};
pub use parking_lot::{ParkingLot, parking_lot};
pub use ring::{Ring, ring};
pub use sleepers::{Sleepers, sleepers};
pub use victim::{Victim, victim};

/// Name, what it shows, and its tables.
pub type Scenario = (&'static str, &'static str, fn() -> Vec<Table>);

/// All experiments.
pub const ALL: [Scenario; 8] = [
    ("model", "DCQCN's queue and marks beside its fluid model", model::tables),
    (
        "convergence",
        "flows that join one by one: rates and queue over time",
        convergence::tables,
    ),
    (
        "incast",
        "N senders to one receiver, with and without PFC",
        incast::tables,
    ),
    (
        "victim",
        "a flow that shares links with an incast, but not its bottleneck",
        victim::tables,
    ),
    (
        "parking-lot",
        "a flow over several bottlenecks beside one flow at each",
        parking_lot::tables,
    ),
    ("ring", "all-reduce rings across an oversubscribed Clos", ring::tables),
    ("sleepers", "hosts whose thread sleeps, by controller", sleepers::tables),
    ("loss", "goodput by loss and window", loss::tables),
];

/// The congestion control of all hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Control {
    /// None.
    None,
    /// DCQCN.
    Dcqcn,
    /// The window by delay.
    Delay,
}

impl Control {
    /// All.
    pub const ALL: [Self; 3] = [Self::None, Self::Dcqcn, Self::Delay];

    /// With its default parameters.
    pub fn algorithm(self) -> Algorithm {
        match self {
            Self::None => Algorithm::None,
            Self::Dcqcn => Algorithm::Dcqcn(DcqcnConfig::default()),
            Self::Delay => Algorithm::Delay(DelayConfig::default()),
        }
    }

    /// The default configuration with this control.
    pub fn config(self, seed: u64) -> Config {
        let mut host = HostConfig::default();
        host.endpoint.congestion.algorithm = self.algorithm();
        Config {
            seed,
            host,
            ..Config::default()
        }
    }
}

impl fmt::Display for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "none",
            Self::Dcqcn => "dcqcn",
            Self::Delay => "delay",
        })
    }
}

/// Results of an experiment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Table {
    /// What it shows, with its parameters.
    pub title: String,
    /// Names of its columns, with units.
    pub columns: Vec<&'static str>,
    /// Values as written.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// As CSV, without the title.
    // public: the command writes it
    pub fn csv(&self) -> String {
        let head = self.columns.join(",");
        let rows = self.rows.iter().map(|row| row.join(","));
        std::iter::once(head).chain(rows).map(|line| line + "\n").collect()
    }
}

/// As a table of Markdown.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.title)?;
        writeln!(f, "| {} |", self.columns.join(" | "))?;
        writeln!(f, "|{}", "---|".repeat(self.columns.len()))?;
        self.rows
            .iter()
            .try_for_each(|row| writeln!(f, "| {} |", row.join(" | ")))
    }
}

fn millis(millis: u64) -> Instant {
    Instant(millis * 1_000_000)
}

fn micros(time: Duration) -> String {
    format!("{:.0}", time.as_secs_f64() * 1e6)
}

fn kilobytes(bytes: f64) -> String {
    format!("{:.1}", bytes / 1000.0)
}
