//! Figures: panels of lines with axes and one legend, as a self-contained SVG file. The charts that
//! tests compare with committed files are drawn by it.

use core::fmt::Write;

const PANEL: (f64, f64) = (460.0, 320.0);
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 44.0;

/// Colours with a dash pattern, legible without colours.
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

/// An axis. A logarithmic one has powers for values.
#[derive(Clone, PartialEq, Debug)]
pub struct Axis {
    range: (f64, f64),
    ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Over a range, with a labelled tick at every `step`-th whole number in it.
    #[must_use]
    pub fn new(range: (f64, f64), step: usize, label: impl Fn(i32) -> String) -> Self {
        let (low, high) = range;
        let ticks = (low.ceil() as i32..=high.floor() as i32).step_by(step.max(1));
        Self {
            range,
            ticks: ticks.map(|value| (f64::from(value), label(value))).collect(),
        }
    }

    /// The position of a value between the two ends, at pixels.
    fn at(&self, value: f64, (from, to): (f64, f64)) -> f64 {
        let (low, high) = self.range;
        from + (value - low) / (high - low).max(1.0) * (to - from)
    }
}

/// A line of a panel.
#[derive(Clone, PartialEq, Debug)]
pub struct Line {
    /// Index of its colour and dash pattern, of which there are eight.
    pub style: usize,
    /// Points, in values of the axes.
    pub points: Vec<(f64, f64)>,
}

/// A panel of a figure.
#[derive(Clone, PartialEq, Debug)]
pub struct Panel {
    /// What it shows, with the unit.
    pub title: String,
    /// The horizontal axis, at least 1 long.
    pub x: Axis,
    /// The vertical axis, at least 1 long.
    pub y: Axis,
    /// Lines.
    pub lines: Vec<Line>,
}

/// Draws panels in two columns, and the legend of their styles below. Titles, labels and names are
/// written as they are: they must not have characters that XML reserves.
#[must_use]
pub fn figure(panels: &[Panel], legend: &[(usize, String)]) -> String {
    let columns = panels.len().clamp(1, 2);
    let (width, height) = (
        PANEL.0 * columns as f64,
        PANEL.1 * panels.len().div_ceil(columns) as f64 + 40.0,
    );
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"{width}\" \
         height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for (index, panel) in panels.iter().enumerate() {
        let at = (PANEL.0 * (index % columns) as f64, PANEL.1 * (index / columns) as f64);
        let _ = writeln!(svg, "<g transform=\"translate({} {})\">", at.0, at.1);
        panel.draw(&mut svg);
        svg.push_str("</g>\n");
    }
    draw_legend(&mut svg, legend, width, height - 24.0);
    svg.push_str("</svg>\n");
    svg
}

impl Panel {
    fn draw(&self, svg: &mut String) {
        let (right, bottom) = (PANEL.0 - RIGHT, PANEL.1 - BOTTOM);
        let x_at = |value| self.x.at(value, (LEFT, right));
        let y_at = |value| self.y.at(value, (bottom, TOP));
        let _ = writeln!(
            svg,
            "<text x=\"{LEFT}\" y=\"20\" font-size=\"13\">{}</text>",
            self.title
        );
        for (value, label) in &self.y.ticks {
            let y = y_at(*value);
            let _ = writeln!(
                svg,
                "<path d=\"M{LEFT} {y:.1}H{right}\" stroke=\"#dddddd\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                LEFT - 6.0,
                y + 4.0,
            );
        }
        for (value, label) in &self.x.ticks {
            let x = x_at(*value);
            let _ = writeln!(
                svg,
                "<path d=\"M{x:.1} {TOP}V{bottom}\" stroke=\"#eeeeee\"/><text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
                bottom + 16.0,
            );
        }
        for line in &self.lines {
            let points: Vec<String> = line
                .points
                .iter()
                .map(|&(x, y)| format!("{:.1},{:.1}", x_at(x), y_at(y)))
                .collect();
            let (colour, dash) = style(line.style);
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\" stroke-dasharray=\"{dash}\"/>",
                points.join(" ")
            );
        }
    }
}

fn draw_legend(svg: &mut String, names: &[(usize, String)], width: f64, y: f64) {
    let each = (width - 20.0) / names.len().max(1) as f64;
    for (index, (number, name)) in names.iter().enumerate() {
        let (x, (colour, dash)) = (12.0 + each * index as f64, style(*number));
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.1} {y}h22\" stroke=\"{colour}\" stroke-width=\"1.8\" stroke-dasharray=\"{dash}\"/><text x=\"{:.1}\" y=\"{}\" font-size=\"10\">{name}</text>",
            x + 26.0,
            y + 4.0
        );
    }
}

fn style(number: usize) -> (&'static str, &'static str) {
    STYLES[number % STYLES.len()]
}
