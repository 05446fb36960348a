//! The report of `--out_json`: that of the C tools, as valid JSON.
//!
//! Names and units are the C tools'. Names that they spell in several ways have one spelling here,
//! strings are quoted, `results` has every size of `-a`, and no value is left out.

use serde_json::{Map, Value, json};

use super::layout::{self, Header, Latencies, Rates};
use super::printer::{Directions, ResultRow};
use super::settings::{Exchange, Settings};
use super::tool::{Kind, Verb};
use crate::failure::Failure;
use crate::output::Output;

pub(crate) fn report(settings: &Settings, header: &Header, lines: &[ResultRow], cycles_per_ns: f64) -> Value {
    let results: Vec<Value> = lines
        .iter()
        .map(|line| Value::Object(result(settings, line, cycles_per_ns)))
        .collect();
    json!({ "test_info": test_info(settings, header), "results": results })
}

fn test_info(settings: &Settings, header: &Header) -> Value {
    let on_off = |value: bool| if value { "ON" } else { "OFF" };
    let (verb, kind) = (settings.tool.verb, settings.tool.kind);
    let mut info = Map::new();
    let mut fact = |when: bool, name: &str, value: Value| {
        if when {
            info.insert(name.to_owned(), value);
        }
    };
    fact(true, "test", layout::title(settings).replace(' ', "_").into());
    fact(settings.group.is_some(), "MultiCast_runs", "on_UD".into());
    fact(true, "Device", header.device.clone().into());
    fact(true, "Dual_port", "OFF".into());
    fact(true, "Number_of_qps", settings.qps.into());
    fact(true, "Transport_type", "IB".into());
    fact(true, "Connection_type", layout::transport(settings.transport).into());
    fact(true, "Using_SRQ", on_off(settings.shared_receive).into());
    fact(true, "PCIe_relax_order", on_off(header.relaxed_ordering).into());
    fact(true, "ibv_wr_API", on_off(header.new_post).into());
    fact(
        settings.events,
        "Test_with_events",
        format!("{}_comp{}", header.device, settings.vector).into(),
    );
    fact(true, "TX_depth", settings.tx_depth.into());
    fact(settings.post_list > 1, "Post_List", settings.post_list.into());
    fact(
        settings.recv_post_list > 1,
        "Recv_Post_List",
        settings.recv_post_list.into(),
    );
    fact(verb == Verb::Send, "RX_depth", settings.rx_depth.into());
    fact(kind == Kind::Bw, "CQ_Moderation", settings.cq_mod.into());
    fact(true, "Mtu", header.mtu.into());
    let link = if header.infiniband { "IB" } else { "Ethernet" };
    fact(true, "Link_type", link.into());
    fact(header.gid_index.is_some(), "GID_index", header.gid_index.into());
    match verb {
        Verb::Read | Verb::Atomic => fact(true, "Outstand_reads", header.outstanding.into()),
        Verb::Write | Verb::Send => fact(true, "Max_inline_data", header.inline_bytes.into()),
    }
    fact(
        true,
        "rdma_cm_QPs",
        on_off(settings.exchange == Exchange::RdmaCm).into(),
    );
    let method = match settings.exchange {
        Exchange::Tcp => "Ethernet",
        Exchange::RdmaCm | Exchange::OverRdmaCm => "rdma_cm",
    };
    fact(true, "Data_ex_method", method.into());
    fact(
        settings.type_of_service.is_some(),
        "TOS",
        settings.type_of_service.into(),
    );
    let unit = match (kind, settings.output.gbits, settings.output.cycles) {
        (Kind::Bw, false, _) => "MiB/s",
        (Kind::Bw, true, _) => "Gb/s",
        (Kind::Lat, _, false) => "usec",
        (Kind::Lat, _, true) => "cycles",
    };
    fact(true, "Unit", unit.into());
    Value::Object(info)
}

fn result(settings: &Settings, line: &ResultRow, cycles_per_ns: f64) -> Map<String, Value> {
    match line {
        ResultRow::Rates {
            total,
            directions,
            cpu_percent,
        } => {
            let mut result = rates(settings, total);
            if let Some(Directions { local, remote }) = directions {
                result.insert("Local".into(), Value::Object(rates(settings, local)));
                result.insert("Remote".into(), Value::Object(rates(settings, remote)));
            }
            with_cpu(settings, result, *cpu_percent)
        }
        ResultRow::Latencies { figures, cpu_percent } => {
            with_cpu(settings, latencies(settings, figures, cycles_per_ns), *cpu_percent)
        }
    }
}

fn with_cpu(settings: &Settings, mut result: Map<String, Value>, cpu_percent: f64) -> Map<String, Value> {
    if settings.output.cpu {
        result.insert("CPU_util".into(), cpu_percent.into());
    }
    result
}

fn rates(settings: &Settings, row: &Rates) -> Map<String, Value> {
    let output = &settings.output;
    let mut result = Map::new();
    result.insert("MsgSize".into(), row.bytes.into());
    result.insert("n_iterations".into(), row.iterations.into());
    if let Some(peak) = row.peak_bytes_per_s {
        result.insert("BW_peak".into(), layout::bandwidth(output, peak).into());
    }
    let average = layout::bandwidth(output, row.average_bytes_per_s);
    result.insert("BW_average".into(), average.into());
    result.insert("MsgRate".into(), (row.messages_per_s / 1e6).into());
    result
}

fn latencies(settings: &Settings, row: &Latencies, cycles_per_ns: f64) -> Map<String, Value> {
    let mut result = Map::new();
    result.insert("MsgSize".into(), row.bytes.into());
    result.insert("n_iterations".into(), row.iterations.into());
    for (name, ns) in [
        ("t_min", row.min_ns),
        ("t_max", row.max_ns),
        ("t_typical", row.p50_ns),
        ("t_avg", row.avg_ns),
        ("t_stdev", row.stddev_ns),
        ("percentile_99", row.p99_ns),
        ("percentile_99.9", row.p999_ns),
    ] {
        result.insert(name.into(), layout::time(&settings.output, ns, cycles_per_ns).into());
    }
    result.insert("tps_average".into(), row.trips_per_s.into());
    result
}

/// # Errors
/// [`Failure::Test`] where the file cannot be written.
pub(crate) fn write(output: Output, report: &Value) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(report).map_err(|e| Failure::test(format!("cannot write JSON: {e}")))?;
    output.finish((text + "\n").as_bytes())
}
