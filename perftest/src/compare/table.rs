//! A comparison as a table on stdout.

use super::{Change, Comparison, Verdict, percent};
use crate::chart::Unit;
use crate::failure::Failure;
use crate::report::{distinct, print_line};

pub(super) fn print(comparison: &Comparison) -> Result<(), Failure> {
    for (name, side) in [("before", &comparison.before), ("after ", &comparison.after)] {
        let mode = match side.mode.as_str() {
            "" => String::new(),
            mode => format!(" | {mode}"),
        };
        print_line(&format!(
            "# {name}: {} | {}{mode} | device {} | link {} | memory {} | doorbell {}",
            side.file, comparison.of, side.device, side.link, side.memory, side.version
        ))?;
        if !side.warnings.is_empty() {
            let codes = distinct(side.warnings.iter().map(|warning| warning.code.as_str()));
            print_line(&format!("#         caveats: {}", codes.join(", ")))?;
        }
    }
    let unknown = comparison.results.iter().any(|change| change.noise == "unknown");
    if unknown {
        print_line(&format!(
            "# noise unknown where there are no repeats (--repeat): changes up to {} are taken for it",
            percent(comparison.noise)
        ))?;
    }
    print_line(&format!(
        "{:>10} {:>14} {:>14} {:>9} {:>20}  {:<8} point",
        "#bytes",
        "before",
        "after",
        "change",
        format!("{} interval", percent(comparison.confidence)),
        "verdict"
    ))?;
    for change in &comparison.results {
        print_line(&line(change))?;
    }
    for (which, points) in [("first", &comparison.only_before), ("second", &comparison.only_after)] {
        for point in points {
            print_line(&format!("# only in the {which}: {point}"))?;
        }
    }
    let count = |verdict| {
        comparison
            .results
            .iter()
            .filter(|change| change.verdict == verdict)
            .count()
    };
    print_line(&format!(
        "# {} better, {} worse, {} with no change beyond noise",
        count(Verdict::Better),
        count(Verdict::Worse),
        count(Verdict::Same)
    ))
}

fn line(row: &Change) -> String {
    let unit = match row.metric {
        "bw_avg_bytes_per_s" => Unit::BytesPerS,
        "time_us" => Unit::Us,
        _ => Unit::Ns,
    };
    let interval = row.change_interval.map_or_else(
        || "unknown".to_owned(),
        |[low, high]| format!("{:+.2} .. {:+.2} %", low * 100.0, high * 100.0),
    );
    let verdict = match (row.failed, row.verdict) {
        (true, _) => "FAILED",
        (_, Verdict::Same) => "same",
        (_, Verdict::Better) => "better",
        (_, Verdict::Worse) => "worse",
    };
    format!(
        "{:>10} {:>14} {:>14} {:>9} {interval:>20}  {verdict:<8} {}",
        row.bytes,
        unit.show(row.before),
        unit.show(row.after),
        change(row),
        row.point
    )
    .trim_end()
    .to_owned()
}

pub(super) fn change(row: &Change) -> String {
    row.change
        .map_or_else(|| "from 0".to_owned(), |change| format!("{:+.2} %", change * 100.0))
}

pub(super) fn point(row: &Change) -> String {
    if row.point.is_empty() {
        format!("{} B", row.bytes)
    } else {
        format!("{} B, {}", row.bytes, row.point)
    }
}
