//! From a command line to [`Settings`]: values parsed, defaults filled in, contradictions refused.
//!
//! Defaults and ranges are the C tools', observed in their output for each option. Where they
//! silently correct a value or hang, it is refused here with advice.

mod defaults;

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use doorbell_verbs::Gid;

use super::flags::Support;
use super::getopt::{GivenOption, ParsedArgs};
use super::settings::{Settings, SingleMetric, Transport};
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

/// The options given: settings as they are, and values on which the defaults of others depend.
#[derive(Default)]
// fields: options of the C tools
struct RawOptions {
    settings: Settings,
    rdma_cm: bool,
    over_rdma_cm: bool,
    transport: Option<Transport>,
    multicast: bool,
    group: Option<Gid>,
    traffic_class: Option<u8>,
    size: Option<u64>,
    iterations: Option<u64>,
    duration: Option<u64>,
    margin: Option<u64>,
    tx_depth: Option<u32>,
    rx_depth: Option<u32>,
    post_list: Option<u32>,
    recv_post_list: Option<u32>,
    cq_mod: Option<u32>,
    vector: Option<u32>,
    gpu: Option<usize>,
    gpu_bus: Option<String>,
    dmabuf: bool,
    strict_ordering: bool,
    rate: Option<f64>,
    rate_unit: Option<char>,
    burst: Option<u32>,
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
    let mut raw = RawOptions {
        settings: Settings::new(tool),
        ..RawOptions::default()
    };
    for given in &line.options {
        apply(&mut raw, given)?;
    }
    let mut operands = line.operands.into_iter();
    raw.settings.host = operands.next();
    if let Some(more) = operands.next() {
        return Err(Failure::usage(format!(
            "'{}' is one operand too many: name one server, or none to be it",
            one_line(&more)
        )));
    }
    contradictions(&raw)?;
    defaults::with_defaults(raw).map(|settings| Request::Test(Box::new(settings)))
}

fn apply(raw: &mut RawOptions, given: &GivenOption) -> Result<(), Failure> {
    let settings = &mut raw.settings;
    let tool = settings.tool;
    match given.flag.long {
        "all" => settings.all = true,
        "atomic_type" => {
            settings.atomic = match given.value.as_str() {
                "FETCH_AND_ADD" => AtomicOperation::FetchAdd,
                "CMP_AND_SWAP" => AtomicOperation::CompareSwap,
                _ => return Err(invalid_value(given, "FETCH_AND_ADD or CMP_AND_SWAP")),
            };
        }
        "bidirectional" => settings.bidirectional = true,
        "connection" => raw.transport = Some(transport(given, tool)?),
        "report-cycles" => settings.output.cycles = true,
        "ib-dev" => settings.device = Some(given.value.clone()),
        "duration" => raw.duration = Some(number(given, 1..=u64::from(u32::MAX))?),
        "events" => settings.events = true,
        "vector" => raw.vector = Some(number(given, 0..=65_535)?),
        "margin" => raw.margin = Some(number(given, 0..=u64::from(u32::MAX))?),
        "CPU-freq" => settings.no_frequency_warning = true,
        "report-histogram" => settings.output.histogram = true,
        "report-unsorted" => (settings.output.histogram, settings.output.unsorted) = (true, true),
        "ib-port" => settings.device_port = number(given, 1..=255)?,
        "inline_size" => settings.inline = Some(number(given, 0..=912)?),
        "post_list" => raw.post_list = Some(number(given, DEPTH)?),
        "recv_post_list" => raw.recv_post_list = Some(number(given, DEPTH)?),
        "hop_limit" => settings.hop_limit = number(given, 0..=255)?,
        "mcg" => raw.multicast = true,
        "MGID" => raw.group = Some(group(given)?),
        "mtu" => match number(given, 256..=4096)? {
            mtu @ (256 | 512 | 1024 | 2048 | 4096) => settings.mtu = Some(mtu),
            _ => return Err(invalid_value(given, "256, 512, 1024, 2048 or 4096")),
        },
        "iters" => raw.iterations = Some(number(given, 5..=100_000_000)?),
        "noPeak" => settings.output.no_peak = true,
        "outs" => settings.outstanding = Some(number(given, 1..=128)?),
        "port" => settings.port = number(given, 1..=65_535)?,
        "qp" => settings.qps = number(given, 1..=16_384)?,
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
        "sl" => settings.service_level = number(given, 0..=15)?,
        "tx-depth" => raw.tx_depth = Some(number(given, DEPTH)?),
        "tos" => settings.type_of_service = Some(number(given, 0..=255)?),
        "qp-timeout" => settings.timeout = number(given, 0..=31)?,
        "limit_bw" => settings.least_bandwidth = Some(fraction(given)?),
        "gid-index" => settings.gid_index = Some(number(given, 0..=255)?),
        "limit_msgrate" => settings.least_rate = Some(fraction(given)?),
        "com_rdma_cm" => raw.over_rdma_cm = true,
        "out_json" => {
            settings.output.json.get_or_insert_with(|| JSON_FILE.into());
        }
        "out_json_file" => settings.output.json = Some(PathBuf::from(&given.value)),
        "cpu_util" => settings.output.cpu = true,
        "force-link" => match given.value.to_ascii_lowercase().as_str() {
            "ib" => settings.infiniband = Some(true),
            "ethernet" => settings.infiniband = Some(false),
            _ => return Err(invalid_value(given, "IB or Ethernet")),
        },
        "ipv6" => settings.ipv6 = true,
        "source_ip" => {
            settings.source = Some(
                given
                    .value
                    .parse()
                    .map_err(|_| invalid_value(given, "an IP address, such as 10.0.0.1"))?,
            );
        }
        "latency_gap" => settings.gap = Some(Duration::from_micros(number(given, 0..=u64::from(u32::MAX))?)),
        "mr_per_qp" => settings.region_per_qp = true,
        "output" => settings.output.only = Some(only(given, tool)?),
        // The default here anyway.
        "use_old_post_send" => {}
        "perform_warm_up" => settings.warm_up = true,
        "flow_label" => settings.flow_label = number(given, 0..=0xf_ffff)?,
        "use_cuda" => raw.gpu = Some(number(given, 0..=65_535)?),
        "use_cuda_bus_id" => raw.gpu_bus = Some(given.value.clone()),
        "use_cuda_dmabuf" => raw.dmabuf = true,
        "pkey_index" => settings.pkey_index = number(given, 0..=65_535)?,
        "report-both" => settings.output.both = true,
        "report_gbits" => settings.output.gbits = true,
        "reversed" => settings.reversed = true,
        "run_infinitely" => settings.forever = true,
        "retry_count" => settings.retry = number(given, 0..=7)?,
        "tclass" => raw.traffic_class = Some(number(given, 0..=255)?),
        "use-srq" => settings.shared_receive = true,
        "use_hugepages" => settings.huge_pages = true,
        "wait_destroy" => settings.wait_destroy = Duration::from_secs(number(given, 0..=u64::from(u32::MAX))?),
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

fn contradictions(raw: &RawOptions) -> Result<(), Failure> {
    let settings = &raw.settings;
    let tool = settings.tool;
    let timed = raw.duration.is_some() || settings.forever;
    let send = tool.verb == Verb::Send;
    let gpu = raw.gpu.is_some() || raw.gpu_bus.is_some();
    let why = match () {
        () if timed && settings.all => "-a goes with -n, not with -D: measure one size after the other with -s",
        () if timed && settings.events => "-e goes with -n, not with -D",
        () if timed && settings.output.histogram => {
            "-H and -U print the samples of -n messages: a test of -D keeps none"
        }
        () if settings.forever && send && settings.bidirectional => "--run_infinitely does not go with -b for SENDs",
        () if settings.forever && raw.rate.is_some() => "--run_infinitely does not go with --rate_limit",
        () if settings.output.cpu && !timed => "--cpu_util goes with -D SECONDS",
        () if settings.output.both && !settings.bidirectional => "--report-both goes with -b",
        () if settings.reversed && settings.bidirectional => "--reversed does not go with -b, which sends both ways",
        () if raw.gpu.is_some() && raw.gpu_bus.is_some() => {
            "--use_cuda and --use_cuda_bus_id both name a GPU: leave one out"
        }
        () if raw.dmabuf && !gpu => "--use_cuda_dmabuf goes with --use_cuda or --use_cuda_bus_id",
        () if gpu && tool.verb == Verb::Atomic => {
            "--use_cuda: the results of atomics are read by the CPU: leave it out"
        }
        () if gpu && tool.verb == Verb::Write && tool.kind == Kind::Lat => {
            "--use_cuda: ib_write_lat polls the last byte of a message, which the CPU cannot do in a GPU's memory: use ib_send_lat, ib_read_lat or doorbell lat write --gpu"
        }
        () if gpu && settings.inline.is_some_and(|bytes| bytes > 0) => {
            "-I does not go with --use_cuda: the CPU copies the inline payload"
        }
        () if gpu && settings.huge_pages => {
            "--use_hugepages is for the host's memory, --use_cuda for a GPU's: leave one out"
        }
        () if gpu && settings.all && (tool.kind == Kind::Lat || send) => {
            "-a does not go with --use_cuda here: measure one size after the other with -s"
        }
        () if raw.vector.is_some() && !settings.events => "-X goes with -e",
        () if raw.rdma_cm && raw.over_rdma_cm => "-R and -z are two ways to connect: leave one out",
        () if raw.rdma_cm && raw.transport == Some(Transport::Uc) => {
            "-R connects RC and UD: the connection manager connects no UC"
        }
        () if raw.group.is_some() && !raw.multicast => "-M goes with -g",
        () if raw.multicast && raw.rdma_cm => {
            "-g does not go with -R: the ends of a group find each other by -z, or over TCP"
        }
        () if raw.multicast && settings.bidirectional => {
            "-g does not go with -b: the server's queue pair is in the group, and the client sends"
        }
        () if raw.multicast && settings.qps > 1 => "-g has one queue pair: leave -q out",
        () if settings.type_of_service.is_some() && !raw.rdma_cm => {
            "-T goes with -R; --tclass sets the traffic class of other queue pairs"
        }
        () if raw.burst.is_some() && raw.rate.is_none() => "--burst_size goes with --rate_limit",
        () if raw.rate_unit.is_some() && raw.rate.is_none() => "--rate_units goes with --rate_limit",
        () if raw.rate.is_some() && (tool.verb == Verb::Atomic || send && settings.bidirectional) => {
            "--rate_limit does not go with atomics, nor with -b for SENDs"
        }
        () if settings.output.only.is_some() && settings.output.histogram => {
            "--output prints one figure, -H and -U all: leave one out"
        }
        () => return Ok(()),
    };
    Err(Failure::usage(why))
}
