//! Results as a table on stdout, one row as each size completes; the unit is in every column's name.

use std::io::{self, Write};

use super::{BandwidthRow, LatencyRow, Row};
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
            "{:>10} {:>12} {:>10} {:>10} {:>10} {:>12} {:>10} {:>10} {:>10}",
            "#bytes", "#iterations", "min[us]", "p50[us]", "avg[us]", "stddev[us]", "p99[us]", "p99.9[us]", "max[us]"
        ),
    }
}

fn line(row: &Row) -> String {
    match row {
        Row::Bandwidth(BandwidthRow {
            bytes,
            iterations,
            bw_peak_bytes_per_s,
            bw_avg_bytes_per_s,
            msg_rate_per_s,
            raw_copy_bytes_per_s,
        }) => {
            let raw = raw_copy_bytes_per_s.map_or_else(String::new, |raw| {
                format!(
                    "  raw copy {:.2} MiB/s, {:.3} of it",
                    raw / MIB,
                    bw_avg_bytes_per_s / raw
                )
            });
            format!(
                "{bytes:>10} {iterations:>12} {:>16.2} {:>19.2} {:>15.6}{raw}",
                bw_peak_bytes_per_s / MIB,
                bw_avg_bytes_per_s / MIB,
                msg_rate_per_s / 1e6
            )
        }
        Row::Latency(LatencyRow {
            bytes,
            iterations,
            lat_min_ns,
            lat_p50_ns,
            lat_avg_ns,
            lat_stddev_ns,
            lat_p99_ns,
            lat_p999_ns,
            lat_max_ns,
        }) => format!(
            "{bytes:>10} {iterations:>12} {:>10.2} {:>10.2} {:>10.2} {:>12.2} {:>10.2} {:>10.2} {:>10.2}",
            lat_min_ns / 1e3,
            lat_p50_ns / 1e3,
            lat_avg_ns / 1e3,
            lat_stddev_ns / 1e3,
            lat_p99_ns / 1e3,
            lat_p999_ns / 1e3,
            lat_max_ns / 1e3
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let bw = BandwidthRow {
            bytes: 8 << 20,
            iterations: 5000,
            bw_peak_bytes_per_s: 2.0 * MIB,
            bw_avg_bytes_per_s: 1.5 * MIB,
            msg_rate_per_s: 0.5e6,
            raw_copy_bytes_per_s: None,
        };
        assert_eq!(
            format!("{}\n{}", head(Kind::Bw), line(&Row::Bandwidth(bw))),
            concat!(
                "    #bytes  #iterations   BW peak[MiB/s]   BW average[MiB/s]   MsgRate[Mpps]\n",
                "   8388608         5000             2.00                1.50        0.500000"
            )
        );
        let lat = LatencyRow {
            bytes: 2,
            iterations: 1000,
            lat_min_ns: 1000.0,
            lat_p50_ns: 1500.0,
            lat_avg_ns: 1510.0,
            lat_stddev_ns: 20.0,
            lat_p99_ns: 2000.0,
            lat_p999_ns: 3000.0,
            lat_max_ns: 4000.0,
        };
        assert_eq!(line(&Row::Latency(lat)).len(), head(Kind::Lat).len());
    }
}
