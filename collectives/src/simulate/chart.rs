//! Crossover charts: time over bytes, a line per algorithm, as a self-contained SVG file.

use super::figure::{Axis, Line, Panel, figure};
use super::table::Row;
use crate::algorithm::Algorithm;

/// Draws panels of rows side by side with their titles; logarithmic axes with a common scale.
#[must_use]
pub fn chart(panels: &[(String, Vec<Row>)]) -> String {
    let rows = || {
        panels
            .iter()
            .flat_map(|(_, rows)| rows)
            .filter(|row| row.bytes > 0 && row.ns > 0.0)
    };
    let range = |of: fn(&Row) -> f64| {
        rows()
            .map(of)
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
                (low.min(value), high.max(value))
            })
    };
    let (low, high) = range(|row| row.ns.log10());
    let y = Axis::new((low.floor(), high.ceil()), 1, time);
    let x = Axis::new(range(|row| (row.bytes as f64).log2()), 4, bytes);
    let algorithms: Vec<Algorithm> = Algorithm::ALL
        .iter()
        .copied()
        .filter(|algorithm| rows().any(|row| row.choice.algorithm == *algorithm))
        .collect();
    let line = |rows: &[Row], algorithm: Algorithm| {
        let mut of_algorithm: Vec<&Row> = rows
            .iter()
            .filter(|row| row.choice.algorithm == algorithm && row.bytes > 0)
            .collect();
        of_algorithm.sort_by_key(|row| row.bytes);
        Line {
            style: algorithm as usize,
            points: of_algorithm
                .iter()
                .map(|row| ((row.bytes as f64).log2(), row.ns.log10()))
                .collect(),
        }
    };
    let panels: Vec<Panel> = panels
        .iter()
        .map(|(title, rows)| Panel {
            title: title.clone(),
            x: x.clone(),
            y: y.clone(),
            lines: algorithms.iter().map(|&algorithm| line(rows, algorithm)).collect(),
        })
        .collect();
    let legend: Vec<(usize, String)> = algorithms
        .iter()
        .map(|&algorithm| (algorithm as usize, algorithm.to_string()))
        .collect();
    figure(&panels, &legend)
}

fn time(power: i32) -> String {
    let (unit, below) = match power {
        ..=2 => ("ns", 0),
        3..=5 => ("µs", 3),
        6..=8 => ("ms", 6),
        _ => ("s", 9),
    };
    format!("{} {unit}", 10f64.powi(power - below))
}

fn bytes(power: i32) -> String {
    let (unit, below) = match power {
        ..=9 => ("B", 0),
        10..=19 => ("KiB", 10),
        20..=29 => ("MiB", 20),
        _ => ("GiB", 30),
    };
    format!("{} {unit}", 1u64 << (power - below).clamp(0, 62))
}
