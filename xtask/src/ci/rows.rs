//! Runs programs of the release that try many rows, and keeps what they say of those that failed: a log is long, and the part of it that reaches whoever must
//! mend something is often only its end.
//!
//! Such a program begins a line with `FAILED` where a row fails, indents by four what belongs to it, and tries a few of them once more. It ends with 0 when
//! all passed at last; what failed at first is named all the same.

use super::{Counts, Verdict, show_lines};
use crate::{target_folder, workspace};
use anyhow::{Result, bail};
use std::process::Command;

/// As many lines of what failed are kept of a program.
const LINES_KEPT: usize = 90;

/// What a program came to.
pub(super) struct Rows {
    program: String,
    passed: bool,
    /// What it said of rows that failed.
    failures: Failures,
}

/// Runs a program of the release in the workspace's root, and shows what it prints.
pub(super) fn run(name: &str, arguments: &[&str]) -> Result<Rows> {
    let mut command = Command::new(target_folder()?.join("release").join(name));
    command.args(arguments).current_dir(workspace());
    let mut failures = Failures::default();
    let status = show_lines(&mut command, |line| failures.take(line))?;
    Ok(Rows {
        program: [&[name], arguments].concat().join(" "),
        passed: status.success(),
        failures,
    })
}

/// The verdict on several.
pub(super) fn verdict(all: &[Rows]) -> Result<Verdict> {
    let told = |rows: &Rows| format!("target/release/{}:{}", rows.program, rows.failures.told());
    let failed: Vec<_> = all.iter().filter(|rows| !rows.passed).map(told).collect();
    if !failed.is_empty() {
        bail!(failed.join("\n"));
    }
    let twice: Vec<_> = all.iter().filter(|rows| rows.failures.any()).map(told).collect();
    if twice.is_empty() {
        return Ok(Verdict::Passed);
    }
    let counts = Counts {
        passed: 1,
        ..Counts::default()
    };
    Ok(Verdict::Remarkable(
        counts,
        format!("passed only when tried again: {}", twice.join("\n")),
    ))
}

/// Reads what such a program prints, line by line.
#[derive(Default)]
struct Failures {
    lines: Vec<String>,
    /// Whether an indented line belongs to a row that failed.
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

    fn told(&self) -> String {
        if !self.any() {
            return " it says of no row that it failed; see what it printed".to_owned();
        }
        let mut told: String = self.lines.iter().map(|line| format!("\n  {line}")).collect();
        if self.left_out > 0 {
            told.push_str(&format!("\n  and {} lines", self.left_out));
        }
        told
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
    fn failed_rows_are_told_with_what_was_said_of_them() {
        let error = verdict(&[rows(true, ""), rows(false, PRINTED)]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "target/release/stock host:\n  \
             FAILED         0.3 s ib_read_bw: the client ends with 1: no device\n  \
             \x20   server: waiting\n  \
             \x20   client: no device\n  \
             FAILED       docs/STOCK.md: -old"
        );
        let wordless = verdict(&[rows(false, "ok  all")]).unwrap_err().to_string();
        assert!(wordless.contains("of no row"), "{wordless}");
    }

    #[test]
    fn what_passed_only_in_its_second_try_is_named() {
        assert_eq!(
            verdict(&[rows(true, "ok  a"), rows(true, "")]).unwrap(),
            Verdict::Passed
        );
        let Verdict::Remarkable(counts, why) = verdict(&[rows(true, PRINTED)]).unwrap() else {
            panic!("not remarked")
        };
        assert_eq!((counts.passed, counts.failed), (1, 0));
        assert!(why.contains("ib_read_bw") && !why.contains("ib_read_lat"), "{why}");
    }

    #[test]
    fn of_many_failures_the_first_are_told_and_the_others_counted() {
        let printed = "FAILED a\n".repeat(LINES_KEPT + 7);
        let told = rows(false, &printed).failures.told();
        assert!(told.ends_with("and 7 lines"), "{told}");
    }
}
