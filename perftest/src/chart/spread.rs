//! Charts of the distribution of latencies: percentiles by size, and CDFs.

use super::pick::{Group, axis, banner, groups, name_of, numbered, sources, x_of};
use super::{Axis, Chart, MAX_SERIES, Point, Scale, Series, Unit};
use crate::document::{Document, Metric, PARAMETERS, Row};

/// The percentiles of a latency row: name, field and fraction.
const PERCENTILES: [(&str, &str, f64); 7] = [
    ("min", "lat_min_ns", 0.0),
    ("p50", "lat_p50_ns", 0.5),
    ("p90", "lat_p90_ns", 0.9),
    ("p99", "lat_p99_ns", 0.99),
    ("p99.9", "lat_p999_ns", 0.999),
    ("p99.99", "lat_p9999_ns", 0.9999),
    ("max", "lat_max_ns", 1.0),
];

/// Every percentile by size, a chart for each group.
pub(super) fn percentiles(of: &[(usize, &Document)], x: &str) -> Vec<Chart> {
    let all: Vec<_> = groups(of, x).into_iter().filter(|group| group.rows.len() > 1).collect();
    let (mut xs, mut ys) = (Vec::new(), Vec::new());
    for row in all.iter().flat_map(|group| &group.rows) {
        xs.extend(x_of(row, x).map(|metric| metric.value));
        ys.extend(
            PERCENTILES
                .iter()
                .filter_map(|(_, key, _)| row.metric(key))
                .map(|metric| metric.value),
        );
    }
    let x_axis = axis(x, &xs);
    // More charts than these would not be read: the tables have all values.
    let shown = all.len().min(MAX_SERIES);
    let several = shown > 1;
    all[..shown]
        .iter()
        .enumerate()
        .map(|(number, group)| Chart {
            id: numbered("percentiles", number, several),
            kind: "percentiles",
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
                            let at = (x_of(row, x)?, row.metric(metric)?);
                            Some(Point::of(group.file, row.index, metric, at))
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

/// The CDFs of as many rows as one chart can hold, evenly selected.
pub(super) fn distribution(of: &[(usize, &Document)]) -> Option<Chart> {
    let rows: Vec<_> = of
        .iter()
        .flat_map(|(file, document)| document.rows.iter().map(move |row| (*file, *document, row)))
        .collect();
    let shown = rows.len().min(MAX_SERIES);
    let chosen: Vec<_> = (0..shown)
        .map(|n| rows[n * rows.len().saturating_sub(1) / shown.saturating_sub(1).max(1)])
        .collect();
    // A group per row, for their names.
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
                // Approximated by the row's percentiles.
                _ => ("", from_percentiles(row)),
            };
            Series {
                name: name_of(group, &named),
                style,
                dashed: false,
                is_curve: metric == "lat_cdf" && points.len() > 12,
                points: points
                    .into_iter()
                    .map(|(metric, (fraction, ns))| Point::of(group.file, row.index, metric, (ns, fraction)))
                    .collect(),
            }
        })
        .collect();
    let points = || series.iter().flat_map(|series| &series.points);
    points().next()?;
    let left_out = rows.len() - chosen.len();
    Some(Chart {
        id: "cdf".into(),
        kind: "cdf",
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

fn from_percentiles(row: &Row) -> Vec<(&'static str, (Metric, Metric))> {
    PERCENTILES
        .iter()
        .filter_map(|(_, key, fraction)| {
            let fraction = Metric {
                value: *fraction,
                text: fraction.to_string(),
            };
            Some((*key, (fraction, row.metric(key)?)))
        })
        .collect()
}
