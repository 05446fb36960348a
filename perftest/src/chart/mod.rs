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
pub(crate) use svg::{Form, STYLES, draw};
pub(crate) use text::{Unit, escape};

/// As many series are told apart in one chart.
pub(crate) const MOST_SERIES: usize = 8;

/// A chart.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Chart {
    /// What it is called, in links and files.
    pub(crate) id: String,
    /// What `--chart` calls it and all of its kind.
    pub(crate) sort: &'static str,
    pub(crate) title: String,
    /// What it shows and where its figures come from, in a sentence.
    pub(crate) about: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) series: Vec<Series>,
    /// Lines across it.
    pub(crate) marks: Vec<Mark>,
    /// What has to be said wherever it is shown: that a device is no adapter.
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
    /// Which colour and marker it has.
    pub(crate) style: usize,
    pub(crate) dashed: bool,
    /// Whether there are so many points that the line alone is seen.
    pub(crate) is_curve: bool,
    pub(crate) points: Vec<Point>,
}

/// A point, and what it stands for.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Point {
    pub(crate) x: f64,
    pub(crate) y: f64,
    /// Half the width of the confidence interval of `y`.
    pub(crate) half_width: Option<f64>,
    /// Which file, counted from 0.
    pub(crate) file: usize,
    /// Which row of it, counted from 0.
    pub(crate) row: usize,
    /// Which figure of the row.
    pub(crate) metric: &'static str,
    /// The numbers as they were written.
    pub(crate) written: (String, String),
}

/// A line across a chart, at a value of the y axis.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Mark {
    pub(crate) name: String,
    pub(crate) value: f64,
    /// As it was written.
    pub(crate) written: String,
    /// What a port could carry, and not what the machine was measured to allow.
    pub(crate) is_line_rate: bool,
}
