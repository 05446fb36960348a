//! Results of dispatch and combine: a table, and rows of the JSON object.

use serde::Serialize;

/// The result of one number of tokens.
#[derive(Debug, Serialize)]
// fields: one per column
pub(crate) struct MoeRow {
    /// Of each rank.
    pub(super) tokens: u32,
    pub(super) hidden: u32,
    pub(super) top_k: u32,
    pub(super) experts: u32,
    pub(super) mode: &'static str,
    pub(super) dtype: &'static str,
    pub(super) skew: &'static str,
    pub(super) ranks: u32,
    pub(super) iterations: u32,
    /// Rows that a rank sends, its own included: the mean over the ranks.
    pub(super) bytes: u64,
    /// The mean over all ranks.
    pub(super) time_us: f64,
    /// Of all ranks.
    pub(super) tokens_per_s: f64,
    pub(super) bytes_per_s: f64,
    pub(super) alltoallv_time_us: f64,
    pub(super) alltoallv_bytes_per_s: f64,
    pub(super) of_alltoallv: f64,
    /// None on GPUs.
    pub(super) put_time_us: Option<f64>,
    pub(super) put_bytes_per_s: Option<f64>,
    pub(super) times_put: Option<f64>,
    /// Wrong rows or elements on all ranks; none where nothing was checked.
    pub(super) wrong: Option<u64>,
}

/// Head, unit and width of a column, and its cell.
type Column = (&'static str, &'static str, usize, fn(&MoeRow) -> String);

const COLUMNS: [Column; 15] = [
    ("tokens", "", 7, |row| row.tokens.to_string()),
    ("hidden", "", 6, |row| row.hidden.to_string()),
    ("top-k", "", 5, |row| row.top_k.to_string()),
    ("experts", "", 7, |row| row.experts.to_string()),
    ("mode", "", 15, |row| row.mode.to_owned()),
    ("type", "", 4, |row| row.dtype.to_owned()),
    ("bytes", "(B)", 12, |row| row.bytes.to_string()),
    ("time", "(us)", 10, |row| format!("{:.1}", row.time_us)),
    ("tokens/s", "", 11, |row| format!("{:.0}", row.tokens_per_s)),
    ("rate", "(GB/s)", 7, |row| format!("{:.2}", row.bytes_per_s / 1e9)),
    ("alltoallv", "(GB/s)", 9, |row| {
        format!("{:.2}", row.alltoallv_bytes_per_s / 1e9)
    }),
    ("of it", "", 5, |row| format!("{:.2}", row.of_alltoallv)),
    ("put", "(us)", 10, |row| {
        or_none(row.put_time_us.map(|time| format!("{time:.1}")))
    }),
    ("/put", "", 5, |row| {
        or_none(row.times_put.map(|times| format!("{times:.2}")))
    }),
    ("#wrong", "", 6, |row| or_none(row.wrong.map(|wrong| wrong.to_string()))),
];

fn or_none(cell: Option<String>) -> String {
    cell.unwrap_or_else(|| "N/A".to_owned())
}

pub(super) fn head() -> String {
    let (heads, units) = (COLUMNS.map(|column| column.0), COLUMNS.map(|column| column.1));
    format!("#{}\n#{}", columns(heads), columns(units))
}

fn columns<S: AsRef<str>>(cells: [S; 15]) -> String {
    let cells = cells.iter().zip(COLUMNS);
    let cells: Vec<_> = cells
        .map(|(cell, (_, _, width, _))| format!("{:>width$}", cell.as_ref()))
        .collect();
    cells.join(" ")
}

impl MoeRow {
    pub(super) fn line(&self) -> String {
        format!(" {}", columns(COLUMNS.map(|(.., cell)| cell(self))))
    }
}
