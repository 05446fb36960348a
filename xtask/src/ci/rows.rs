//! Runs programs that test many rows, and keeps the output of failed rows for the summary.
//!
//! It prints `FAILED` at the start of a failed row, indents the row's details by four, retries a
//! few, and exits with 0 when every row passed in the end. Rows that failed first are listed too.

use super::{Counts, Verdict, run_lines};
use crate::workspace;
use anyhow::{Result, bail};
use std::{path::Path, process::Command};

const LINES_KEPT: usize = 90;

pub(crate) struct Rows {
    program: String,
    passed: bool,
    failures: Failures,
}

/// Runs a program in the workspace's root and prints its output.
pub(crate) fn run(program: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Result<Rows> {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .envs(variables.iter().copied())
        .current_dir(workspace());
    let mut failures = Failures::default();
    let status = run_lines(&mut command, |line| failures.take(line))?;
    Ok(Rows {
        program: format!("{} {}", program.display(), arguments.join(" ")),
        passed: status.success(),
        failures,
    })
}

pub(crate) fn verdict(all: &[Rows]) -> Result<Verdict> {
    let text = |rows: &Rows| format!("{}:{}", rows.program, rows.failures.text());
    let failed: Vec<_> = all.iter().filter(|rows| !rows.passed).map(text).collect();
    if !failed.is_empty() {
        bail!(failed.join("\n"));
    }
    let twice: Vec<_> = all.iter().filter(|rows| rows.failures.any()).map(text).collect();
    if twice.is_empty() {
        return Ok(Verdict::Passed);
    }
    let counts = Counts {
        passed: 1,
        ..Counts::default()
    };
    Ok(Verdict::Retried(
        counts,
        format!("passed only when tried again: {}", twice.join("\n")),
    ))
}

#[derive(Default)]
struct Failures {
    lines: Vec<String>,
    /// Whether an indented line belongs to a failed row.
    within: bool,
    left_out: usize,
}

impl Failures {
    fn take(&mut self, line: &str) {
        let begins = line.starts_with("FAILED ");
        self.within = begins || self.within && line.starts_with("    ");
        if self.within && self.lines.len() < LINES_KEPT {
            self.lines.push(line.to_owned());
        } else if self.within {
            self.left_out += 1;
        }
    }

    fn any(&self) -> bool {
        !self.lines.is_empty()
    }

    fn text(&self) -> String {
        if !self.any() {
            return " no row is marked as failed; see its output".to_owned();
        }
        let mut text: String = self.lines.iter().map(|line| format!("\n  {line}")).collect();
        if self.left_out > 0 {
            text.push_str(&format!("\n  and {} more lines", self.left_out));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "\
ok             0.7 s ib_send_bw
FAILED         0.3 s ib_read_bw: the client ends with 1: no device
    server: waiting
    client: no device
ok             0.3 s ib_read_lat
    of no failure
FAILED       docs/STOCK.md: -old
1 pairs, 1 failures";

    fn rows(passed: bool, printed: &str) -> Rows {
        let mut failures = Failures::default();
        printed.lines().for_each(|line| failures.take(line));
        Rows {
            program: "stock host".to_owned(),
            passed,
            failures,
        }
    }

    #[test]
    fn failed_rows_are_listed_with_their_output() {
        let error = verdict(&[rows(true, ""), rows(false, PRINTED)]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "stock host:\n  \
             FAILED         0.3 s ib_read_bw: the client ends with 1: no device\n  \
             \x20   server: waiting\n  \
             \x20   client: no device\n  \
             FAILED       docs/STOCK.md: -old"
        );
        let wordless = verdict(&[rows(false, "ok  all")]).unwrap_err().to_string();
        assert!(wordless.contains("no row"), "{wordless}");
    }

    #[test]
    fn retried_rows_are_listed() {
        assert_eq!(
            verdict(&[rows(true, "ok  a"), rows(true, "")]).unwrap(),
            Verdict::Passed
        );
        let Verdict::Retried(counts, why) = verdict(&[rows(true, PRINTED)]).unwrap() else {
            panic!("not retried")
        };
        assert_eq!((counts.passed, counts.failed), (1, 0));
        assert!(why.contains("ib_read_bw") && !why.contains("ib_read_lat"), "{why}");
    }

    #[test]
    fn long_output_is_cut() {
        let printed = "FAILED a\n".repeat(LINES_KEPT + 7);
        let text = rows(false, &printed).failures.text();
        assert!(text.ends_with("and 7 more lines"), "{text}");
    }
}
