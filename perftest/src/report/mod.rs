//! A measurement as a value: one [`Report`], and the ways to print it.
//!
//! Where a number comes from is part of it: the device, the kind of link and the memory path are in every report, so a figure of a
//! software device can never pass for one of hardware. What casts doubt on a figure is a [`Warning`], a value too, with what to do.

mod json;
mod text;
mod warning;

use serde::{Deserialize, Serialize};

use crate::exchange::GpuEnd;
use crate::limits::Entry;
use crate::stats::{Bandwidth, LatencyFigures};
use crate::sweep::Skipped;

pub(crate) use json::print as print_json;
pub(crate) use text::{Table, print_line};
pub(crate) use warning::{Warning, of_this_machine};

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
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    tool: &'static str,
    version: &'static str,
    test: String,
    device: String,
    /// What carries the packets: of two ends that differ, the softer.
    pub(crate) link: LinkKind,
    /// How this end's messages are reached; of a GPU's memory, how that is registered.
    pub(crate) memory: &'static str,
    /// The GPU in whose memory this end's messages lie.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gpu: Option<GpuEnd>,
    /// The same of the other end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer_gpu: Option<GpuEnd>,
    /// What the port could carry, where that is hardware, bytes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) line_rate_bytes_per_s: Option<f64>,
    /// What the machine itself allows, as `doorbell limits` measures it; of a sweep.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) limits: Vec<Entry>,
    /// One row per size, in the order they ran.
    pub(crate) results: Vec<Row>,
    /// The points of a sweep that could not be measured, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) skipped: Vec<Skipped>,
}

impl Report {
    /// A report with no rows yet, of messages in host memory.
    pub(crate) fn new(test: String, device: String, link: LinkKind) -> Report {
        let version = env!("CARGO_PKG_VERSION");
        Report {
            tool: "doorbell",
            version,
            test,
            device,
            link,
            memory: "host",
            gpu: None,
            peer_gpu: None,
            line_rate_bytes_per_s: None,
            limits: Vec::new(),
            results: Vec::new(),
            skipped: Vec::new(),
        }
    }
}

/// The figures of one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(crate) enum Row {
    /// Of a bandwidth test.
    Bandwidth(BandwidthRow),
    /// Of a latency test.
    Latency(LatencyRow),
}

/// The figures of one size of a bandwidth test.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct BandwidthRow {
    /// Message size in bytes.
    pub(crate) bytes: u64,
    /// Messages measured, over all queue pairs.
    pub(crate) iterations: u64,
    /// Best stretch, bytes per second.
    pub(crate) bw_peak_bytes_per_s: f64,
    /// Whole measurement, bytes per second.
    pub(crate) bw_avg_bytes_per_s: f64,
    /// Whole measurement, messages per second.
    pub(crate) msg_rate_per_s: f64,
    /// What the two GPUs' own copies of so many bytes come to, where both ends' messages lie in GPU memory that this process sees, bytes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) raw_copy_bytes_per_s: Option<f64>,
}

impl BandwidthRow {
    /// The row for messages of so many bytes.
    pub(crate) fn new(bytes: u64, figures: &Bandwidth) -> BandwidthRow {
        BandwidthRow {
            bytes,
            iterations: figures.messages,
            bw_peak_bytes_per_s: figures.peak_per_s * bytes as f64,
            bw_avg_bytes_per_s: figures.average_per_s * bytes as f64,
            msg_rate_per_s: figures.average_per_s,
            raw_copy_bytes_per_s: None,
        }
    }
}

/// The figures of one size of a latency test.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct LatencyRow {
    /// Message size in bytes.
    pub(crate) bytes: u64,
    /// Round trips measured.
    pub(crate) iterations: u64,
    /// Shortest, ns.
    pub(crate) lat_min_ns: f64,
    /// Median, ns.
    pub(crate) lat_p50_ns: f64,
    /// Mean, ns.
    pub(crate) lat_avg_ns: f64,
    /// Standard deviation, ns.
    pub(crate) lat_stddev_ns: f64,
    /// 99th percentile, ns.
    pub(crate) lat_p99_ns: f64,
    /// 99.9th percentile, ns.
    pub(crate) lat_p999_ns: f64,
    /// Longest, ns.
    pub(crate) lat_max_ns: f64,
}

impl LatencyRow {
    /// The row for messages of so many bytes.
    pub(crate) fn new(bytes: u64, figures: &LatencyFigures) -> LatencyRow {
        LatencyRow {
            bytes,
            iterations: figures.count,
            lat_min_ns: figures.min,
            lat_p50_ns: figures.p50,
            lat_avg_ns: figures.avg,
            lat_stddev_ns: figures.stddev,
            lat_p99_ns: figures.p99,
            lat_p999_ns: figures.p999,
            lat_max_ns: figures.max,
        }
    }
}
