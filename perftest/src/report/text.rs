//! Results as a table on stdout, one row as each size completes; the unit is in every column's
//! name.

use std::io::{self, Write};

use super::{Interval, OptionalColumns, Row, columns};
use crate::failure::Failure;
use crate::plan::Kind;

#[derive(Debug)]
pub(crate) struct Table {
    kind: Kind,
    extra: OptionalColumns,
}

impl Table {
    pub(crate) fn begin(kind: Kind, extra: OptionalColumns, about: &str) -> Result<Table, Failure> {
        print_line(&format!("# {about}\n{}", columns::head(kind, extra)))?;
        Ok(Table { kind, extra })
    }

    pub(crate) fn row(&self, row: &Row) -> Result<(), Failure> {
        debug_assert_eq!(matches!(row, Row::Bandwidth(_)), self.kind == Kind::Bw);
        print_line(&line(row, self.extra))
    }

    /// The line of an interval of the size that runs.
    pub(crate) fn interval(&self, interval: &Interval) -> Result<(), Failure> {
        print_line(&columns::interval_line(interval, self.extra))
    }
}

/// # Errors
/// [`Failure::Test`] when stdout cannot be written. A closed pipe is no error: the reader needs no
/// more.
pub(crate) fn print_line(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(Failure::test(format!("cannot write to stdout: {e}"))),
        _ => Ok(()),
    }
}

fn line(row: &Row, extra: OptionalColumns) -> String {
    match row {
        Row::Bandwidth(row) => columns::bandwidth(row, extra),
        Row::Latency(row) => columns::latency(row, extra),
    }
}

#[cfg(test)]
mod tests {
    use super::super::row::tests::bandwidth;
    use super::*;

    #[test]
    fn bits_replace_bytes() {
        let gbits = OptionalColumns {
            gbits: true,
            ..OptionalColumns::default()
        };
        let table = format!(
            "{}\n{}",
            columns::head(Kind::Bw, gbits),
            line(&Row::Bandwidth(bandwidth()), gbits)
        );
        assert!(
            table.contains("BW average[Gb/s]") && !table.contains("MiB/s"),
            "{table}"
        );
        // 1.5 MiB/s.
        assert!(table.ends_with(" 0.01        0.500000"), "{table}");
    }

    #[test]
    fn columns_are_perftests() {
        let none = OptionalColumns::default();
        assert_eq!(
            format!(
                "{}\n{}",
                columns::head(Kind::Bw, none),
                line(&Row::Bandwidth(bandwidth()), none)
            ),
            concat!(
                "    #bytes  #iterations   BW peak[MiB/s]   BW average[MiB/s]   MsgRate[Mpps]\n",
                "   8388608         5000             2.00                1.50        0.500000"
            )
        );
    }
}
