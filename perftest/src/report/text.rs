//! Results as a table on stdout, one row as each size completes; the unit is in every column's name.

use std::io::{self, Write};

use super::Row;
use crate::failure::Failure;
use crate::plan::Kind;

const MIB: f64 = 1024.0 * 1024.0;

/// A table under way.
#[derive(Debug)]
pub(crate) struct Table {
    kind: Kind,
}

impl Table {
    /// Prints what is measured and the column heads.
    ///
    /// # Errors
    /// As [`print_line`].
    pub(crate) fn begin(kind: Kind, about: &str) -> Result<Table, Failure> {
        print_line(&format!("# {about}\n{}", head(kind)))?;
        Ok(Table { kind })
    }

    /// Prints a row.
    ///
    /// # Errors
    /// As [`print_line`].
    pub(crate) fn row(&self, row: &Row) -> Result<(), Failure> {
        debug_assert_eq!(matches!(row, Row::Bandwidth(_)), self.kind == Kind::Bw);
        print_line(&line(row))
    }
}

/// Prints a line on stdout.
///
/// # Errors
/// [`Failure::Test`] when stdout does not take it. A reader that closed the pipe has seen what it wanted: not an error.
pub(crate) fn print_line(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(Failure::test(format!("cannot write to stdout: {e}"))),
        _ => Ok(()),
    }
}

fn head(kind: Kind) -> String {
    match kind {
        Kind::Bw => format!(
            "{:>10} {:>12} {:>16} {:>19} {:>15}",
            "#bytes", "#iterations", "BW peak[MiB/s]", "BW average[MiB/s]", "MsgRate[Mpps]"
        ),
        Kind::Lat => format!(
            "{:>10} {:>12} {:>10} {:>10} {:>10} {:>12} {:>10} {:>10} {:>10} {:>10} {:>10}",
            "#bytes",
            "#iterations",
            "min[us]",
            "p50[us]",
            "avg[us]",
            "stddev[us]",
            "p90[us]",
            "p99[us]",
            "p99.9[us]",
            "p99.99[us]",
            "max[us]"
        ),
    }
}

fn line(row: &Row) -> String {
    match row {
        Row::Bandwidth(row) => {
            let raw = row.raw_copy_bytes_per_s.map_or_else(String::new, |raw| {
                format!(
                    "  raw copy {:.2} MiB/s, {:.3} of it",
                    raw / MIB,
                    row.bw_avg_bytes_per_s / raw
                )
            });
            format!(
                "{:>10} {:>12} {:>16.2} {:>19.2} {:>15.6}{raw}",
                row.bytes,
                row.iterations,
                row.bw_peak_bytes_per_s / MIB,
                row.bw_avg_bytes_per_s / MIB,
                row.msg_rate_per_s / 1e6
            )
        }
        Row::Latency(row) => format!(
            "{:>10} {:>12} {:>10.2} {:>10.2} {:>10.2} {:>12.2} {:>10.2} {:>10.2} {:>10.2} {:>10.2} {:>10.2}",
            row.bytes,
            row.iterations,
            row.lat_min_ns / 1e3,
            row.lat_p50_ns / 1e3,
            row.lat_avg_ns / 1e3,
            row.lat_stddev_ns / 1e3,
            row.lat_p90_ns / 1e3,
            row.lat_p99_ns / 1e3,
            row.lat_p999_ns / 1e3,
            row.lat_p9999_ns / 1e3,
            row.lat_max_ns / 1e3
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::row::tests::{bandwidth, latency};
    use super::*;

    #[test]
    fn columns_line_up() {
        assert_eq!(
            format!("{}\n{}", head(Kind::Bw), line(&Row::Bandwidth(bandwidth()))),
            concat!(
                "    #bytes  #iterations   BW peak[MiB/s]   BW average[MiB/s]   MsgRate[Mpps]\n",
                "   8388608         5000             2.00                1.50        0.500000"
            )
        );
        assert_eq!(line(&Row::Latency(latency())).len(), head(Kind::Lat).len());
    }
}
