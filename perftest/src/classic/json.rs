//! The report of `--out_json`: that of the C tools, as valid JSON.
//!
//! Names and units are the C tools'. Names that they spell in several ways have one spelling here,
//! strings are quoted, `results` has every size of `-a`, and no value is left out.

use serde_json::{Map, Value, json};

use super::layout::{self, Header, Latencies, Rates, on_off};
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
    let (verb, kind) = (settings.tool.verb, settings.tool.kind);
    let unit = match (kind, settings.output.gbits, settings.output.cycles) {
        (Kind::Bw, false, _) => "MiB/s",
        (Kind::Bw, true, _) => "Gb/s",
        (Kind::Lat, _, false) => "usec",
        (Kind::Lat, _, true) => "cycles",
    };
    let mut info = json!({
        "test": layout::title(settings).replace(' ', "_"),
        "Device": header.device,
        "Dual_port": "OFF",
        "Number_of_qps": settings.qps,
        "Transport_type": "IB",
        "Connection_type": layout::transport(settings.transport),
        "Using_SRQ": on_off(settings.shared_receive),
        "PCIe_relax_order": on_off(header.relaxed_ordering),
        "ibv_wr_API": on_off(header.new_post),
        "TX_depth": settings.tx_depth,
        "Mtu": header.mtu,
        "Link_type": layout::link(header),
        "rdma_cm_QPs": on_off(settings.exchange == Exchange::RdmaCm),
        "Data_ex_method": layout::exchange_method(settings),
        "Unit": unit,
    });
    let fetches = matches!(verb, Verb::Read | Verb::Atomic);
    let facts: [(&str, bool, Value); 10] = [
        ("MultiCast_runs", settings.group.is_some(), "on_UD".into()),
        (
            "Test_with_events",
            settings.events,
            layout::event_channel(settings, header).into(),
        ),
        ("Post_List", settings.post_list > 1, settings.post_list.into()),
        (
            "Recv_Post_List",
            settings.recv_post_list > 1,
            settings.recv_post_list.into(),
        ),
        ("RX_depth", verb == Verb::Send, settings.rx_depth.into()),
        ("CQ_Moderation", kind == Kind::Bw, settings.cq_mod.into()),
        ("GID_index", header.gid_index.is_some(), header.gid_index.into()),
        ("Outstand_reads", fetches, header.outstanding.into()),
        ("Max_inline_data", !fetches, header.inline_bytes.into()),
        (
            "TOS",
            settings.type_of_service.is_some(),
            settings.type_of_service.into(),
        ),
    ];
    for (name, _, value) in facts.into_iter().filter(|(_, is_shown, _)| *is_shown) {
        info[name] = value;
    }
    info
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
