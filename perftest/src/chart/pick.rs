//! Chooses the charts of results: bandwidth and message rate, latency and its distribution,
//! collectives.

use std::collections::{BTreeMap, BTreeSet};

use super::spread::{distribution, percentiles};
use super::{Axis, Chart, MAX_SERIES, Mark, Point, Scale, Series, Unit};
use crate::document::{Document, Kind, Metric, PARAMETERS, Row};

pub(crate) fn ids() -> [&'static str; 7] {
    ["bandwidth", "rate", "latency", "percentiles", "cdf", "busbw", "time"]
}

struct ChartKind {
    id: &'static str,
    kind: Kind,
    title: &'static str,
    about: &'static str,
    metric: &'static str,
    half_width: Option<&'static str>,
    unit: Unit,
    log: bool,
}

macro_rules! chart_kinds {
    ($($id:literal $kind:ident $title:literal $metric:literal $half_width:expr, $unit:ident log: $log:literal => $about:literal;)*) => {
        &[$(ChartKind {
            id: $id,
            kind: Kind::$kind,
            title: $title,
            about: $about,
            metric: $metric,
            half_width: $half_width,
            unit: Unit::$unit,
            log: $log,
        }),*]
    };
}

const CHART_KINDS: &[ChartKind] = chart_kinds! {
    "bandwidth" Bandwidth "Bandwidth" "bw_avg_bytes_per_s" Some("bw_ci95_bytes_per_s"), BytesPerS log: false
        => "Average bandwidth over the whole measurement of each point (bw_avg_bytes_per_s).";
    "rate" Bandwidth "Message rate" "msg_rate_per_s" None, PerS log: true
        => "Messages per second over the whole measurement of each point (msg_rate_per_s).";
    "latency" Latency "Median latency" "lat_p50_ns" Some("lat_ci95_ns"), Ns log: true
        => "Half of all messages took at most so long (lat_p50_ns).";
    "busbw" Collective "Bus bandwidth" "busbw_bytes_per_s" None, BytesPerS log: false
        => "Bus bandwidth as nccl-tests computes it, out of place (busbw_bytes_per_s).";
    "time" Collective "Time of a call" "time_us" None, Us log: true
        => "Mean time of a call over all ranks, out of place (time_us).";
};

/// Rows of one file with the same parameters.
#[derive(Clone)]
pub(super) struct Group<'a> {
    pub(super) file: usize,
    pub(super) document: &'a Document,
    /// Values of [`PARAMETERS`], and of the size where that is not on the x axis.
    pub(super) key: Vec<Option<String>>,
    pub(super) rows: Vec<&'a Row>,
}

pub(crate) fn charts(documents: &[Document]) -> Vec<Chart> {
    let mut charts = Vec::new();
    for kind in CHART_KINDS {
        let of: Vec<_> = documents
            .iter()
            .enumerate()
            .filter(|(_, d)| d.kind == kind.kind)
            .collect();
        if of.is_empty() {
            continue;
        }
        let x = x_axis(&of);
        charts.extend(of_kind(kind, &of, x));
        if kind.id == "latency" {
            charts.extend(percentiles(&of, x));
            charts.extend(distribution(&of));
        }
    }
    charts
}

/// The parameter on the x axis: the size, unless there is a single size and another swept
/// parameter.
fn x_axis(of: &[(usize, &Document)]) -> &'static str {
    let distinct = |key: &str| {
        let rows = of.iter().flat_map(|(_, document)| &document.rows);
        rows.filter_map(|row| x_of(row, key).map(|metric| metric.text))
            .collect::<BTreeSet<_>>()
            .len()
    };
    if distinct("bytes") > 1 {
        return "bytes";
    }
    let swept = ["tx_depth", "qps", "post_list", "inline_bytes", "ranks"];
    let most = swept.into_iter().max_by_key(|key| (distinct(key), *key == "tx_depth"));
    most.filter(|key| distinct(key) > 1).unwrap_or("bytes")
}

pub(super) fn x_of(row: &Row, key: &str) -> Option<Metric> {
    if key == "bytes" {
        return Some(Metric {
            value: row.bytes as f64,
            text: row.bytes.to_string(),
        });
    }
    let value = row.parameter_number(key)?;
    let text = row.parameter(key)?;
    (value >= 0.0).then_some(Metric { value, text })
}

pub(super) fn axis(key: &str, values: &[f64]) -> Axis {
    let (label, unit) = match key {
        "bytes" => ("message size (bytes)", Unit::Bytes),
        "tx_depth" => ("requests in flight per queue pair", Unit::Count),
        "qps" => ("queue pairs", Unit::Count),
        "post_list" => ("requests per doorbell", Unit::Count),
        "inline_bytes" => ("inline up to (bytes)", Unit::Bytes),
        _ => ("ranks", Unit::Count),
    };
    // 0 cannot be on a logarithmic axis.
    let scale = if values.contains(&0.0) {
        Scale::linear(values.iter().copied().fold(0.0, f64::max))
    } else {
        Scale::log2(values)
    };
    Axis {
        label: label.into(),
        scale,
        unit,
    }
}

/// Groups rows that differ only in `x`.
pub(super) fn groups<'a>(of: &[(usize, &'a Document)], x: &str) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    for &(file, document) in of {
        let follow = followers(document, x);
        for row in &document.rows {
            let key: Vec<_> = std::iter::once((x != "bytes").then(|| row.bytes.to_string()))
                .chain(
                    PARAMETERS
                        .iter()
                        .map(|name| row.parameter(name).filter(|_| !follow.contains(name))),
                )
                .collect();
            match groups.iter_mut().find(|group| group.file == file && group.key == key) {
                Some(group) => group.rows.push(row),
                None => groups.push(Group {
                    file,
                    document,
                    key,
                    rows: vec![row],
                }),
            }
        }
    }
    for group in &mut groups {
        group.rows.sort_by(|a, b| {
            let of = |row| x_of(row, x).map_or(0.0, |metric| metric.value);
            of(a).total_cmp(&of(b))
        });
    }
    groups
}

/// Parameters that depend on the one on the x axis: they vary, but no two rows of one x differ in
/// them. Examples: a smaller depth at large sizes, an algorithm chosen by size.
fn followers(document: &Document, x: &str) -> Vec<&'static str> {
    let follows = |name: &&str| {
        let mut by_x: BTreeMap<Option<String>, Option<String>> = BTreeMap::new();
        let mut values = BTreeSet::new();
        let one_each = document.rows.iter().all(|row| {
            let value = row.parameter(name);
            values.insert(value.clone());
            let at = x_of(row, x).map(|metric| metric.text);
            *by_x.entry(at).or_insert_with(|| value.clone()) == value
        });
        *name == x || one_each && values.len() > 1
    };
    PARAMETERS.into_iter().filter(follows).collect()
}

/// The parameters that distinguish a group from the others, as text.
pub(super) fn name_of(group: &Group<'_>, all: &[Group<'_>]) -> String {
    let mut words = Vec::new();
    if all.iter().any(|other| other.file != group.file) {
        words.push(format!("{} ({})", group.document.file, group.document.device));
    }
    if all.iter().any(|other| other.document.mode != group.document.mode) {
        words.push(group.document.title());
    }
    for (index, value) in group.key.iter().enumerate() {
        let differs = all.iter().any(|other| other.key[index] != group.key[index]);
        if let (true, Some(value)) = (differs, value) {
            words.push(match index.checked_sub(1).map(|index| PARAMETERS[index]) {
                None => value
                    .parse()
                    .map_or_else(|_| value.clone(), |bytes| Unit::Bytes.show(bytes)),
                Some("qps") if value == "1" => "1 QP".into(),
                Some("qps") => format!("{value} QPs"),
                Some("tx_depth") => format!("depth {value}"),
                Some("inline_bytes") => format!("inline {value}"),
                Some("post_list") => format!("post list {value}"),
                Some("ranks") => format!("{value} ranks"),
                Some("paced_rate_per_s") => format!("{value}/s"),
                Some(name @ ("root" | "channels")) => format!("{name} {value}"),
                Some(_) => value.clone(),
            });
        }
    }
    if words.is_empty() {
        words.push(format!("{} on {}", group.document.title(), group.document.device));
    }
    words.join(" · ")
}

/// Splits the groups into panels of at most [`MAX_SERIES`], by one differing parameter after the
/// other.
fn panels<'a>(groups: Vec<Group<'a>>) -> Vec<Vec<Group<'a>>> {
    let mut panels = vec![groups];
    // By the file, then by the parameters from the last to the first, so that the most important
    // one varies within a panel.
    let place = |name: &str| {
        PARAMETERS
            .iter()
            .position(|parameter| *parameter == name)
            .map_or(0, |place| place + 1)
    };
    let order = ["inline_bytes", "post_list", "tx_depth", "qps"].map(place);
    for by in std::iter::once(None).chain(order.into_iter().map(Some)) {
        panels = panels
            .into_iter()
            .flat_map(|panel| {
                if panel.len() <= MAX_SERIES {
                    return vec![panel];
                }
                let mut parts: Vec<Vec<Group<'a>>> = Vec::new();
                for group in panel {
                    let same = |other: &Group<'_>| match by {
                        None => other.file == group.file,
                        Some(index) => other.key[index] == group.key[index],
                    };
                    match parts.iter_mut().find(|part| same(&part[0])) {
                        Some(part) => part.push(group),
                        None => parts.push(vec![group]),
                    }
                }
                parts
            })
            .collect();
    }
    // Splits by number what is still too much.
    panels
        .into_iter()
        .flat_map(|panel| panel.chunks(MAX_SERIES).map(<[_]>::to_vec).collect::<Vec<_>>())
        .collect()
}

fn of_kind(kind: &ChartKind, of: &[(usize, &Document)], x: &str) -> Vec<Chart> {
    let all = groups(of, x);
    let point = |group: &Group<'_>, row: &Row| {
        let (x, y) = (x_of(row, x)?, row.metric(kind.metric)?);
        let half_width = kind.half_width.and_then(|key| row.metric(key));
        Some(Point {
            half_width: half_width.map(|half| half.value),
            ..Point::of(group.file, row.index, kind.metric, (x, y))
        })
    };
    let marks = marks(kind, of);
    let values = |axis: fn(&Point) -> f64| -> Vec<f64> {
        let points = all
            .iter()
            .flat_map(|group| group.rows.iter().filter_map(|row| point(group, row)));
        points.map(|point| axis(&point)).collect()
    };
    let mut ys = values(|point| point.y);
    // An interval much wider than the range of values is cut off, instead of compressing the rest.
    let most = ys.iter().copied().fold(0.0, f64::max);
    ys.extend(
        values(|point| point.y + point.half_width.unwrap_or(0.0))
            .into_iter()
            .map(|end| end.min(1.3 * most)),
    );
    ys.extend(marks.iter().map(|mark| mark.value));
    let y = Axis {
        label: match kind.unit {
            Unit::BytesPerS => "bytes per second",
            Unit::PerS => "messages per second",
            _ => "time",
        }
        .into(),
        // A latency of 0 requires a linear axis.
        scale: if kind.log && !ys.contains(&0.0) {
            Scale::log10(&ys)
        } else {
            Scale::linear(ys.iter().copied().fold(0.0, f64::max))
        },
        unit: kind.unit,
    };
    let x_axis = axis(x, &values(|point| point.x));
    let panels = panels(all.clone());
    let several = panels.len() > 1;
    panels
        .iter()
        .enumerate()
        .map(|(number, panel)| {
            let series = panel.iter().enumerate().map(|(style, group)| Series {
                name: name_of(group, if several { panel } else { &all }),
                style,
                dashed: false,
                is_curve: false,
                points: group.rows.iter().filter_map(|row| point(group, row)).collect(),
            });
            let what = common(panel, &all);
            let against = if x == "bytes" { "message size" } else { &x_axis.label };
            Chart {
                id: numbered(kind.id, number, several),
                kind: kind.id,
                title: format!("{} by {against}{what}", kind.title),
                about: about(kind.about, &marks),
                x: x_axis.clone(),
                y: y.clone(),
                series: series.collect(),
                marks: marks.clone(),
                banner: banner(of),
                sources: sources(of),
            }
        })
        .collect()
}

fn about(what: &str, marks: &[Mark]) -> String {
    let mut text = what.to_owned();
    if marks.iter().any(|mark| mark.is_line_rate) {
        text.push_str(" Long dashes: the rate of the port's line.");
    }
    if marks.iter().any(|mark| !mark.is_line_rate) {
        text.push_str(" Dots: what this machine itself was measured to allow (doorbell limits).");
    }
    text
}

pub(super) fn numbered(id: &str, number: usize, several: bool) -> String {
    if several {
        format!("{id}-{}", number + 1)
    } else {
        id.to_owned()
    }
}

/// What the groups of a panel have in common that others have not.
fn common(panel: &[Group<'_>], all: &[Group<'_>]) -> String {
    if panel.len() == all.len() {
        return String::new();
    }
    let same = |index: usize| panel.iter().all(|group| group.key[index] == panel[0].key[index]);
    let mut shared = panel[0].clone();
    let mut others: Vec<_> = all.to_vec();
    for index in 0..shared.key.len() {
        if !same(index) {
            shared.key[index] = None;
            others.iter_mut().for_each(|group| group.key[index] = None);
        }
    }
    if panel.iter().any(|group| group.file != shared.file) {
        others.iter_mut().for_each(|group| group.file = shared.file);
    }
    format!(": {}", name_of(&shared, &others))
}

/// The line rate, and those of the machine's limits that bound such a link.
fn marks(kind: &ChartKind, of: &[(usize, &Document)]) -> Vec<Mark> {
    let mut marks: Vec<Mark> = Vec::new();
    let mut add = |mark: Mark| {
        if !marks
            .iter()
            .any(|there| there.name == mark.name && there.value == mark.value)
        {
            marks.push(mark);
        }
    };
    for (_, document) in of {
        if let ("bandwidth", Some(rate)) = (kind.id, &document.line_rate) {
            add(Mark {
                name: "line rate".into(),
                value: rate.value,
                written: rate.text.clone(),
                is_line_rate: true,
            });
        }
        let bounding: &[&str] = match (kind.id, document.link.as_str()) {
            ("bandwidth", "soft-local") => &["memcpy", "memcpy_again_64k", "process_vm_writev"],
            ("bandwidth", "soft-udp") => &["udp_gso"],
            ("latency", "soft-local") => &["shm_pingpong"],
            _ => &[],
        };
        for limit in document
            .limits
            .iter()
            .filter(|limit| bounding.contains(&limit.name.as_str()))
        {
            if limit.is_time == (kind.id == "latency") {
                add(Mark {
                    name: format!("limit {}", limit.name),
                    value: limit.metric.value,
                    written: limit.metric.text.clone(),
                    is_line_rate: false,
                });
            }
        }
    }
    marks
}

/// The warning that a device is software.
pub(super) fn banner(of: &[(usize, &Document)]) -> Option<String> {
    let soft = of.iter().find(|(_, document)| document.is_software())?.1;
    let which = if of.len() > 1 {
        format!("{}: ", soft.file)
    } else {
        String::new()
    };
    Some(format!(
        "{which}software device ({}), not an RDMA adapter: {}",
        soft.link,
        soft.link_description()
    ))
}

pub(super) fn sources(of: &[(usize, &Document)]) -> Vec<String> {
    of.iter()
        .map(|(_, document)| {
            let file = if of.len() > 1 {
                format!("{}: ", document.file)
            } else {
                String::new()
            };
            format!(
                "{file}{} on {} · link {} · memory {} · doorbell {}",
                document.title(),
                document.device,
                document.link,
                document.memory,
                document.version
            )
        })
        .collect()
}

#[cfg(test)]
#[path = "pick_tests.rs"]
mod tests;
