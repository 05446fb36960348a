//! Crossover charts: time over bytes, a line per algorithm, as a self-contained SVG file.

use core::fmt::Write;

use super::table::Row;
use crate::algorithm::Algorithm;

const PANEL: (f64, f64) = (460.0, 320.0);
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 44.0;

/// A colour and a dash pattern per algorithm, legible without colours.
const STYLES: [(&str, &str); 8] = [
    ("#1f6fb4", ""),
    ("#c8443a", ""),
    ("#2c8a4b", ""),
    ("#8855aa", "6 3"),
    ("#b8860b", "6 3"),
    ("#555555", "2 3"),
    ("#0f9a9a", "8 3 2 3"),
    ("#d0588f", "2 3"),
];

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
    let scale = Scale {
        bytes: range(|row| (row.bytes as f64).log2()),
        ns: range(|row| row.ns.log10()),
    };
    let algorithms: Vec<Algorithm> = Algorithm::ALL
        .iter()
        .copied()
        .filter(|algorithm| rows().any(|row| row.choice.algorithm == *algorithm))
        .collect();
    let columns = panels.len().clamp(1, 2);
    let (width, height) = (
        PANEL.0 * columns as f64,
        PANEL.1 * panels.len().div_ceil(columns) as f64 + 40.0,
    );
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"{width}\" \
         height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for (index, (title, rows)) in panels.iter().enumerate() {
        let at = (PANEL.0 * (index % columns) as f64, PANEL.1 * (index / columns) as f64);
        let _ = writeln!(svg, "<g transform=\"translate({} {})\">", at.0, at.1);
        panel(&mut svg, &scale, title, rows, &algorithms);
        svg.push_str("</g>\n");
    }
    legend(&mut svg, &algorithms, width, height - 24.0);
    svg.push_str("</svg>\n");
    svg
}

struct Scale {
    bytes: (f64, f64),
    ns: (f64, f64),
}

impl Scale {
    fn x(&self, log_bytes: f64) -> f64 {
        let (low, high) = self.bytes;
        LEFT + (log_bytes - low) / (high - low).max(1.0) * (PANEL.0 - LEFT - RIGHT)
    }

    fn y(&self, log_ns: f64) -> f64 {
        let (low, high) = (self.ns.0.floor(), self.ns.1.ceil());
        PANEL.1 - BOTTOM - (log_ns - low) / (high - low).max(1.0) * (PANEL.1 - TOP - BOTTOM)
    }
}

fn panel(svg: &mut String, scale: &Scale, title: &str, rows: &[Row], algorithms: &[Algorithm]) {
    let (right, bottom) = (PANEL.0 - RIGHT, PANEL.1 - BOTTOM);
    let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"20\" font-size=\"13\">{title}</text>");
    for power in whole(scale.ns.0.floor(), scale.ns.1.ceil(), 1) {
        let y = scale.y(f64::from(power));
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"#dddddd\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            y + 4.0,
            time(power)
        );
    }
    for power in whole(scale.bytes.0, scale.bytes.1, 4) {
        let x = scale.x(f64::from(power));
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.1} {TOP}V{bottom}\" stroke=\"#eeeeee\"/><text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            bottom + 16.0,
            bytes(power)
        );
    }
    for &algorithm in algorithms {
        let mut points: Vec<(u64, f64)> = rows
            .iter()
            .filter(|row| row.choice.algorithm == algorithm && row.bytes > 0)
            .map(|row| (row.bytes, row.ns))
            .collect();
        points.sort_by_key(|point| point.0);
        let points: Vec<String> = points
            .into_iter()
            .map(|(bytes, ns)| format!("{:.1},{:.1}", scale.x((bytes as f64).log2()), scale.y(ns.log10())))
            .collect();
        let (colour, dash) = style(algorithm);
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\" stroke-dasharray=\"{dash}\"/>",
            points.join(" ")
        );
    }
}

fn legend(svg: &mut String, algorithms: &[Algorithm], width: f64, y: f64) {
    let each = (width - 20.0) / algorithms.len().max(1) as f64;
    for (index, &algorithm) in algorithms.iter().enumerate() {
        let (x, (colour, dash)) = (12.0 + each * index as f64, style(algorithm));
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.1} {y}h22\" stroke=\"{colour}\" stroke-width=\"1.8\" stroke-dasharray=\"{dash}\"/><text x=\"{:.1}\" y=\"{}\" font-size=\"10\">{algorithm}</text>",
            x + 26.0,
            y + 4.0
        );
    }
}

fn style(algorithm: Algorithm) -> (&'static str, &'static str) {
    STYLES[algorithm as usize % STYLES.len()]
}

fn whole(low: f64, high: f64, step: usize) -> impl Iterator<Item = i32> {
    (low.ceil() as i32..=high.floor() as i32).step_by(step)
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
