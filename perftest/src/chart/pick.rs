//! Which charts results make: bandwidth and message rate, latency and its distribution, collectives.

use std::collections::{BTreeMap, BTreeSet};

use super::{Axis, Chart, MOST_SERIES, Mark, Point, Scale, Series, Unit};
use crate::document::{Document, Figure, Kind, PARAMETERS, Row};

/// What `--chart` may ask for.
pub(crate) fn ids() -> [&'static str; 7] {
    ["bandwidth", "rate", "latency", "percentiles", "cdf", "busbw", "time"]
}

/// A chart of one figure of rows of one kind.
struct Sort {
    id: &'static str,
    kind: Kind,
    title: &'static str,
    about: &'static str,
    metric: &'static str,
    half_width: Option<&'static str>,
    unit: Unit,
    log: bool,
}

const SORTS: [Sort; 5] = [
    Sort {
        id: "bandwidth",
        kind: Kind::Bandwidth,
        title: "Bandwidth",
        about: "Average bandwidth over the whole measurement of each point (bw_avg_bytes_per_s).",
        metric: "bw_avg_bytes_per_s",
        half_width: Some("bw_ci95_bytes_per_s"),
        unit: Unit::BytesPerS,
        log: false,
    },
    Sort {
        id: "rate",
        kind: Kind::Bandwidth,
        title: "Message rate",
        about: "Messages per second over the whole measurement of each point (msg_rate_per_s).",
        metric: "msg_rate_per_s",
        half_width: None,
        unit: Unit::PerS,
        log: true,
    },
    Sort {
        id: "latency",
        kind: Kind::Latency,
        title: "Median latency",
        about: "Half of all messages took at most so long (lat_p50_ns).",
        metric: "lat_p50_ns",
        half_width: Some("lat_ci95_ns"),
        unit: Unit::Ns,
        log: true,
    },
    Sort {
        id: "busbw",
        kind: Kind::Collective,
        title: "Bus bandwidth",
        about: "Bus bandwidth as nccl-tests computes it, out of place (busbw_bytes_per_s).",
        metric: "busbw_bytes_per_s",
        half_width: None,
        unit: Unit::BytesPerS,
        log: false,
    },
    Sort {
        id: "time",
        kind: Kind::Collective,
        title: "Time of a call",
        about: "Mean time of a call over all ranks, out of place (time_us).",
        metric: "time_us",
        half_width: None,
        unit: Unit::Us,
        log: true,
    },
];

/// The percentiles of a latency row, the way they are named and which fraction they stand for.
const PERCENTILES: [(&str, &str, f64); 7] = [
    ("min", "lat_min_ns", 0.0),
    ("p50", "lat_p50_ns", 0.5),
    ("p90", "lat_p90_ns", 0.9),
    ("p99", "lat_p99_ns", 0.99),
    ("p99.9", "lat_p999_ns", 0.999),
    ("p99.99", "lat_p9999_ns", 0.9999),
    ("max", "lat_max_ns", 1.0),
];

/// Rows of one file with the same parameters.
#[derive(Clone)]
struct Group<'a> {
    file: usize,
    document: &'a Document,
    /// Values of [`PARAMETERS`], and of the size where that is none of the x axis.
    key: Vec<Option<String>>,
    rows: Vec<&'a Row>,
}

/// All charts that these results make, in the order in which they are shown.
pub(crate) fn charts(documents: &[Document]) -> Vec<Chart> {
    let mut charts = Vec::new();
    for sort in &SORTS {
        let of: Vec<_> = documents
            .iter()
            .enumerate()
            .filter(|(_, d)| d.kind == sort.kind)
            .collect();
        if of.is_empty() {
            continue;
        }
        let x = x_axis(&of);
        charts.extend(of_sort(sort, &of, x));
        if sort.id == "latency" {
            charts.extend(percentiles(&of, x));
            charts.extend(distribution(&of));
        }
    }
    charts
}

/// What the x axis is of: the size, unless there is one size only and something else that was swept.
fn x_axis(of: &[(usize, &Document)]) -> &'static str {
    let distinct = |key: &str| {
        let rows = of.iter().flat_map(|(_, document)| &document.rows);
        rows.filter_map(|row| x_of(row, key).map(|figure| figure.text))
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

fn x_of(row: &Row, key: &str) -> Option<Figure> {
    if key == "bytes" {
        return Some(Figure {
            value: row.bytes as f64,
            text: row.bytes.to_string(),
        });
    }
    let value = row.parameter_number(key)?;
    let text = row.parameter(key)?;
    (value >= 0.0).then_some(Figure { value, text })
}

fn axis(key: &str, values: &[f64]) -> Axis {
    let (label, unit) = match key {
        "bytes" => ("message size (bytes)", Unit::Bytes),
        "tx_depth" => ("requests in flight per queue pair", Unit::Count),
        "qps" => ("queue pairs", Unit::Count),
        "post_list" => ("requests per doorbell", Unit::Count),
        "inline_bytes" => ("inline up to (bytes)", Unit::Bytes),
        _ => ("ranks", Unit::Count),
    };
    // 0 has no place on a logarithmic axis.
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

/// Rows that differ in nothing but `x` belong together.
fn groups<'a>(of: &[(usize, &'a Document)], x: &str) -> Vec<Group<'a>> {
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
            let of = |row| x_of(row, x).map_or(0.0, |figure| figure.value);
            of(a).total_cmp(&of(b))
        });
    }
    groups
}

/// Parameters that follow from what the x axis is of, besides that itself: they vary, and still no two rows of one x differ in them. A test makes do with less depth at large sizes, an
/// algorithm is chosen by size.
fn followers(document: &Document, x: &str) -> Vec<&'static str> {
    let follows = |name: &&str| {
        let mut by_x: BTreeMap<Option<String>, Option<String>> = BTreeMap::new();
        let mut values = BTreeSet::new();
        let one_each = document.rows.iter().all(|row| {
            let value = row.parameter(name);
            values.insert(value.clone());
            let at = x_of(row, x).map(|figure| figure.text);
            *by_x.entry(at).or_insert_with(|| value.clone()) == value
        });
        *name == x || one_each && values.len() > 1
    };
    PARAMETERS.into_iter().filter(follows).collect()
}

/// What tells a group from the others, in words.
fn name_of(group: &Group<'_>, all: &[Group<'_>]) -> String {
    let mut words = Vec::new();
    if all.iter().any(|other| other.file != group.file) {
        words.push(format!("{} ({})", group.document.file, group.document.device));
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
        words.push(format!("{} on {}", group.document.test, group.document.device));
    }
    words.join(" · ")
}

/// Groups that one chart can hold, each part with what its groups have in common: one after the other it splits by what differs.
fn panels<'a>(groups: Vec<Group<'a>>) -> Vec<Vec<Group<'a>>> {
    let mut panels = vec![groups];
    // The file, then from the last parameter of a sweep to the first: those that stay together are of the parameter that matters most.
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
                if panel.len() <= MOST_SERIES {
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
    // Whatever else there is too much of.
    panels
        .into_iter()
        .flat_map(|panel| panel.chunks(MOST_SERIES).map(<[_]>::to_vec).collect::<Vec<_>>())
        .collect()
}

fn of_sort(sort: &Sort, of: &[(usize, &Document)], x: &str) -> Vec<Chart> {
    let all = groups(of, x);
    let point = |group: &Group<'_>, row: &Row| {
        let (x, y) = (x_of(row, x)?, row.figure(sort.metric)?);
        Some(Point {
            x: x.value,
            y: y.value,
            half_width: sort.half_width.and_then(|key| row.figure(key)).map(|half| half.value),
            file: group.file,
            row: row.index,
            metric: sort.metric,
            written: (x.text, y.text),
        })
    };
    let marks = marks(sort, of);
    let values = |axis: fn(&Point) -> f64| -> Vec<f64> {
        let points = all
            .iter()
            .flat_map(|group| group.rows.iter().filter_map(|row| point(group, row)));
        points.map(|point| axis(&point)).collect()
    };
    let mut ys = values(|point| point.y);
    // An interval that is much wider than all there is to see is cut off, and does not press the rest to the ground.
    let most = ys.iter().copied().fold(0.0, f64::max);
    ys.extend(
        values(|point| point.y + point.half_width.unwrap_or(0.0))
            .into_iter()
            .map(|end| end.min(1.3 * most)),
    );
    ys.extend(marks.iter().map(|mark| mark.value));
    let y = Axis {
        label: match sort.unit {
            Unit::BytesPerS => "bytes per second",
            Unit::PerS => "messages per second",
            _ => "time",
        }
        .into(),
        // A latency of 0, or what else has no place on such an axis, gets one on this.
        scale: if sort.log && !ys.contains(&0.0) {
            Scale::log10(&ys)
        } else {
            Scale::linear(ys.iter().copied().fold(0.0, f64::max))
        },
        unit: sort.unit,
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
                id: numbered(sort.id, number, several),
                sort: sort.id,
                title: format!("{} by {against}{what}", sort.title),
                about: about(sort.about, &marks),
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

fn numbered(id: &str, number: usize, several: bool) -> String {
    if several {
        format!("{id}-{}", number + 1)
    } else {
        id.to_owned()
    }
}

/// What all groups of a panel have in common and others have not.
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
fn marks(sort: &Sort, of: &[(usize, &Document)]) -> Vec<Mark> {
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
        if let ("bandwidth", Some(rate)) = (sort.id, &document.line_rate) {
            add(Mark {
                name: "line rate".into(),
                value: rate.value,
                written: rate.text.clone(),
                is_line_rate: true,
            });
        }
        let bounding: &[&str] = match (sort.id, document.link.as_str()) {
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
            if limit.is_time == (sort.id == "latency") {
                add(Mark {
                    name: format!("limit {}", limit.name),
                    value: limit.figure.value,
                    written: limit.figure.text.clone(),
                    is_line_rate: false,
                });
            }
        }
    }
    marks
}

/// Every percentile by size, for each group a chart.
fn percentiles(of: &[(usize, &Document)], x: &str) -> Vec<Chart> {
    let all: Vec<_> = groups(of, x).into_iter().filter(|group| group.rows.len() > 1).collect();
    let (mut xs, mut ys) = (Vec::new(), Vec::new());
    for row in all.iter().flat_map(|group| &group.rows) {
        xs.extend(x_of(row, x).map(|figure| figure.value));
        ys.extend(
            PERCENTILES
                .iter()
                .filter_map(|(_, key, _)| row.figure(key))
                .map(|figure| figure.value),
        );
    }
    let x_axis = axis(x, &xs);
    // More than a few of these nobody looks at: the tables have them all.
    let shown = all.len().min(MOST_SERIES);
    let several = shown > 1;
    all[..shown]
        .iter()
        .enumerate()
        .map(|(number, group)| Chart {
            id: numbered("percentiles", number, several),
            sort: "percentiles",
            title: match several {
                true => format!("Latency percentiles by size: {}", name_of(group, &all)),
                false => "Latency percentiles by size".into(),
            },
            about: "How long the fastest half, nine tenths and so on of the messages took at most (lat_min_ns to lat_max_ns).".into(),
            x: x_axis.clone(),
            y: time_axis(&ys),
            series: PERCENTILES
                .iter()
                .enumerate()
                .map(|(style, (name, metric, _))| Series {
                    name: (*name).into(),
                    style,
                    dashed: matches!(*name, "min" | "max"),
                    is_curve: false,
                    points: group
                        .rows
                        .iter()
                        .filter_map(|row| {
                            let (x, y) = (x_of(row, x)?, row.figure(metric)?);
                            Some(Point {
                                x: x.value,
                                y: y.value,
                                half_width: None,
                                file: group.file,
                                row: row.index,
                                metric,
                                written: (x.text, y.text),
                            })
                        })
                        .collect(),
                })
                .filter(|series| !series.points.is_empty())
                .collect(),
            marks: Vec::new(),
            banner: banner(of),
            sources: sources(of),
        })
        .collect()
}

fn time_axis(values: &[f64]) -> Axis {
    Axis {
        label: "time".into(),
        scale: if values.contains(&0.0) {
            Scale::linear(values.iter().copied().fold(0.0, f64::max))
        } else {
            Scale::log10(values)
        },
        unit: Unit::Ns,
    }
}

/// Which part of the messages took at most how long, for as many rows as one chart can hold, spread over all there are.
fn distribution(of: &[(usize, &Document)]) -> Option<Chart> {
    let rows: Vec<_> = of
        .iter()
        .flat_map(|(file, document)| document.rows.iter().map(move |row| (*file, *document, row)))
        .collect();
    let shown = rows.len().min(MOST_SERIES);
    let chosen: Vec<_> = (0..shown)
        .map(|n| rows[n * rows.len().saturating_sub(1) / shown.saturating_sub(1).max(1)])
        .collect();
    // Rows as groups of their own, to be named.
    let named: Vec<_> = chosen
        .iter()
        .map(|(file, document, row)| Group {
            file: *file,
            document,
            key: std::iter::once(Some(row.bytes.to_string()))
                .chain(PARAMETERS.iter().map(|name| row.parameter(name)))
                .collect(),
            rows: vec![row],
        })
        .collect();
    let series: Vec<_> = named
        .iter()
        .enumerate()
        .map(|(style, group)| {
            let row = group.rows[0];
            let (metric, points) = match row.cdf() {
                cdf if !cdf.is_empty() => ("lat_cdf", cdf.into_iter().map(|pair| ("lat_cdf", pair)).collect()),
                // As far as the row's percentiles tell it.
                _ => ("", from_percentiles(row)),
            };
            Series {
                name: name_of(group, &named),
                style,
                dashed: false,
                is_curve: metric == "lat_cdf" && points.len() > 12,
                points: points
                    .into_iter()
                    .map(|(metric, (fraction, ns))| Point {
                        x: ns.value,
                        y: fraction.value,
                        half_width: None,
                        file: group.file,
                        row: row.index,
                        metric,
                        written: (ns.text, fraction.text),
                    })
                    .collect(),
            }
        })
        .collect();
    let points = || series.iter().flat_map(|series| &series.points);
    points().next()?;
    let left_out = rows.len() - chosen.len();
    Some(Chart {
        id: "cdf".into(),
        sort: "cdf",
        title: "Latency distribution".into(),
        about: format!(
            "Which part of the messages took at most how long; each step up has ten times fewer messages above it{}.",
            match left_out {
                0 => String::new(),
                _ => format!(
                    ". Of {} rows these {} are shown, spread over all",
                    rows.len(),
                    chosen.len()
                ),
            }
        ),
        x: time_axis(&points().map(|point| point.x).collect::<Vec<_>>()),
        y: Axis {
            label: "part of the messages".into(),
            scale: Scale::nines(&points().map(|point| point.y).collect::<Vec<_>>()),
            unit: Unit::Fraction,
        },
        series,
        marks: Vec::new(),
        banner: banner(of),
        sources: sources(of),
    })
}

fn from_percentiles(row: &Row) -> Vec<(&'static str, (Figure, Figure))> {
    PERCENTILES
        .iter()
        .filter_map(|(_, key, fraction)| {
            let fraction = Figure {
                value: *fraction,
                text: fraction.to_string(),
            };
            Some((*key, (fraction, row.figure(key)?)))
        })
        .collect()
}

/// That something in it is no adapter.
fn banner(of: &[(usize, &Document)]) -> Option<String> {
    let soft = of.iter().find(|(_, document)| document.is_software())?.1;
    let which = if of.len() > 1 {
        format!("{}: ", soft.file)
    } else {
        String::new()
    };
    Some(format!(
        "{which}software device ({}), not an RDMA adapter: {}",
        soft.link,
        soft.link_in_words()
    ))
}

fn sources(of: &[(usize, &Document)]) -> Vec<String> {
    of.iter()
        .map(|(_, document)| {
            let file = if of.len() > 1 {
                format!("{}: ", document.file)
            } else {
                String::new()
            };
            format!(
                "{file}{} on {} · link {} · memory {} · doorbell {}",
                document.test, document.device, document.link, document.memory, document.version
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::tests::document;

    fn row(bytes: u64, qps: u64, depth: u64, inline: u64) -> String {
        format!(
            r#"{{"bytes":{bytes},"qps":{qps},"tx_depth":{depth},"inline_bytes":{inline},"bw_avg_bytes_per_s":{},"msg_rate_per_s":3.5}}"#,
            bytes * qps * depth
        )
    }

    #[test]
    fn rows_that_differ_in_size_alone_are_one_series() {
        let rows = [
            row(64, 1, 16, 0),
            row(4096, 1, 16, 0),
            row(64, 8, 16, 0),
            row(4096, 8, 16, 0),
        ]
        .join(",");
        let made = charts(&[document("a.json", "hardware", &rows)]);
        assert_eq!(
            made.iter().map(|chart| chart.id.as_str()).collect::<Vec<_>>(),
            ["bandwidth", "rate"]
        );
        let names: Vec<_> = made[0].series.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(names, ["1 QP", "8 QPs"]);
        assert_eq!(
            made[0].series[1].points[0].written,
            ("64".to_owned(), "8192".to_owned())
        );
        assert_eq!(
            (&made[0].banner, made[0].x.label.as_str()),
            (&None, "message size (bytes)")
        );
    }

    #[test]
    fn depths_that_follow_from_the_size_split_no_series() {
        let rows = [row(64, 1, 128, 0), row(4096, 1, 64, 0), row(65536, 1, 32, 0)].join(",");
        let made = charts(&[document("a.json", "hardware", &rows)]);
        assert_eq!((made[0].series.len(), made[0].series[0].points.len()), (1, 3));
    }

    #[test]
    fn what_was_swept_at_one_size_is_the_x_axis() {
        let rows = [
            row(64, 1, 1, 0),
            row(64, 1, 16, 0),
            row(64, 2, 1, 0),
            row(64, 2, 16, 0),
            row(64, 2, 64, 0),
        ]
        .join(",");
        let made = charts(&[document("a.json", "soft-udp", &rows)]);
        assert_eq!(
            (made[0].x.label.as_str(), made[0].series.len()),
            ("requests in flight per queue pair", 2)
        );
        assert!(made[0].banner.as_ref().unwrap().contains("not an RDMA adapter"));
    }

    #[test]
    fn many_series_are_spread_over_charts_and_none_is_lost() {
        let mut rows = Vec::new();
        for qps in [1, 2, 8] {
            for depth in [1, 16, 128] {
                for inline in [0, 64] {
                    rows.extend([64, 4096].map(|bytes| row(bytes, qps, depth, inline)));
                }
            }
        }
        let made = charts(&[document("a.json", "hardware", &rows.join(","))]);
        let bandwidth: Vec<_> = made.iter().filter(|chart| chart.sort == "bandwidth").collect();
        assert!(bandwidth.len() > 1 && bandwidth.iter().all(|chart| chart.series.len() <= MOST_SERIES));
        let points: BTreeSet<_> = bandwidth
            .iter()
            .flat_map(|chart| {
                chart
                    .series
                    .iter()
                    .flat_map(|series| series.points.iter().map(|point| point.row))
            })
            .collect();
        assert_eq!(points.len(), rows.len());
        assert_eq!(bandwidth[0].id, "bandwidth-1");
        assert!(
            bandwidth.iter().all(|chart| chart.y == bandwidth[0].y),
            "charts that are looked at together have one scale"
        );
    }

    #[test]
    fn latencies_have_percentiles_and_a_distribution() {
        let rows = r#"{"bytes":2,"lat_min_ns":1,"lat_p50_ns":2,"lat_p99_ns":4,"lat_max_ns":9,"lat_cdf":[[0.0,1],[0.5,2],[1.0,9]]},
            {"bytes":4,"lat_min_ns":1,"lat_p50_ns":3,"lat_p99_ns":5,"lat_max_ns":8}"#;
        let made = charts(&[document("a.json", "soft-local", rows)]);
        let ids: Vec<_> = made.iter().map(|chart| chart.id.as_str()).collect();
        assert_eq!(ids, ["latency", "percentiles", "cdf"]);
        assert_eq!(
            made[2].series[0]
                .points
                .iter()
                .map(|p| p.metric)
                .collect::<BTreeSet<_>>()
                .len(),
            1
        );
        assert_eq!(made[2].series[1].points.len(), 4);
    }

    #[test]
    fn lines_that_bound_the_link_are_in_and_others_are_not() {
        let mut result = document("a.json", "soft-udp", &row(64, 1, 1, 0));
        let limit = |name: &str, is_time| crate::document::Limit {
            name: name.into(),
            figure: Figure {
                value: 5e9,
                text: "5e9".into(),
            },
            is_time,
        };
        result.limits = vec![limit("memcpy", false), limit("udp_gso", false), limit("udp_gso", true)];
        let made = charts(&[result.clone()]);
        assert_eq!(
            made[0].marks.iter().map(|mark| mark.name.as_str()).collect::<Vec<_>>(),
            ["limit udp_gso"]
        );
        result.link = "hardware".into();
        result.line_rate = Some(Figure {
            value: 12.5e9,
            text: "12500000000.0".into(),
        });
        let made = charts(&[result]);
        assert_eq!(made[0].marks.len(), 1);
        assert!(made[0].marks[0].is_line_rate && made[0].y.scale.place(12.5e9) <= 1.0);
    }

    #[test]
    fn every_chart_has_a_name_that_can_be_asked_for() {
        for sort in SORTS {
            assert!(ids().contains(&sort.id));
        }
    }
}
