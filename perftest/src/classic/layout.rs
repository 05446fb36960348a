//! The output of the classic tools, to the column: pure functions from values to text.
//!
//! The C tools' column heads, widths and tabs are an interface: scripts cut by position.
//! docs/book/src/classic.md lists where their numbers differ.

use std::fmt::Write as _;

use super::settings::{Exchange, Output, Settings, Transport};
use super::tool::{Kind, Verb};
use crate::cli::AtomicOperation;

pub(crate) const RULE: &str = "---------------------------------------------------------------------------------------";

/// The facts of a run's header that are not on the command line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    pub(crate) device: String,
    /// InfiniBand link layer; else Ethernet.
    pub(crate) infiniband: bool,
    /// Path MTU in bytes that both ends agreed on.
    pub(crate) mtu: u32,
    /// GID index in use; none on an InfiniBand fabric without `-x`.
    pub(crate) gid_index: Option<u32>,
    /// Messages of up to so many bytes are sent inline.
    pub(crate) inline_bytes: u32,
    /// Outstanding READs or atomics of each queue pair.
    pub(crate) outstanding: u32,
    /// PCIe relaxed ordering of memory regions.
    pub(crate) relaxed_ordering: bool,
    /// Whether requests are posted by `ibv_wr_*`.
    pub(crate) new_post: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Address {
    /// LID of the port; 0 on Ethernet.
    pub(crate) lid: u16,
    pub(crate) qpn: u32,
    /// Initial packet sequence number.
    pub(crate) psn: u32,
    /// Outstanding READs or atomics that the end serves.
    pub(crate) outstanding: u32,
    pub(crate) rkey: u32,
    pub(crate) vaddr: u64,
    /// Its GID, if it sent one.
    pub(crate) gid: Option<[u8; 16]>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    Local,
    Remote,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Rates {
    pub(crate) bytes: u64,
    /// Messages, over all queue pairs.
    pub(crate) iterations: u64,
    /// Peak bandwidth in bytes per second; none with `-N`.
    pub(crate) peak_bytes_per_s: Option<f64>,
    pub(crate) average_bytes_per_s: f64,
    pub(crate) messages_per_s: f64,
}

/// A row of latency, per message: half round trips in a ping-pong.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Latencies {
    pub(crate) bytes: u64,
    /// Samples.
    pub(crate) iterations: u64,
    pub(crate) min_ns: f64,
    pub(crate) max_ns: f64,
    pub(crate) p50_ns: f64,
    pub(crate) avg_ns: f64,
    pub(crate) stddev_ns: f64,
    pub(crate) p99_ns: f64,
    pub(crate) p999_ns: f64,
    /// Samples per second: round trips of a ping-pong.
    pub(crate) trips_per_s: f64,
}

/// C's `%#0WIDTHx`: zero has no prefix.
fn hex(value: u64, width: usize) -> String {
    match value {
        0 => "0".repeat(width),
        value => format!("{value:#0width$x}"),
    }
}

pub(crate) fn waiting() -> String {
    let stars = "*".repeat(36);
    format!("\n{stars}\n* Waiting for client to connect... *\n{stars}")
}

/// The line of a server that waits for the test's queue pairs to be connected (`-R`).
pub(crate) fn waiting_for_queue_pairs() -> String {
    format!(
        " Waiting for client rdma_cm QP to connect\n Please run the same command with the IB/RoCE interface IP\n{RULE}"
    )
}

/// The notice before the header, where requests are posted in lists and `-Q` is not given.
pub(crate) fn post_list_notice() -> String {
    format!("{RULE}\nPost List requested - CQ moderation will be the size of the post list")
}

/// The test's name, such as `RDMA_Write Bidirectional BW Test`.
pub(crate) fn title(settings: &Settings) -> String {
    let mut title = match (settings.tool.verb, settings.atomic) {
        (Verb::Write, _) => "RDMA_Write ",
        (Verb::Read, _) => "RDMA_Read ",
        (Verb::Send, _) => "Send ",
        (Verb::Atomic, AtomicOperation::FetchAdd) => "Atomic FETCH_AND_ADD ",
        (Verb::Atomic, AtomicOperation::CompareSwap) => "Atomic CMP_AND_SWAP ",
    }
    .to_owned();
    if settings.bidirectional {
        title.push_str("Bidirectional ");
    }
    if settings.post_list > 1 {
        title.push_str("Post List ");
    }
    title.push_str(match settings.tool.kind {
        Kind::Bw => "BW ",
        Kind::Lat => "Latency ",
    });
    if settings.group.is_some() {
        title.push_str("Multicast ");
    }
    title + "Test"
}

pub(crate) fn header(settings: &Settings, header: &Header) -> String {
    let mut text = format!("{RULE}\n{:20}{}\n", "", title(settings));
    for (name, value) in facts(settings, header) {
        match name {
            // Two facts share a line, and one has a width of its own.
            "Events" => writeln!(text, " Test with events. Using {value}"),
            "MultiCast" => writeln!(text, " MultiCast {value}"),
            "Device" => writeln!(text, " Dual-port       : OFF\t\tDevice         : {value}"),
            "Number of qps" => writeln!(text, " Number of qps   : {value}\t\tTransport type : IB"),
            "Connection type" => writeln!(
                text,
                " Connection type : {value}\t\tUsing SRQ      : {}",
                on_off(settings.shared_receive)
            ),
            "rdma_cm QPs" => writeln!(text, " rdma_cm QPs\t : {value}"),
            name => writeln!(text, " {name:<16}: {value}"),
        }
        .expect("a String takes all text");
    }
    text + RULE
}

pub(super) fn on_off(value: bool) -> &'static str {
    if value { "ON" } else { "OFF" }
}

pub(crate) fn transport(transport: Transport) -> &'static str {
    match transport {
        Transport::Rc => "RC",
        Transport::Uc => "UC",
        Transport::Ud => "UD",
    }
}

pub(super) fn link(header: &Header) -> &'static str {
    if header.infiniband { "IB" } else { "Ethernet" }
}

pub(super) fn event_channel(settings: &Settings, header: &Header) -> String {
    format!("{}_comp{}", header.device, settings.vector)
}

pub(super) fn exchange_method(settings: &Settings) -> &'static str {
    match settings.exchange {
        Exchange::Tcp => "Ethernet",
        Exchange::RdmaCm | Exchange::OverRdmaCm => "rdma_cm",
    }
}

/// The lines of the header in their order, by name.
fn facts(settings: &Settings, header: &Header) -> Vec<(&'static str, String)> {
    let verb = settings.tool.verb;
    let sends = !settings.receives() || settings.bidirectional;
    let receives = settings.receives() || settings.bidirectional;
    let mut facts = Vec::new();
    let mut fact = |when: bool, name: &'static str, value: String| {
        if when {
            facts.push((name, value));
        }
    };
    fact(settings.events, "Events", event_channel(settings, header));
    fact(settings.group.is_some(), "MultiCast", "runs on UD!".to_owned());
    fact(true, "Device", header.device.clone());
    fact(true, "Number of qps", settings.qps.to_string());
    fact(true, "Connection type", transport(settings.transport).to_owned());
    fact(true, "PCIe relax order", on_off(header.relaxed_ordering).to_owned());
    fact(true, "ibv_wr* API", on_off(header.new_post).to_owned());
    fact(sends, "TX depth", settings.tx_depth.to_string());
    fact(settings.post_list > 1, "Post List", settings.post_list.to_string());
    fact(
        settings.recv_post_list > 1,
        "Recv Post List",
        settings.recv_post_list.to_string(),
    );
    fact(
        verb == Verb::Send && receives,
        "RX depth",
        settings.rx_depth.to_string(),
    );
    fact(
        settings.tool.kind == Kind::Bw,
        "CQ Moderation",
        settings.cq_mod.to_string(),
    );
    fact(true, "Mtu", format!("{}[B]", header.mtu));
    fact(true, "Link type", link(header).to_owned());
    if let Some(index) = header.gid_index {
        fact(true, "GID index", index.to_string());
    }
    match verb {
        Verb::Read | Verb::Atomic => fact(true, "Outstand reads", header.outstanding.to_string()),
        Verb::Write | Verb::Send => fact(true, "Max inline data", format!("{}[B]", header.inline_bytes)),
    }
    fact(
        true,
        "rdma_cm QPs",
        on_off(settings.exchange == Exchange::RdmaCm).to_owned(),
    );
    let method = exchange_method(settings);
    let service = settings
        .type_of_service
        .map(|value| format!(" \tTOS    : {value}"))
        .unwrap_or_default();
    fact(true, "Data ex. method", format!("{method}{service}"));
    facts
}

pub(crate) fn address(settings: &Settings, side: Side, address: &Address) -> String {
    let name = match side {
        Side::Local => "local",
        Side::Remote => "remote",
    };
    let mut text = format!(
        " {name} address: LID {} QPN {} PSN {}",
        hex(address.lid.into(), 4),
        hex(address.qpn.into(), 6),
        hex(address.psn.into(), 6)
    );
    let verb = settings.tool.verb;
    if verb == Verb::Read {
        text += &format!(" OUT {}", hex(address.outstanding.into(), 4));
    }
    if matches!(verb, Verb::Write | Verb::Read) && settings.exchange != Exchange::RdmaCm {
        text += &format!(" RKey {} VAddr {}", hex(address.rkey.into(), 8), hex(address.vaddr, 16));
    }
    if let Some(gid) = address.gid {
        // The C tools print the bytes in decimal.
        let bytes: Vec<String> = gid.iter().map(|byte| format!("{byte:02}")).collect();
        // In the C tools' latency test the client's is a group's, too, under this name.
        let is_group = settings.group.is_some() && settings.is_server() == (side == Side::Local);
        text += &format!("\n {}: {}", if is_group { "MGID" } else { "GID" }, bytes.join(":"));
    }
    text
}

pub(crate) fn column_heads(settings: &Settings) -> String {
    let output = &settings.output;
    let text = match settings.tool.kind {
        Kind::Bw => {
            let unit = if output.gbits { "Gb" } else { "MB" };
            format!(
                " #bytes     #iterations    BW peak[{unit}/sec]    BW average[{unit}/sec]   MsgRate[Mpps]"
            )
        }
        Kind::Lat if settings.is_timed() => " #bytes        #iterations       t_avg[usec]    tps average".to_owned(),
        Kind::Lat => " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] "
            .to_owned(),
    };
    text + if output.cpu { "    CPU_Util[%]" } else { "" }
}

pub(crate) fn bandwidth(output: &Output, bytes_per_s: f64) -> f64 {
    if output.gbits {
        bytes_per_s * 8.0 / 1e9
    } else {
        bytes_per_s / f64::from(1 << 20)
    }
}

fn cpu(output: &Output, percent: f64) -> String {
    if output.cpu {
        format!("\t    {percent:<3.2}")
    } else {
        String::new()
    }
}

/// Averages below this many Gb/s have six decimals and other column widths.
const FINE_GBITS: f64 = 0.1;

pub(crate) fn rates(output: &Output, row: &Rates, cpu_percent: f64) -> String {
    let average = bandwidth(output, row.average_bytes_per_s);
    if output.gbits && average < FINE_GBITS {
        return format!(
            " {:<7}    {:<10}    {:<7.6}            {average:<7.6}            {:<7.6}{}",
            row.bytes,
            row.iterations,
            row.peak_bytes_per_s.map_or(0.0, |peak| bandwidth(output, peak)),
            row.messages_per_s / 1e6,
            cpu(output, cpu_percent)
        );
    }
    format!(
        " {:<7}    {:<10}       {:<7.2}            {:<7.2}\t\t   {:<7.6}{}",
        row.bytes,
        row.iterations,
        row.peak_bytes_per_s.map_or(0.0, |peak| bandwidth(output, peak)),
        average,
        row.messages_per_s / 1e6,
        cpu(output, cpu_percent)
    )
}

/// Nanoseconds in the unit of the columns: microseconds, or cycles with `-C`.
pub(crate) fn time(output: &Output, ns: f64, cycles_per_ns: f64) -> f64 {
    if output.cycles { ns * cycles_per_ns } else { ns / 1e3 }
}

pub(crate) fn latencies(settings: &Settings, row: &Latencies, cycles_per_ns: f64, cpu_percent: f64) -> String {
    let output = &settings.output;
    let time = |ns| time(output, ns, cycles_per_ns);
    let text = if settings.is_timed() {
        format!(
            " {:<7}       {}            {:<7.2}        {:<7.2}",
            row.bytes,
            row.iterations,
            time(row.avg_ns),
            row.trips_per_s
        )
    } else {
        format!(
            " {:<7} {}          {:<7.2}        {:<7.2}      {:<7.2}  \t       {:<7.2}     \t{:<7.2}\t\t{:<7.2} \t\t{:<7.2}",
            row.bytes,
            row.iterations,
            time(row.min_ns),
            time(row.max_ns),
            time(row.p50_ns),
            time(row.avg_ns),
            time(row.stddev_ns),
            time(row.p99_ns),
            time(row.p999_ns)
        )
    };
    text + &cpu(output, cpu_percent)
}

/// The single value of `--output`.
pub(crate) fn single_value(value: f64) -> String {
    format!("{value:.6}")
}

/// All samples of `-H` (sorted) or `-U` (in the order of measurement), numbered.
pub(crate) fn samples(output: &Output, samples_ns: &[f64], cycles_per_ns: f64) -> String {
    let unit = if output.cycles { "cycles" } else { "usec" };
    let mut text = format!("#, {unit}");
    let mut line = |(index, ns): (usize, f64)| {
        let value = time(output, ns, cycles_per_ns);
        let value = if output.cycles {
            format!("{value:.0}")
        } else {
            significant(value)
        };
        write!(text, "\n{}, {value}", index + 1).expect("a String takes all text");
    };
    if output.unsorted {
        samples_ns.iter().copied().enumerate().for_each(&mut line);
    } else {
        let mut sorted = samples_ns.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        sorted.into_iter().enumerate().for_each(&mut line);
    }
    text
}

/// C's `%g`: six significant digits, no trailing zeros, an exponent where the number is very large
/// or small.
fn significant(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return format!("{value}");
    }
    // The exponent after rounding to six digits: 999999.5 is 1e+06.
    let rounded = format!("{value:.5e}");
    let (digits, exponent) = rounded.split_once('e').unwrap_or((&rounded, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let trim = |digits: &str| match digits.contains('.') {
        true => digits.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => digits.to_owned(),
    };
    if (-4..6).contains(&exponent) {
        let places = usize::try_from(5 - exponent).unwrap_or(0);
        trim(&format!("{value:.places$}"))
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{}e{sign}{:02}", trim(digits), exponent.abs())
    }
}
