//! `doorbell report`: charts of results, as one page that needs nothing but itself, or one chart as
//! SVG or PNG.
//!
//! The page has no script and loads nothing, by its own policy, so it can be mailed and archived.
//! Each chart is in it twice, for a screen and for a phone, as text in a drawing does not flow.
//! Below each chart are its figures as a table.

mod caveats;
mod page;

use std::path::PathBuf;

use clap::Args;

use crate::chart::{Chart, Layout, charts, draw, ids};
use crate::document::Document;
use crate::failure::{Failure, one_line};
use crate::output::Output;
use crate::report::print_line;

pub(crate) const EXAMPLES: &str = "\
Examples:
  doorbell report write.json -o report.html            all charts, for a browser
  doorbell report before.json after.json -o both.html  both in each chart
  doorbell report write.json -o rate.svg --chart rate  one chart, for a document

Results are what doorbell bw, lat, coll --json and doorbell sweep write.
Exit status: 0 done, 1 a file cannot be read or written, 2 bad usage or a file that is no result.";

/// The arguments of `doorbell report`.
#[derive(Args, Debug)]
pub(crate) struct ReportArgs {
    /// Results, as bw, lat, coll --json and sweep write them
    #[arg(value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,
    /// What to write: a page where it ends in .html, one chart where it ends in .svg (or .png, in a
    /// build with the feature png)
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Which chart an SVG or PNG is of: bandwidth, rate, latency, percentiles, cdf, busbw or time
    /// [default: the first there is]
    #[arg(long, value_name = "NAME")]
    pub(crate) chart: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Html,
    Svg,
    #[cfg(feature = "png")]
    Png,
}

/// The page of some results, with all of their charts.
pub(crate) fn page_of(documents: &[Document]) -> String {
    page::page(documents, &charts(documents))
}

/// # Errors
/// [`Failure::Usage`] for what is no result and for a chart that there is not; [`Failure::Test`]
/// when a file cannot be read or written.
pub(crate) fn run(args: &ReportArgs) -> Result<(), Failure> {
    let extension = args.output.extension().and_then(|extension| extension.to_str());
    let format = match extension.map(str::to_ascii_lowercase).as_deref() {
        Some("html" | "htm") => Format::Html,
        Some("svg") => Format::Svg,
        #[cfg(feature = "png")]
        Some("png") => Format::Png,
        #[cfg(not(feature = "png"))]
        Some("png") => {
            return Err(Failure::usage(
                "this build writes no PNG: write .svg, or build with --features png",
            ));
        }
        _ => return Err(Failure::usage("--output has to end in .html, .svg or .png")),
    };
    if format == Format::Html && args.chart.is_some() {
        return Err(Failure::usage("--chart is for .svg and .png: a page has all charts"));
    }
    let documents = args
        .files
        .iter()
        .map(|file| Document::read(file))
        .collect::<Result<Vec<_>, _>>()?;
    let charts = charts(&documents);
    let bytes = match format {
        Format::Html => page_of(&documents).into_bytes(),
        Format::Svg => draw(chosen(&charts, args.chart.as_deref())?, &Layout::ALONE).into_bytes(),
        #[cfg(feature = "png")]
        Format::Png => {
            let drawn = draw(chosen(&charts, args.chart.as_deref())?, &Layout::PICTURE);
            crate::chart::png(&drawn)
                .map_err(|reason| Failure::test(format!("cannot make a picture: {}", one_line(&reason))))?
        }
    };
    Output::write(&args.output, &bytes)?;
    print_line(&one_line(&args.output.display().to_string()))
}

/// The chart of a name: its own or that of its kind.
fn chosen<'a>(charts: &'a [Chart], name: Option<&str>) -> Result<&'a Chart, Failure> {
    let found = match name {
        None => charts.first(),
        Some(name) => charts.iter().find(|chart| chart.id == name || chart.kind == name),
    };
    found.ok_or_else(|| {
        let name = name.unwrap_or("any");
        let there: Vec<_> = charts.iter().map(|chart| chart.id.as_str()).collect();
        if ids().contains(&name) {
            Failure::usage(format!(
                "these results make no chart '{name}': there is {}",
                there.join(", ")
            ))
        } else {
            Failure::usage(format!("no chart '{}': there is {}", one_line(name), there.join(", ")))
        }
    })
}
