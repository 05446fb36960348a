//! Charts as values, and as SVG and PNG.
//!
//! `pick` makes charts of results, `spread` those of how latencies are spread, `scale` says where values lie, `svg` draws and `png` makes pixels of what it drew. We draw ourselves because of what a chart has to carry: every point
//! keeps the number it stands for, to the digit, with the file and row it came from, so that a program can read a chart back; and colours and sizes that a page's style can change.

mod pick;
#[cfg(feature = "png")]
mod png;
mod scale;
mod spread;
mod svg;
mod text;

pub(crate) use pick::{charts, ids};
#[cfg(feature = "png")]
pub(crate) use png::png;
pub(crate) use scale::Scale;
pub(crate) use svg::{Layout, STYLES, draw};
pub(crate) use text::{Unit, escape};

/// The most series that can be distinguished in one chart.
pub(crate) const MAX_SERIES: usize = 8;

/// A chart.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Chart {
    /// Its name in links and files.
    pub(crate) id: String,
    /// Its kind, by the name of `--chart`.
    pub(crate) kind: &'static str,
    pub(crate) title: String,
    /// What it shows and the source of its values, in a sentence.
    pub(crate) about: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) series: Vec<Series>,
    /// Horizontal lines.
    pub(crate) marks: Vec<Mark>,
    /// The warning shown with it: that a device is software.
    pub(crate) banner: Option<String>,
    /// Device, link, memory and version, of each file.
    pub(crate) sources: Vec<String>,
}

/// An axis.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Axis {
    pub(crate) label: String,
    pub(crate) scale: Scale,
    pub(crate) unit: Unit,
}

/// Points that belong together.
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

/// A point, and its source.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Point {
    pub(crate) x: f64,
    pub(crate) y: f64,
    /// Half width of the confidence interval of `y`.
    pub(crate) half_width: Option<f64>,
    /// Index of the file.
    pub(crate) file: usize,
    /// Index of the row in it.
    pub(crate) row: usize,
    /// Metric of the row.
    pub(crate) metric: &'static str,
    /// The numbers as they were written in the file.
    pub(crate) written: (String, String),
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
