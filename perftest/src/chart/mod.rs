//! Charts as values, and as SVG and PNG.
//!
//! `pick` makes charts of results, `spread` those of distributions, `scale` has the axes, `svg`
//! draws, `png` rasterises. No chart crate, because every point carries the number as written, with
//! its file and row, for programs that read the chart, and a page's style can change colours and
//! sizes.

mod pick;
#[cfg(feature = "png")]
mod png;
mod scale;
mod spread;
mod svg;
mod text;

use crate::document::Metric;

pub(crate) use pick::{charts, ids};
#[cfg(feature = "png")]
pub(crate) use png::png;
pub(crate) use scale::Scale;
pub(crate) use svg::{Layout, STYLES, draw};
pub(crate) use text::{Unit, escape};

/// The most series that can be distinguished in one chart.
pub(crate) const MAX_SERIES: usize = 8;

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Chart {
    pub(crate) id: String,
    /// Its kind, by the name of `--chart`.
    pub(crate) kind: &'static str,
    pub(crate) title: String,
    /// What it shows and the source of its values, in a sentence.
    pub(crate) about: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) series: Vec<Series>,
    pub(crate) marks: Vec<Mark>,
    /// The warning shown with it: that a device is software.
    pub(crate) banner: Option<String>,
    /// Device, link, memory and version, of each file.
    pub(crate) sources: Vec<String>,
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Axis {
    pub(crate) label: String,
    pub(crate) scale: Scale,
    pub(crate) unit: Unit,
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Series {
    pub(crate) name: String,
    /// Index of its color and marker.
    pub(crate) style: usize,
    pub(crate) dashed: bool,
    /// Whether there are so many points that only the line is visible.
    pub(crate) is_curve: bool,
    pub(crate) points: Vec<Point>,
}

#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Point {
    pub(crate) x: f64,
    pub(crate) y: f64,
    /// Half width of the confidence interval of `y`.
    pub(crate) half_width: Option<f64>,
    pub(crate) file: usize,
    pub(crate) row: usize,
    pub(crate) metric: &'static str,
    /// The numbers as they were written in the file.
    pub(crate) written: (String, String),
}

impl Point {
    /// The metric of a row of a file, without an interval.
    fn of(file: usize, row: usize, metric: &'static str, (x, y): (Metric, Metric)) -> Point {
        Point {
            x: x.value,
            y: y.value,
            half_width: None,
            file,
            row,
            metric,
            written: (x.text, y.text),
        }
    }
}

/// A horizontal line, at a value of the y axis.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Mark {
    pub(crate) name: String,
    pub(crate) value: f64,
    /// As it was written in the file.
    pub(crate) written: String,
    /// A port's line rate, as opposed to a measured limit of the machine.
    pub(crate) is_line_rate: bool,
}
