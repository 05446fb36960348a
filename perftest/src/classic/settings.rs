//! The parameters of a classic test: every value that it needs, with defaults filled in and
//! contradictions refused.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use doorbell_verbs::Gid;

use super::tool::{Kind, Tool};
use crate::cli::AtomicOperation;
pub(crate) use crate::cli::Transport;
use crate::device::GpuSelector;

/// How the two ends exchange QP information.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Exchange {
    /// Over TCP.
    #[default]
    Tcp,
    /// Over a CM queue pair; the connection manager connects the test's queue pairs as well (`-R`).
    RdmaCm,
    /// Over a CM queue pair (`-z`).
    OverRdmaCm,
}

/// How long each size is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TestLength {
    /// Messages on each queue pair (`-n`).
    Iterations(u64),
    /// A time (`-D`), of which the first and the last `margin` (`-f`) do not count.
    Duration { duration: Duration, margin: Duration },
}

impl Default for TestLength {
    fn default() -> Self {
        TestLength::Iterations(1000)
    }
}

/// The GPU whose memory messages lie in (`--use_cuda`, `--use_cuda_bus_id`, `--use_cuda_dmabuf`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Cuda {
    pub(crate) gpu: GpuSelector,
    /// Whether its memory is registered by dma-buf or not at all.
    pub(crate) dmabuf: bool,
}

/// Rate limit (`--rate_limit`), paced in software.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Rate {
    /// Messages per second if `per_message`, else bytes per second.
    pub(crate) value: f64,
    /// Whether the value counts messages (`--rate_units=p`).
    pub(crate) per_message: bool,
    /// Messages per burst (`--burst_size`).
    pub(crate) burst: u32,
}

/// The format of the results.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Output {
    /// Gb/s instead of MiB/s (`--report_gbits`).
    pub(crate) gbits: bool,
    /// CPU cycles instead of microseconds (`-C`).
    pub(crate) cycles: bool,
    /// All samples (`-H`), in the order of measurement if `unsorted` (`-U`).
    pub(crate) histogram: bool,
    pub(crate) unsorted: bool,
    /// Both directions separately (`--report-both`).
    pub(crate) both: bool,
    /// A single value (`--output`).
    pub(crate) only: Option<SingleMetric>,
    /// CPU use (`--cpu_util`).
    pub(crate) cpu: bool,
    /// No peak (`-N`).
    pub(crate) no_peak: bool,
    /// File of the JSON report (`--out_json`, `--out_json_file`).
    pub(crate) json: Option<PathBuf>,
}

/// The single value of `--output`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SingleMetric {
    /// Average bandwidth.
    Bandwidth,
    MessageRate,
    /// Average latency.
    Latency,
}

#[derive(Clone, PartialEq, Debug, Default)]
// fields: one per option of the C tools
pub(crate) struct Settings {
    pub(crate) tool: Tool,
    /// The server's name; none on the server.
    pub(crate) host: Option<String>,
    /// TCP port, or the connection manager's (`-p`).
    pub(crate) port: u16,
    /// Local address to connect from or listen on (`--bind_source_ip`, `--source_ip`).
    pub(crate) source: Option<IpAddr>,
    pub(crate) exchange: Exchange,
    /// The device (`-d`).
    pub(crate) device: Option<String>,
    /// Its port (`-i`).
    pub(crate) device_port: u8,
    /// GID index (`-x`).
    pub(crate) gid_index: Option<u8>,
    /// Whether a GID of IPv6 is chosen (`--ipv6`).
    pub(crate) ipv6: bool,
    /// Required link layer: InfiniBand or not (`--force-link`).
    pub(crate) infiniband: Option<bool>,
    pub(crate) transport: Transport,
    /// The multicast group of this end (`-g`, `-M`).
    pub(crate) group: Option<Gid>,
    /// Path MTU in bytes (`-m`); default: the port's, or the peer's where that is less.
    pub(crate) mtu: Option<u32>,
    /// Local ACK timeout code (`-u`).
    pub(crate) timeout: u8,
    pub(crate) retry: u8,
    /// Service level (`-S`).
    pub(crate) service_level: u8,
    /// Traffic class (`--tclass`, or `-T`).
    pub(crate) traffic_class: u8,
    /// Type of service of CM connections (`-T`).
    pub(crate) type_of_service: Option<u8>,
    /// Hop limit (`-L`).
    pub(crate) hop_limit: u8,
    pub(crate) flow_label: u32,
    pub(crate) pkey_index: u16,
    /// Message sizes in bytes, in the order they run: one, or with `-a` all powers of two to 8 MiB
    /// (UD: to the MTU).
    pub(crate) sizes: Vec<u64>,
    pub(crate) all: bool,
    pub(crate) length: TestLength,
    /// Measure again and again, with a row for each duration (`--run_infinitely`).
    pub(crate) forever: bool,
    /// Both directions (`-b`).
    pub(crate) bidirectional: bool,
    /// From the server to the client (`--reversed`).
    pub(crate) reversed: bool,
    /// Queue pairs (`-q`).
    pub(crate) qps: u32,
    /// tx depth: requests in flight on each queue pair (`-t`).
    pub(crate) tx_depth: u32,
    /// rx depth: receives posted on each queue pair, or in the shared receive queue (`-r`).
    pub(crate) rx_depth: u32,
    /// Requests per post list (`-l`).
    pub(crate) post_list: u32,
    /// Receives per post list (`--recv_post_list`).
    pub(crate) recv_post_list: u32,
    /// CQ moderation: one completion for so many requests (`-Q`).
    pub(crate) cq_mod: u32,
    /// Whether the CQ moderation follows from the post list, without `-Q`.
    pub(crate) list_moderates: bool,
    /// Inline size (`-I`); default: the C tools' for the tool, transport and device.
    pub(crate) inline: Option<u32>,
    /// Outstanding READs or atomics on each queue pair (`-o`); default: the device's limit.
    pub(crate) outstanding: Option<u8>,
    /// The atomic (`-A`).
    pub(crate) atomic: AtomicOperation,
    /// Sleep on completion events (`-e`).
    pub(crate) events: bool,
    /// Completion vector (`-X`).
    pub(crate) vector: u32,
    /// One shared receive queue for all queue pairs (`--use-srq`).
    pub(crate) shared_receive: bool,
    /// A memory region for each queue pair (`--mr_per_qp`).
    pub(crate) region_per_qp: bool,
    /// Memory from huge pages (`--use_hugepages`).
    pub(crate) huge_pages: bool,
    pub(crate) cuda: Option<Cuda>,
    /// Memory is registered with relaxed ordering (not with `--disable_pcie_relaxed`).
    pub(crate) relaxed_ordering: bool,
    /// Warm-up round before measuring (`--perform_warm_up`).
    pub(crate) warm_up: bool,
    pub(crate) rate: Option<Rate>,
    /// Delay between two messages of a latency test (`--latency_gap`).
    pub(crate) gap: Option<Duration>,
    /// No warning of the CPU frequency (`-F`).
    pub(crate) no_frequency_warning: bool,
    /// Least average bandwidth, in the unit of the output (`-w`).
    pub(crate) least_bandwidth: Option<f64>,
    /// Least message rate in Mpps (`-y`).
    pub(crate) least_rate: Option<f64>,
    /// Delay between the end of the test and the destruction of the queue pairs (`--wait_destroy`).
    pub(crate) wait_destroy: Duration,
    pub(crate) output: Output,
}

impl Settings {
    /// The defaults of what depends on no other option.
    pub(crate) fn new(tool: Tool) -> Settings {
        Settings {
            tool,
            port: 18_515,
            device_port: 1,
            timeout: 14,
            retry: 7,
            hop_limit: 64,
            qps: 1,
            ..Settings::default()
        }
    }

    pub(crate) fn is_server(&self) -> bool {
        self.host.is_none()
    }

    /// Whether messages go to this end (in a READ test: are read from this end).
    pub(crate) fn receives(&self) -> bool {
        self.is_server() != self.reversed
    }

    /// Whether each end sends and receives.
    pub(crate) fn goes_both_ways(&self) -> bool {
        self.bidirectional || self.tool.kind == Kind::Lat
    }

    /// The multicast group that this end receives from.
    pub(crate) fn joined_group(&self) -> Option<Gid> {
        self.group.filter(|_| self.receives() || self.goes_both_ways())
    }

    /// Whether the test is timed (`-D`).
    pub(crate) fn is_timed(&self) -> bool {
        matches!(self.length, TestLength::Duration { .. })
    }
}
