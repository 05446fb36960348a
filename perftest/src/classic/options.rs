//! From a command line to [`Settings`]: values parsed, defaults filled in, contradictions refused.
//!
//! Defaults and ranges are the C tools', observed in their output for each option. Where they
//! silently correct a value or hang, it is refused here with advice.

mod defaults;

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use doorbell_verbs::Gid;

use super::flags::Support;
use super::getopt::{GivenOption, ParsedArgs};
use super::settings::{Output, Settings, SingleMetric, Transport};
use super::tool::{Kind, Tool, Verb};
use crate::cli::AtomicOperation;
use crate::failure::{Failure, one_line};
use crate::units::parse_bytes;

const DEPTH: RangeInclusive<u32> = 1..=15_000;
/// Messages longer than this complete one by one (cq_mod 1), unless `-Q` is given.
const CQ_MOD_MAX_SIZE: u64 = 8192;
/// The file of `--out_json` without `--out_json_file`.
const JSON_FILE: &str = "perftest_out.json";
/// Duration of each report of `--run_infinitely` without `-D`.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) enum Request {
    Help,
    Version,
    Test(Box<Settings>),
}

/// The options given; the others get their defaults later.
#[derive(Default)]
// fields: one per option of the C tools
struct RawOptions {
    host: Option<String>,
    port: Option<u16>,
    source: Option<IpAddr>,
    rdma_cm: bool,
    over_rdma_cm: bool,
    device: Option<String>,
    device_port: Option<u8>,
    gid_index: Option<u8>,
    ipv6: bool,
    link: Option<bool>,
    transport: Option<Transport>,
    multicast: bool,
    group: Option<Gid>,
    mtu: Option<u32>,
    timeout: Option<u8>,
    retry: Option<u8>,
    service_level: Option<u8>,
    traffic_class: Option<u8>,
    type_of_service: Option<u8>,
    hop_limit: Option<u8>,
    flow_label: Option<u32>,
    pkey_index: Option<u16>,
    size: Option<u64>,
    all: bool,
    iterations: Option<u64>,
    duration: Option<u64>,
    margin: Option<u64>,
    forever: bool,
    bidirectional: bool,
    reversed: bool,
    qps: Option<u32>,
    tx_depth: Option<u32>,
    rx_depth: Option<u32>,
    post_list: Option<u32>,
    recv_post_list: Option<u32>,
    cq_mod: Option<u32>,
    inline: Option<u32>,
    outstanding: Option<u8>,
    atomic: Option<AtomicOperation>,
    events: bool,
    vector: Option<u32>,
    shared_receive: bool,
    region_per_qp: bool,
    huge_pages: bool,
    gpu: Option<usize>,
    gpu_bus: Option<String>,
    dmabuf: bool,
    strict_ordering: bool,
    warm_up: bool,
    rate: Option<f64>,
    rate_unit: Option<char>,
    burst: Option<u32>,
    gap: Option<u64>,
    quiet: bool,
    least_bandwidth: Option<f64>,
    least_rate: Option<f64>,
    wait_destroy: Option<u64>,
    output: Output,
}

/// # Errors
/// [`Failure::Usage`] names the option that cannot be met, with advice.
pub(crate) fn interpret(tool: Tool, line: ParsedArgs) -> Result<Request, Failure> {
    // As in the C tools, these win over all other options.
    for given in &line.options {
        match given.flag.long {
            "help" => return Ok(Request::Help),
            "version" => return Ok(Request::Version),
            _ => {}
        }
    }
    let mut raw = RawOptions::default();
    for given in &line.options {
        apply(&mut raw, tool, given)?;
    }
    let mut operands = line.operands.into_iter();
    raw.host = operands.next();
    if let Some(more) = operands.next() {
        return Err(Failure::usage(format!(
            "'{}' is one operand too many: name one server, or none to be it",
            one_line(&more)
        )));
    }
    contradictions(&raw, tool)?;
    defaults::with_defaults(raw, tool).map(|settings| Request::Test(Box::new(settings)))
}

fn apply(raw: &mut RawOptions, tool: Tool, given: &GivenOption) -> Result<(), Failure> {
    match given.flag.long {
        "all" => raw.all = true,
        "atomic_type" => {
            raw.atomic = Some(match given.value.as_str() {
                "FETCH_AND_ADD" => AtomicOperation::FetchAdd,
                "CMP_AND_SWAP" => AtomicOperation::CompareSwap,
                _ => return Err(invalid_value(given, "FETCH_AND_ADD or CMP_AND_SWAP")),
            });
        }
        "bidirectional" => raw.bidirectional = true,
        "connection" => raw.transport = Some(transport(given, tool)?),
        "report-cycles" => raw.output.cycles = true,
        "ib-dev" => raw.device = Some(given.value.clone()),
        "duration" => raw.duration = Some(number(given, 1..=u64::from(u32::MAX))?),
        "events" => raw.events = true,
        "vector" => raw.vector = Some(number(given, 0..=65_535)?),
        "margin" => raw.margin = Some(number(given, 0..=u64::from(u32::MAX))?),
        "CPU-freq" => raw.quiet = true,
        "report-histogram" => raw.output.histogram = true,
        "report-unsorted" => (raw.output.histogram, raw.output.unsorted) = (true, true),
        "ib-port" => raw.device_port = Some(number(given, 1..=255)?),
        "inline_size" => raw.inline = Some(number(given, 0..=912)?),
        "post_list" => raw.post_list = Some(number(given, DEPTH)?),
        "recv_post_list" => raw.recv_post_list = Some(number(given, DEPTH)?),
        "hop_limit" => raw.hop_limit = Some(number(given, 0..=255)?),
        "mcg" => raw.multicast = true,
        "MGID" => raw.group = Some(group(given)?),
        "mtu" => match number(given, 256..=4096)? {
            mtu @ (256 | 512 | 1024 | 2048 | 4096) => raw.mtu = Some(mtu),
            _ => return Err(invalid_value(given, "256, 512, 1024, 2048 or 4096")),
        },
        "iters" => raw.iterations = Some(number(given, 5..=100_000_000)?),
        "noPeak" => raw.output.no_peak = true,
        "outs" => raw.outstanding = Some(number(given, 1..=128)?),
        "port" => raw.port = Some(number(given, 1..=65_535)?),
        "qp" => raw.qps = Some(number(given, 1..=16_384)?),
        "cq-mod" => raw.cq_mod = Some(number(given, 1..=1024)?),
        "rdma_cm" => raw.rdma_cm = true,
        "rx-depth" => raw.rx_depth = Some(number(given, DEPTH)?),
        "size" => {
            let size = parse_bytes(&given.value)
                .ok()
                .filter(|size| (1..1 << 31).contains(size));
            raw.size =
                Some(size.ok_or_else(|| invalid_value(given, "bytes from 1 to 2147483647, such as 64, 4K or 1M"))?);
        }
        "sl" => raw.service_level = Some(number(given, 0..=15)?),
        "tx-depth" => raw.tx_depth = Some(number(given, DEPTH)?),
        "tos" => raw.type_of_service = Some(number(given, 0..=255)?),
        "qp-timeout" => raw.timeout = Some(number(given, 0..=31)?),
        "limit_bw" => raw.least_bandwidth = Some(fraction(given)?),
        "gid-index" => raw.gid_index = Some(number(given, 0..=255)?),
        "limit_msgrate" => raw.least_rate = Some(fraction(given)?),
        "com_rdma_cm" => raw.over_rdma_cm = true,
        "out_json" => {
            raw.output.json.get_or_insert_with(|| JSON_FILE.into());
        }
        "out_json_file" => raw.output.json = Some(PathBuf::from(&given.value)),
        "cpu_util" => raw.output.cpu = true,
        "force-link" => match given.value.to_ascii_lowercase().as_str() {
            "ib" => raw.link = Some(true),
            "ethernet" => raw.link = Some(false),
            _ => return Err(invalid_value(given, "IB or Ethernet")),
        },
        "ipv6" => raw.ipv6 = true,
        "source_ip" => {
            raw.source = Some(
                given
                    .value
                    .parse()
                    .map_err(|_| invalid_value(given, "an IP address, such as 10.0.0.1"))?,
            );
        }
        "latency_gap" => raw.gap = Some(number(given, 0..=u64::from(u32::MAX))?),
        "mr_per_qp" => raw.region_per_qp = true,
        "output" => raw.output.only = Some(only(given, tool)?),
        // The default here anyway.
        "use_old_post_send" => {}
        "perform_warm_up" => raw.warm_up = true,
        "flow_label" => raw.flow_label = Some(number(given, 0..=0xf_ffff)?),
        "use_cuda" => raw.gpu = Some(number(given, 0..=65_535)?),
        "use_cuda_bus_id" => raw.gpu_bus = Some(given.value.clone()),
        "use_cuda_dmabuf" => raw.dmabuf = true,
        "pkey_index" => raw.pkey_index = Some(number(given, 0..=65_535)?),
        "report-both" => raw.output.both = true,
        "report_gbits" => raw.output.gbits = true,
        "reversed" => raw.reversed = true,
        "run_infinitely" => raw.forever = true,
        "retry_count" => raw.retry = Some(number(given, 0..=7)?),
        "tclass" => raw.traffic_class = Some(number(given, 0..=255)?),
        "use-srq" => raw.shared_receive = true,
        "use_hugepages" => raw.huge_pages = true,
        "wait_destroy" => raw.wait_destroy = Some(number(given, 0..=u64::from(u32::MAX))?),
        "disable_pcie_relaxed" => raw.strict_ordering = true,
        "burst_size" => raw.burst = Some(number(given, DEPTH)?),
        "rate_limit" => {
            let rate = fraction(given)?;
            raw.rate = Some(
                Some(rate)
                    .filter(|rate| *rate > 0.0)
                    .ok_or_else(|| invalid_value(given, "more than 0"))?,
            );
        }
        "rate_units" => match given.value.as_str() {
            "M" | "g" | "p" => raw.rate_unit = given.value.chars().next(),
            _ => return Err(invalid_value(given, "M (MiB/s), g (Gb/s) or p (messages/s)")),
        },
        "rate_limit_type" => match given.value.as_str() {
            "SW" => {}
            _ => return Err(invalid_value(given, "SW: adapters' own limiters are not set up here")),
        },
        other => {
            debug_assert!(
                matches!(given.flag.support, Support::Refused(_)),
                "nothing takes --{other}"
            );
        }
    }
    Ok(())
}

/// A whole number within a range.
fn number<T>(given: &GivenOption, range: RangeInclusive<T>) -> Result<T, Failure>
where
    T: FromStr + PartialOrd + std::fmt::Display,
{
    let value = given.value.parse().ok().filter(|value| range.contains(value));
    value.ok_or_else(|| {
        invalid_value(
            given,
            &format!("a whole number from {} to {}", range.start(), range.end()),
        )
    })
}

/// A number that is not negative.
fn fraction(given: &GivenOption) -> Result<f64, Failure> {
    let value = given
        .value
        .parse()
        .ok()
        .filter(|value: &f64| value.is_finite() && *value >= 0.0);
    value.ok_or_else(|| invalid_value(given, "a number of at least 0"))
}

fn invalid_value(given: &GivenOption, wanted: &str) -> Failure {
    Failure::usage(format!(
        "{} {} ({}): give {wanted}",
        given.flag.name(),
        one_line(&given.value),
        given.flag.what
    ))
}

fn transport(given: &GivenOption, tool: Tool) -> Result<Transport, Failure> {
    match (given.value.as_str(), tool.verb) {
        ("RC", _) => Ok(Transport::Rc),
        ("UC", Verb::Write | Verb::Send) => Ok(Transport::Uc),
        ("UC", _) => Err(Failure::usage(
            "-c UC: an unreliable queue pair does neither READs nor atomics, use RC",
        )),
        ("UD", Verb::Send) => Ok(Transport::Ud),
        ("UD", _) => Err(Failure::usage(
            "-c UD: datagrams are for SENDs, use RC, or ib_send_bw and ib_send_lat",
        )),
        ("XRC", _) => Err(Failure::usage(
            "-c XRC is not supported: use RC, with --use-srq for a shared receive queue",
        )),
        ("DC" | "SRD", _) => Err(Failure::usage(format!(
            "-c {} is not supported: it is an extension of one vendor's library, use RC",
            given.value
        ))),
        _ => Err(invalid_value(given, "RC, UC or UD")),
    }
}

/// Sixteen bytes separated by colons, each decimal or, after 0x, hexadecimal.
fn group(given: &GivenOption) -> Result<Gid, Failure> {
    let byte = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u8::from_str_radix(digits, 16),
        None => text.parse(),
    };
    let bytes: Option<Vec<u8>> = given.value.split(':').map(|text| byte(text).ok()).collect();
    let bytes = bytes.and_then(|bytes| <[u8; 16]>::try_from(bytes).ok());
    bytes
        .map(Gid)
        .ok_or_else(|| invalid_value(given, "sixteen bytes, such as 0:0:0:0:0:0:0:0:0:0:255:255:239:1:2:3"))
}

fn only(given: &GivenOption, tool: Tool) -> Result<SingleMetric, Failure> {
    match (given.value.as_str(), tool.kind) {
        ("bandwidth", Kind::Bw) => Ok(SingleMetric::Bandwidth),
        ("message_rate", Kind::Bw) => Ok(SingleMetric::MessageRate),
        ("latency", Kind::Lat) => Ok(SingleMetric::Latency),
        (_, Kind::Bw) => Err(invalid_value(given, "bandwidth or message_rate")),
        (_, Kind::Lat) => Err(invalid_value(given, "latency")),
    }
}

fn contradictions(raw: &RawOptions, tool: Tool) -> Result<(), Failure> {
    let timed = raw.duration.is_some() || raw.forever;
    let send = tool.verb == Verb::Send;
    let gpu = raw.gpu.is_some() || raw.gpu_bus.is_some();
    let refused = [
        (
            timed && raw.all,
            "-a goes with -n, not with -D: measure one size after the other with -s",
        ),
        (timed && raw.events, "-e goes with -n, not with -D"),
        (
            timed && raw.output.histogram,
            "-H and -U print the samples of -n messages: a test of -D keeps none",
        ),
        (
            raw.forever && send && raw.bidirectional,
            "--run_infinitely does not go with -b for SENDs",
        ),
        (
            raw.forever && raw.rate.is_some(),
            "--run_infinitely does not go with --rate_limit",
        ),
        (raw.output.cpu && !timed, "--cpu_util goes with -D SECONDS"),
        (raw.output.both && !raw.bidirectional, "--report-both goes with -b"),
        (
            raw.reversed && raw.bidirectional,
            "--reversed does not go with -b, which sends both ways",
        ),
        (
            raw.gpu.is_some() && raw.gpu_bus.is_some(),
            "--use_cuda and --use_cuda_bus_id both name a GPU: leave one out",
        ),
        (
            raw.dmabuf && !gpu,
            "--use_cuda_dmabuf goes with --use_cuda or --use_cuda_bus_id",
        ),
        (
            gpu && tool.verb == Verb::Atomic,
            "--use_cuda: the results of atomics are read by the CPU: leave it out",
        ),
        (
            gpu && tool.verb == Verb::Write && tool.kind == Kind::Lat,
            "--use_cuda: ib_write_lat polls the last byte of a message, which the CPU cannot do in a GPU's memory: use ib_send_lat, ib_read_lat or doorbell lat write --gpu",
        ),
        (
            gpu && raw.inline.is_some_and(|bytes| bytes > 0),
            "-I does not go with --use_cuda: the CPU copies the inline payload",
        ),
        (
            gpu && raw.huge_pages,
            "--use_hugepages is for the host's memory, --use_cuda for a GPU's: leave one out",
        ),
        (
            gpu && raw.all && (tool.kind == Kind::Lat || send),
            "-a does not go with --use_cuda here: measure one size after the other with -s",
        ),
        (raw.vector.is_some() && !raw.events, "-X goes with -e"),
        (
            raw.rdma_cm && raw.over_rdma_cm,
            "-R and -z are two ways to connect: leave one out",
        ),
        (
            raw.rdma_cm && raw.transport == Some(Transport::Uc),
            "-R connects RC and UD: the connection manager connects no UC",
        ),
        (raw.group.is_some() && !raw.multicast, "-M goes with -g"),
        (
            raw.multicast && raw.rdma_cm,
            "-g does not go with -R: the ends of a group find each other by -z, or over TCP",
        ),
        (
            raw.multicast && raw.bidirectional,
            "-g does not go with -b: the server's queue pair is in the group, and the client sends",
        ),
        (
            raw.multicast && raw.qps.is_some_and(|qps| qps > 1),
            "-g has one queue pair: leave -q out",
        ),
        (
            raw.type_of_service.is_some() && !raw.rdma_cm,
            "-T goes with -R; --tclass sets the traffic class of other queue pairs",
        ),
        (
            raw.burst.is_some() && raw.rate.is_none(),
            "--burst_size goes with --rate_limit",
        ),
        (
            raw.rate_unit.is_some() && raw.rate.is_none(),
            "--rate_units goes with --rate_limit",
        ),
        (
            raw.rate.is_some() && (tool.verb == Verb::Atomic || send && raw.bidirectional),
            "--rate_limit does not go with atomics, nor with -b for SENDs",
        ),
        (
            raw.output.only.is_some() && raw.output.histogram,
            "--output prints one figure, -H and -U all: leave one out",
        ),
    ];
    match refused.iter().find(|(is, _)| *is) {
        Some((_, why)) => Err(Failure::usage(*why)),
        None => Ok(()),
    }
}
