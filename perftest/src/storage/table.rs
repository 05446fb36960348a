//! The rows of the table: rates, and their ratios to others of the same rounds.

use std::fmt::Write;

use serde::Serialize;

use crate::limits::Ratio;

#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) name: &'static str,
    #[serde(skip)]
    pub(super) what: &'static str,
    pub(super) bytes_per_s: f64,
    /// What it is held against: for Doorbell.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) ratios: Vec<Comparison>,
}

#[derive(Debug, Serialize)]
pub(super) struct Comparison {
    against: &'static str,
    #[serde(flatten)]
    ratio: Ratio,
}

/// The ratio of the rates `own` to those of the same rounds of `against`.
pub(super) fn comparison(against: &'static str, rounds: &[f64], own: &[f64]) -> Option<Comparison> {
    let ratios: Vec<f64> = own.iter().zip(rounds).map(|(own, other)| own / other).collect();
    let ratio = Ratio::of(&ratios)?;
    Some(Comparison { against, ratio })
}

/// What follows the kind of memory in the first line.
pub(super) fn of_gpu(gpu: Option<&str>) -> String {
    gpu.map(|name| format!(" of {name}")).unwrap_or_default()
}

/// The table as lines of text, each after a line break.
pub(super) fn lines(rows: &[Row]) -> String {
    let mut text = format!("\n{:<16} {:>14}  what it is", "#name", "rate[GB/s]");
    // Writing into a String cannot fail.
    for row in rows {
        let _ = write!(text, "\n{:<16} {:>14.3}  {}", row.name, row.bytes_per_s / 1e9, row.what);
        for Comparison { against, ratio } in &row.ratios {
            let _ = write!(
                text,
                "\n{:<16} {:>14.2}  of {against} ({:.2} to {:.2})",
                "", ratio.median, ratio.least, ratio.greatest
            );
        }
    }
    text
}
