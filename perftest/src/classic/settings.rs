//! What a command line of a classic tool comes to: every value that the test needs, the defaults filled in and contradictions refused.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::tool::Tool;
use crate::device::Which;

/// How queue pairs are connected (`-c`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Transport {
    /// Reliable.
    Rc,
    /// Unreliable.
    Uc,
    /// Datagrams.
    Ud,
}

/// How the two ends get to know of each other's queue pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Exchange {
    /// Over TCP.
    Socket,
    /// The connection manager connects them (`-R`).
    Managed,
    /// Over a queue pair that the connection manager has connected for that (`-z`).
    OverManaged,
}

/// How long each size is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Length {
    /// So many messages on each queue pair (`-n`).
    Iterations(u64),
    /// So long (`-D`), of which the first and the last `margin` (`-f`) do not count.
    Duration {
        /// All of it.
        duration: Duration,
        /// What does not count at each end.
        margin: Duration,
    },
}

/// Which atomic (`-A`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Atomic {
    /// FETCH_AND_ADD.
    FetchAdd,
    /// CMP_AND_SWAP.
    CompareSwap,
}

/// Which GPU's memory messages lie in (`--use_cuda`, `--use_cuda_bus_id`, `--use_cuda_dmabuf`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Cuda {
    /// It.
    pub(crate) gpu: Which,
    /// Whether its memory is registered by dma-buf or not at all.
    pub(crate) dmabuf: bool,
}

/// How fast to send (`--rate_limit`), as software paces it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Rate {
    /// Messages per second if `per_message`, else bytes per second.
    pub(crate) value: f64,
    /// Whether the value counts messages (`--rate_units=p`).
    pub(crate) per_message: bool,
    /// Messages that go together (`--burst_size`).
    pub(crate) burst: u32,
}

/// What results look like.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Output {
    /// Gb/s instead of MiB/s (`--report_gbits`).
    pub(crate) gbits: bool,
    /// CPU cycles instead of microseconds (`-C`).
    pub(crate) cycles: bool,
    /// All results (`-H`), in the order they came if `unsorted` (`-U`).
    pub(crate) histogram: bool,
    /// See `histogram`.
    pub(crate) unsorted: bool,
    /// Both directions by themselves (`--report-both`).
    pub(crate) both: bool,
    /// Nothing but one figure (`--output`).
    pub(crate) only: Option<Only>,
    /// CPU use (`--cpu_util`).
    pub(crate) cpu: bool,
    /// No peak (`-N`).
    pub(crate) no_peak: bool,
    /// Where a report in JSON goes (`--out_json`, `--out_json_file`).
    pub(crate) json: Option<PathBuf>,
}

/// The one figure of `--output`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Only {
    /// Average bandwidth.
    Bandwidth,
    /// Message rate.
    MessageRate,
    /// Average latency.
    Latency,
}

/// Everything.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Settings {
    /// The tool.
    pub(crate) tool: Tool,
    /// The server; without one this is the server.
    pub(crate) host: Option<String>,
    /// TCP port, or the connection manager's (`-p`).
    pub(crate) port: u16,
    /// The address that the connection comes from, or that the server listens on (`--bind_source_ip`, `--source_ip`).
    pub(crate) source: Option<IpAddr>,
    /// See [`Exchange`].
    pub(crate) exchange: Exchange,
    /// The device (`-d`).
    pub(crate) device: Option<String>,
    /// Its port (`-i`).
    pub(crate) device_port: u8,
    /// Index in the port's GID table (`-x`).
    pub(crate) gid_index: Option<u8>,
    /// Whether a GID of IPv6 is chosen (`--ipv6`).
    pub(crate) ipv6: bool,
    /// Whether the port must be InfiniBand's, or must not (`--force-link`).
    pub(crate) infiniband: Option<bool>,
    /// See [`Transport`].
    pub(crate) transport: Transport,
    /// Path MTU in bytes (`-m`); without it the port's, or the peer's where that is less.
    pub(crate) mtu: Option<u32>,
    /// Local ACK timeout code (`-u`).
    pub(crate) timeout: u8,
    /// `--retry_count`.
    pub(crate) retry: u8,
    /// Service level (`-S`).
    pub(crate) service_level: u8,
    /// Traffic class (`--tclass`, or `-T`).
    pub(crate) traffic_class: u8,
    /// The type of service of connections of the connection manager (`-T`).
    pub(crate) type_of_service: Option<u8>,
    /// Hop limit (`-L`).
    pub(crate) hop_limit: u8,
    /// Flow label (`--flow_label`).
    pub(crate) flow_label: u32,
    /// `--pkey_index`.
    pub(crate) pkey_index: u16,
    /// Message sizes in bytes, in the order they run: one, or with `-a` all powers of two to 8 MiB (of UD to the MTU).
    pub(crate) sizes: Vec<u64>,
    /// Whether they are `-a`'s.
    pub(crate) all: bool,
    /// See [`Length`].
    pub(crate) length: Length,
    /// Measure again and again, a report for each duration (`--run_infinitely`).
    pub(crate) forever: bool,
    /// Both ways (`-b`).
    pub(crate) bidirectional: bool,
    /// From the server to the client (`--reversed`).
    pub(crate) reversed: bool,
    /// Queue pairs (`-q`).
    pub(crate) qps: u32,
    /// Requests in flight on each (`-t`).
    pub(crate) tx_depth: u32,
    /// Receives posted on each, or in the shared receive queue (`-r`).
    pub(crate) rx_depth: u32,
    /// Requests that are posted together (`-l`).
    pub(crate) post_list: u32,
    /// Receives that are posted together (`--recv_post_list`).
    pub(crate) recv_post_list: u32,
    /// A completion for so many requests (`-Q`).
    pub(crate) cq_mod: u32,
    /// Whether that is so because lists are so long, and not because `-Q` says it.
    pub(crate) list_moderates: bool,
    /// Messages of up to so many bytes travel inline (`-I`); without it the C tools' default for the tool, transport and device.
    pub(crate) inline: Option<u32>,
    /// READs or atomics outstanding on each queue pair (`-o`); without it what the device has.
    pub(crate) outstanding: Option<u8>,
    /// See [`Atomic`].
    pub(crate) atomic: Atomic,
    /// Sleep until events come (`-e`).
    pub(crate) events: bool,
    /// The completion vector that they come on (`-X`).
    pub(crate) vector: u32,
    /// One receive queue for all queue pairs (`--use-srq`).
    pub(crate) shared_receive: bool,
    /// A memory region for each queue pair (`--mr_per_qp`).
    pub(crate) region_per_qp: bool,
    /// Memory from huge pages (`--use_hugepages`).
    pub(crate) huge_pages: bool,
    /// See [`Cuda`].
    pub(crate) cuda: Option<Cuda>,
    /// Registered so that the device may write a region's bytes in any order (not with `--disable_pcie_relaxed`).
    pub(crate) relaxed_ordering: bool,
    /// Send a round before measuring (`--perform_warm_up`).
    pub(crate) warm_up: bool,
    /// See [`Rate`].
    pub(crate) rate: Option<Rate>,
    /// Time between two messages of a latency test (`--latency_gap`).
    pub(crate) gap: Option<Duration>,
    /// No warning of the CPU's frequency (`-F`).
    pub(crate) no_frequency_warning: bool,
    /// Average bandwidth that must be reached, in the unit of the output (`-w`).
    pub(crate) least_bandwidth: Option<f64>,
    /// Message rate in Mpps that must be reached (`-y`).
    pub(crate) least_rate: Option<f64>,
    /// Time between the end of the test and the end of queue pairs (`--wait_destroy`).
    pub(crate) wait_destroy: Duration,
    /// See [`Output`].
    pub(crate) output: Output,
}

impl Settings {
    /// Whether this end is the server.
    pub(crate) fn is_server(&self) -> bool {
        self.host.is_none()
    }

    /// Whether this end is the one that messages go to (that is read from, in a READ test).
    pub(crate) fn receives(&self) -> bool {
        self.is_server() != self.reversed
    }

    /// Whether time ends the test (`-D`).
    pub(crate) fn is_timed(&self) -> bool {
        matches!(self.length, Length::Duration { .. })
    }
}
