//! A measurement as a value: one [`Report`], and its exporters (text, JSON, Prometheus).
//!
//! Every report has the device, the link kind and the memory path, so a result of a software device
//! cannot be mistaken for one of hardware.

mod caveats;
mod columns;
mod interval;
mod json;
mod machine;
mod prometheus;
mod row;
mod text;
mod threshold;
mod warning;

use serde::{Deserialize, Serialize};

use crate::exchange::GpuEnd;
use crate::plan::{Mode, Plan, TestLength};
use crate::stats::ClockReport;
use crate::sweep::{Skipped, SweepSettings};

pub(crate) use caveats::{Caveats, distinct};
pub(crate) use columns::{OptionalColumns, help as column_help};
pub(crate) use interval::{BandwidthInterval, Interval, LatencyInterval};
pub(crate) use json::{print as print_json, print_result};
pub(crate) use machine::{Machine, now};
pub(crate) use prometheus::{Metrics, exposition};
pub(crate) use row::{BandwidthRow, CoordinatedOmission, LatencyRow, PERCENTILES, Row, RowParams};
pub(crate) use text::{Table, print_line};
pub(crate) use threshold::Thresholds;
pub(crate) use warning::{Code, Warning, table as warning_table};

/// What carries the packets; ordered from hardware to software.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LinkKind {
    Hardware,
    /// A software device of the kernel: rxe, siw.
    KernelSoft,
    /// The userspace device's shared-memory link between two processes of one host.
    SoftLocal,
    /// The userspace device over UDP.
    SoftUdp,
}

impl LinkKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            LinkKind::Hardware => "hardware",
            LinkKind::KernelSoft => "kernel-soft",
            LinkKind::SoftLocal => "soft-local",
            LinkKind::SoftUdp => "soft-udp",
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
// fields: the keys of the JSON object
pub(crate) struct Report {
    pub(crate) tool: String,
    pub(crate) version: String,
    /// Such as `write_bw`.
    pub(crate) test: String,
    pub(crate) device: String,
    /// What carries the packets: the softer of the two ends' links.
    pub(crate) link: LinkKind,
    /// Memory path of this end's messages: `host`, or how GPU memory is registered.
    pub(crate) memory: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) peer: Option<String>,
    /// When the measurement began; results of older versions have neither.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) time: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) machine: Option<Machine>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) settings: Option<Settings>,
    /// The parameters of a sweep, in place of `settings`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sweep: Option<SweepSettings>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) clock: Option<ClockReport>,
    #[serde(default)]
    pub(crate) warnings: Vec<ReportedWarning>,
    /// Line rate of the link in one direction, bytes per second, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) line_rate_bytes_per_s: Option<f64>,
    /// The machine's own limits, by the names of `doorbell limits`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) limits: Vec<Limit>,
    /// The GPU in whose memory this end's messages lie.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gpu: Option<GpuEnd>,
    /// The GPU in whose memory the peer's messages lie.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) peer_gpu: Option<GpuEnd>,
    pub(crate) results: Vec<Row>,
    /// The points of a sweep that could not be measured, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) skipped: Vec<Skipped>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
// fields: the keys of the JSON object
pub(crate) struct Settings {
    #[serde(flatten)]
    pub(crate) mode: Mode,
    pub(crate) qps: u32,
    /// tx depth: requests in flight per queue pair.
    pub(crate) tx_depth: u32,
    pub(crate) post_list: u32,
    /// CQ moderation: one request in so many is signaled.
    pub(crate) cq_mod: u32,
    /// Messages of up to so many bytes are sent inline.
    pub(crate) inline_bytes: u32,
    /// Path MTU in bytes; none where it is the port's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) mtu: Option<u32>,
    /// Messages per size, queue pair and repeat; a default may be lower at large sizes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) iterations: Option<u64>,
    /// Seconds per size and repeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) duration_s: Option<f64>,
    /// Warm-up messages per queue pair, where given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) warmup: Option<u64>,
    /// Rate limit in messages per second, over all queue pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rate_per_s: Option<f64>,
    /// Seconds between two entries of a row's `intervals`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) interval_s: Option<f64>,
    pub(crate) repeat: u32,
}

impl Settings {
    pub(crate) fn of(plan: &Plan) -> Settings {
        let (iterations, duration_s) = match plan.extent {
            TestLength::Iterations(n) | TestLength::DefaultIterations(n) => (Some(n), None),
            TestLength::Seconds(seconds) => (None, Some(seconds)),
        };
        Settings {
            mode: plan.mode,
            qps: plan.qps,
            tx_depth: plan.tx_depth,
            post_list: plan.post_list,
            cq_mod: plan.cq_mod,
            inline_bytes: plan.inline,
            mtu: plan.mtu,
            iterations,
            duration_s,
            warmup: plan.warmup,
            rate_per_s: plan.rate_per_s,
            interval_s: plan.interval_s,
            repeat: plan.repeat,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReportedWarning {
    pub(crate) code: String,
    /// The message with advice.
    pub(crate) message: String,
}

/// A limit of the machine, by its name in `doorbell limits`; one of the two values is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Limit {
    /// Such as `memcpy`.
    pub(crate) name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bytes_per_s: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ns: Option<f64>,
}

impl Report {
    /// A report without rows, of messages in host memory.
    pub(crate) fn new(test: String, device: String, link: LinkKind) -> Report {
        Report {
            tool: "doorbell".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            test,
            device,
            link,
            memory: "host".into(),
            peer: None,
            time: Some(now()),
            machine: Some(Machine::this()),
            settings: None,
            sweep: None,
            clock: None,
            warnings: Vec::new(),
            line_rate_bytes_per_s: None,
            limits: Vec::new(),
            gpu: None,
            peer_gpu: None,
            results: Vec::new(),
            skipped: Vec::new(),
        }
    }
}
