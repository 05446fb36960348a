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

pub(super) fn head() -> String {
    let heads = columns([
        "tokens",
        "hidden",
        "top-k",
        "experts",
        "mode",
        "type",
        "bytes",
        "time",
        "tokens/s",
        "rate",
        "alltoallv",
        "of it",
        "put",
        "/put",
        "#wrong",
    ]);
    let units = columns([
        "", "", "", "", "", "", "(B)", "(us)", "", "(GB/s)", "(GB/s)", "", "(us)", "", "",
    ]);
    format!("#{heads}\n#{units}")
}

fn columns<S: AsRef<str>>(cells: [S; 15]) -> String {
    const WIDTHS: [usize; 15] = [7, 6, 5, 7, 15, 4, 12, 10, 11, 7, 9, 5, 10, 5, 6];
    let cells = cells.iter().zip(WIDTHS);
    let cells: Vec<_> = cells
        .map(|(cell, width)| format!("{:>width$}", cell.as_ref()))
        .collect();
    cells.join(" ")
}

impl MoeRow {
    pub(super) fn line(&self) -> String {
        let none = || "N/A".to_owned();
        let wrong = self.wrong.map_or_else(none, |wrong| wrong.to_string());
        let cells = columns([
            self.tokens.to_string(),
            self.hidden.to_string(),
            self.top_k.to_string(),
            self.experts.to_string(),
            self.mode.to_owned(),
            self.dtype.to_owned(),
            self.bytes.to_string(),
            format!("{:.1}", self.time_us),
            format!("{:.0}", self.tokens_per_s),
            format!("{:.2}", self.bytes_per_s / 1e9),
            format!("{:.2}", self.alltoallv_bytes_per_s / 1e9),
            format!("{:.2}", self.of_alltoallv),
            self.put_time_us.map_or_else(none, |time| format!("{time:.1}")),
            self.times_put.map_or_else(none, |times| format!("{times:.2}")),
            wrong,
        ]);
        format!(" {cells}")
    }
}
