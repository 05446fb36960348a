//! A measurement as a value: one [`Report`], and the ways to print it.
//!
//! Where a number comes from is part of it: the device, the kind of link and the memory path are in every report, so a figure of a
//! software device can never pass for one of hardware. What casts doubt on a figure is a [`Warning`], a value too, with what to do.

mod columns;
mod json;
mod prometheus;
mod row;
mod text;
mod threshold;
mod warning;

use serde::{Deserialize, Serialize};

use crate::exchange::GpuEnd;
use crate::plan::{Extent, Plan};
use crate::stats::ClockReport;
use crate::sweep::{Skipped, Swept};

pub(crate) use columns::{Extra, help as column_help};
pub(crate) use json::print as print_json;
pub(crate) use prometheus::{Metrics, exposition};
pub(crate) use row::{BandwidthRow, CoordinatedOmission, LatencyRow, PERCENTILES, Row, Shape};
pub(crate) use text::{Table, print_line};
pub(crate) use threshold::Thresholds;
pub(crate) use warning::{Code, Warning, table as warning_table};

/// What carries the packets; the later, the softer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LinkKind {
    /// An RDMA adapter.
    Hardware,
    /// A device that the kernel does in software: rxe, siw.
    KernelSoft,
    /// The userspace device, between two processes of one host.
    SoftLocal,
    /// The userspace device over UDP.
    SoftUdp,
}

impl LinkKind {
    /// The name that results carry.
    pub(crate) fn name(self) -> &'static str {
        match self {
            LinkKind::Hardware => "hardware",
            LinkKind::KernelSoft => "kernel-soft",
            LinkKind::SoftLocal => "soft-local",
            LinkKind::SoftUdp => "soft-udp",
        }
    }
}

/// What a test measured, and on what.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    /// `doorbell`.
    pub(crate) tool: String,
    /// Of the program.
    pub(crate) version: String,
    /// As `write_bw`.
    pub(crate) test: String,
    /// This end's device.
    pub(crate) device: String,
    /// What carries the packets: of two ends that differ, the softer.
    pub(crate) link: LinkKind,
    /// How this end's messages are reached; of a GPU's memory, how that is registered.
    pub(crate) memory: String,
    /// The other end's address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) peer: Option<String>,
    /// What was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) settings: Option<Settings>,
    /// What a sweep was asked for, which has no one setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sweep: Option<Swept>,
    /// What time was read from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) clock: Option<ClockReport>,
    /// What casts doubt on the figures.
    #[serde(default)]
    pub(crate) warnings: Vec<Noted>,
    /// What the link itself can carry in one direction, bytes per second, where it has such a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) line_rate_bytes_per_s: Option<f64>,
    /// What the machine itself can do, by the names of `doorbell limits`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) limits: Vec<Limit>,
    /// The GPU in whose memory this end's messages lie.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gpu: Option<GpuEnd>,
    /// The same of the other end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) peer_gpu: Option<GpuEnd>,
    /// One row per size, in the order they ran.
    pub(crate) results: Vec<Row>,
    /// The points of a sweep that could not be measured, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) skipped: Vec<Skipped>,
}

/// What a test was asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// Queue pairs.
    pub(crate) qps: u32,
    /// Requests in flight per queue pair.
    pub(crate) tx_depth: u32,
    /// Requests per doorbell.
    pub(crate) post_list: u32,
    /// A completion is asked for once in so many requests.
    pub(crate) cq_mod: u32,
    /// Messages up to so many bytes travel inline.
    pub(crate) inline_bytes: u32,
    /// Path MTU in bytes; none where it is the port's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) mtu: Option<u32>,
    /// Messages per size, queue pair and repeat; at large sizes a default may be fewer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) iterations: Option<u64>,
    /// Seconds per size and repeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) duration_s: Option<f64>,
    /// Messages per queue pair before measuring starts, where that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) warmup: Option<u64>,
    /// Messages per second, over all queue pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rate_per_s: Option<f64>,
    /// How often each size was measured.
    pub(crate) repeat: u32,
}

impl Settings {
    /// Those of a plan.
    pub(crate) fn of(plan: &Plan) -> Settings {
        let (iterations, duration_s) = match plan.extent {
            Extent::Iterations(n) | Extent::DefaultIterations(n) => (Some(n), None),
            Extent::Seconds(seconds) => (None, Some(seconds)),
        };
        Settings {
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
            repeat: plan.repeat,
        }
    }
}

/// A warning as results carry it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Noted {
    /// Which it is, for programs.
    pub(crate) code: String,
    /// What it says, and what to do.
    pub(crate) message: String,
}

/// What a machine can do, by the name that `doorbell limits` has for it; one of the two figures is there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Limit {
    /// As `memcpy`.
    pub(crate) name: String,
    /// Bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bytes_per_s: Option<f64>,
    /// Nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ns: Option<f64>,
}

impl Report {
    /// A report with no rows yet, of messages in host memory.
    pub(crate) fn new(test: String, device: String, link: LinkKind) -> Report {
        Report {
            tool: "doorbell".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            test,
            device,
            link,
            memory: "host".into(),
            peer: None,
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
