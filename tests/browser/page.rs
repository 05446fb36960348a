//! Checks of a page's content.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::chromium::{OpenedPage, Screen};

/// The smallest readable text, in CSS pixels.
const SMALLEST_TEXT: f64 = 10.0;
/// Tolerance of a point's position in CSS pixels: markers are not symmetric.
const TOLERANCE: f64 = 1.5;
/// A screenshot with fewer bytes has no chart.
const MIN_SCREENSHOT: usize = 15_000;

/// Checks that the page loaded nothing and logged nothing.
pub(crate) fn check_quiet(opened: &OpenedPage) -> Result<()> {
    ensure!(
        opened.complaints.is_empty(),
        "on the console: {}",
        opened.complaints.join("\n")
    );
    ensure!(opened.requests.is_empty(), "it loads {}", opened.requests.join(" "));
    Ok(())
}

/// All checks of a page with these results on this screen; returns the number of points read.
pub(crate) fn check(opened: &OpenedPage, screen: &Screen, results: &[&Value]) -> Result<usize> {
    check_quiet(opened)?;
    let read = &opened.read;
    ensure!(read["scripts"] == 0, "it has something that runs or loads");
    let (page, window) = (number(&read["width"]["page"])?, number(&read["width"]["screen"])?);
    ensure!(
        page <= window && window == f64::from(screen.width),
        "it is {page} wide on a screen of {window}"
    );
    let size = |at: usize| -> Option<u32> {
        let bytes = opened.screenshot.get(at..at + 4)?;
        Some(u32::from_be_bytes(bytes.try_into().ok()?))
    };
    ensure!(
        size(16) == Some(screen.width * screen.scale) && size(20) >= Some(screen.height * screen.scale),
        "the screenshot has another size"
    );
    ensure!(
        opened.screenshot.len() > MIN_SCREENSHOT,
        "there is nothing on the screenshot"
    );

    ensure!(
        read["banners"][0]
            .as_str()
            .is_some_and(|text| text.contains("Software device")),
        "the page does not say that the device is not hardware"
    );
    let mut points = 0;
    for chart in array(&read["charts"])? {
        let name = chart["chart"].as_str().context("a chart without a name")?;
        ensure!(
            number(&chart["font"])? >= SMALLEST_TEXT,
            "{name}: its text is too small"
        );
        ensure!(
            number(&chart["width"])? <= window,
            "{name}: it is wider than the screen"
        );
        ensure!(
            chart["title"].as_str().is_some_and(|text| !text.is_empty())
                && chart["about"].as_str().is_some_and(|text| !text.is_empty()),
            "{name}: it has no text alternative"
        );
        points += check_positions(chart).with_context(|| name.to_owned())?;
        check_numbers(chart, results).with_context(|| name.to_owned())?;
    }
    check_rows(read, results)?;
    check_tables(read, results)?;
    Ok(points)
}

/// Checks that points are at their position on the axes; returns their number.
fn check_positions(chart: &Value) -> Result<usize> {
    let points = array(&chart["points"])?;
    ensure!(!points.is_empty(), "it has no points");
    for (index, axis) in ["x", "y"].into_iter().enumerate() {
        let scale = |value: f64| match chart["scales"][axis].as_str() {
            Some("log") => value.ln(),
            Some("nines") => -(1.0 - value).log10(),
            _ => value,
        };
        let ticks: Vec<_> = array(&chart["ticks"])?
            .iter()
            .filter(|tick| tick["axis"] == axis)
            .map(|tick| Ok((scale(number(&tick["value"])?), number(&tick["at"])?)))
            .collect::<Result<Vec<_>>>()?
            .into_iter()
            .filter(|(value, _)| value.is_finite())
            .collect();
        let [(first, first_at), .., (last, last_at)] = ticks[..] else {
            anyhow::bail!("its {axis} axis has no ticks");
        };
        for point in points {
            let value = scale(point[axis].as_str().context("a point without a number")?.parse()?);
            if !value.is_finite() {
                // The maximum, past the last percentile.
                continue;
            }
            let expected = first_at + (value - first) / (last - first) * (last_at - first_at);
            let at = number(&point["at"][index])?;
            ensure!(
                (at - expected).abs() <= TOLERANCE,
                "{point} is not at {axis} {expected:.1}"
            );
        }
    }
    Ok(points.len())
}

fn check_numbers(chart: &Value, results: &[&Value]) -> Result<()> {
    for point in array(&chart["points"])? {
        let row = row(results, point)?;
        let (x, y) = (&point["x"], &point["y"]);
        let written = |value: &Value| Value::String(value.to_string());
        let metric = point["metric"].as_str().context("a point of nothing")?;
        if metric == "lat_cdf" {
            let pairs = array(&row["lat_cdf"])?;
            ensure!(
                pairs
                    .iter()
                    .any(|pair| written(&pair[0]) == *y && written(&pair[1]) == *x),
                "{point} is not in its row's distribution"
            );
        } else {
            ensure!(
                written(&row[metric]) == *y && written(&row["bytes"]) == *x,
                "{point} is not what its row has: {row}"
            );
        }
    }
    for mark in array(&chart["marks"])? {
        let limits = results
            .iter()
            .flat_map(|result| array(&result["limits"]).into_iter().flatten());
        let mut figures = limits.flat_map(|limit| [&limit["bytes_per_s"], &limit["ns"]]);
        ensure!(
            figures.any(|figure| Value::String(figure.to_string()) == mark["y"]),
            "{mark} is no limit of the results"
        );
    }
    Ok(())
}

/// Checks that every row appears once in each chart of all rows.
fn check_rows(read: &Value, results: &[&Value]) -> Result<()> {
    for (file, result) in results.iter().enumerate() {
        let rows = array(&result["results"])?;
        let metrics: &[&str] = if rows[0].get("lat_p50_ns").is_some() {
            &["lat_p50_ns"]
        } else {
            &["bw_avg_bytes_per_s", "msg_rate_per_s"]
        };
        for metric in metrics {
            let id = match *metric {
                "lat_p50_ns" => "latency",
                "msg_rate_per_s" => "rate",
                _ => "bandwidth",
            };
            let mut seen = BTreeSet::new();
            for chart in array(&read["charts"])? {
                let of = chart["chart"].as_str().unwrap_or_default();
                if of != id && !of.starts_with(&format!("{id}-")) {
                    continue;
                }
                for point in array(&chart["points"])?.iter().filter(|point| point["file"] == file) {
                    ensure!(point["metric"] == *metric, "{of}: {point} is of something else");
                    ensure!(seen.insert(point["row"].as_u64()), "{of}: {point} appears twice");
                }
            }
            ensure!(
                seen.len() == rows.len(),
                "{id}: {} of {} rows of file {file} are in it",
                seen.len(),
                rows.len()
            );
        }
    }
    let curves = array(&read["charts"])?
        .iter()
        .filter(|chart| chart["chart"] == "cdf")
        .flat_map(|chart| array(&chart["points"]).into_iter().flatten())
        .filter(|point| point["metric"] == "lat_cdf")
        .count();
    let wanted = results
        .iter()
        .any(|result| result["results"][0].get("lat_cdf").is_some());
    ensure!((curves > 0) == wanted, "there are {curves} points of distributions");
    Ok(())
}

/// Checks that the tables hold every value of every row, as written.
fn check_tables(read: &Value, results: &[&Value]) -> Result<()> {
    let cells = array(&read["cells"])?;
    for cell in cells {
        let metric = cell["metric"].as_str().context("a cell of nothing")?;
        ensure!(
            Value::String(row(results, cell)?[metric].to_string()) == cell["value"],
            "{cell} is not what its row has"
        );
    }
    let figures: usize = results
        .iter()
        .flat_map(|result| array(&result["results"]).into_iter().flatten())
        .filter_map(Value::as_object)
        .map(|row| {
            let of = |key: &&String| key.starts_with("bw_") || key.starts_with("lat_") || key.starts_with("msg_rate");
            row.iter().filter(|(key, value)| of(key) && value.is_number()).count()
        })
        .sum();
    ensure!(
        cells.len() >= figures,
        "the tables have {} cells for {figures} figures",
        cells.len()
    );
    Ok(())
}

fn row<'a>(results: &[&'a Value], at: &Value) -> Result<&'a Value> {
    let index = |key: &str| at[key].as_u64().and_then(|index| usize::try_from(index).ok());
    let (file, row) = (index("file").context("no file")?, index("row").context("no row")?);
    results
        .get(file)
        .and_then(|result| result["results"].get(row))
        .with_context(|| format!("{at} is of no row"))
}

fn array(value: &Value) -> Result<&Vec<Value>> {
    value.as_array().with_context(|| format!("{value} is no list"))
}

fn number(value: &Value) -> Result<f64> {
    value.as_f64().with_context(|| format!("{value} is no number"))
}
