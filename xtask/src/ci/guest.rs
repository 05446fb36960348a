//! Runs the scripts of `tests/vm` in one guest, in the order of their names.
//!
//! A script runs under bash in the workspace's root and passes with status 0; 77 skips it, with a
//! reason in its output. It has 120 seconds, or those of its line `# limit: SECONDS`, and finds the
//! programs in `$DOORBELL_BIN` and the test programs in `$DOORBELL_TEST_NAME`. Processes that it
//! leaves are killed and the MTU is restored.
//!
//! A failed script is run once more in a new guest: an emulated machine may stall. More than
//! [`RETRIES`] failures are not retried.

use super::{Counts, Verdict};
use crate::{
    vm::{Request, machine::Outcome},
    workspace,
};
use anyhow::{Context, Result, bail};
use std::{
    env,
    ffi::OsString,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::mpsc::{self, Sender},
    time::Duration,
};

const RUNNER: &str = include_str!("guest.sh");
/// Seconds for a script that names no limit.
const LIMIT: u64 = 120;
/// Seconds for booting, and for killing what scripts leave.
const MARGIN: u64 = 180;
const RETRIES: usize = 3;
/// Prefix of the runner's reports.
const REPORT: &str = "guest-script-ended ";
/// Prefix of a row that failed, as [`rows`](super::rows) has it.
const FAILED_ROW: &str = "FAILED ";
/// Exit status of a skipped script, as in automake.
const SKIPPED: &str = "77";

struct Script {
    path: PathBuf,
    limit: u64,
}

struct GuestRun {
    counts: Counts,
    failed: Vec<Script>,
    /// Rows that failed in a script, which may have repeated them: see [`rows`](super::rows).
    failed_rows: Vec<String>,
    /// Why the guest ended before the scripts did.
    stopped: Option<String>,
}

pub(super) fn run(programs: &Path, variables: &[(OsString, OsString)]) -> Result<Verdict> {
    // A guest starts in the current directory; the scripts are written for the root.
    env::set_current_dir(workspace())?;
    let scripts = scripts(Path::new("tests/vm"))?;
    if scripts.is_empty() {
        bail!("no scripts in tests/vm");
    }
    let first = in_a_guest(scripts, programs, variables)?;
    if first.stopped.is_none() && first.failed.is_empty() && !first.failed_rows.is_empty() {
        let rows = first.failed_rows.join("\n    ");
        return Ok(Verdict::Retried(
            first.counts,
            format!("passed only when repeated:\n    {rows}"),
        ));
    }
    let named = format!("failed: {}", names(&first.failed));
    if first.stopped.is_some() || first.failed.is_empty() || first.failed.len() > RETRIES {
        let named = (!first.failed.is_empty()).then_some(named);
        let why: Vec<_> = first.stopped.into_iter().chain(named).collect();
        return Ok(Verdict::Counted(
            first.counts,
            (!why.is_empty()).then(|| why.join("; ")),
        ));
    }

    println!("== again: {}", names(&first.failed));
    let second = in_a_guest(first.failed, programs, variables)?;
    if second.stopped.is_some() || !second.failed.is_empty() {
        return Ok(Verdict::Counted(first.counts, Some(named)));
    }
    let counts = Counts {
        passed: first.counts.passed + first.counts.failed,
        failed: 0,
        ..first.counts
    };
    Ok(Verdict::Retried(
        counts,
        format!("passed only in a new guest ({named})"),
    ))
}

fn in_a_guest(scripts: Vec<Script>, programs: &Path, variables: &[(OsString, OsString)]) -> Result<GuestRun> {
    let mut command: Vec<OsString> = ["bash", "-c", RUNNER, "guest.sh"].map(Into::into).into();
    for script in &scripts {
        command.push(script.limit.to_string().into());
        command.push(script.path.clone().into());
    }
    let mut request = Request::new(command);
    request.limit = Duration::from_secs(MARGIN + scripts.iter().map(|script| script.limit + 10).sum::<u64>());
    request.environment = variables.to_vec();
    request.environment.push(("DOORBELL_BIN".into(), programs.into()));

    let (reports, received) = mpsc::channel();
    let outcome = request.run(Box::new(Watch::new(io::stdout(), reports)), Box::new(io::stderr()))?;
    let (failed_rows, ended): (Vec<_>, Vec<_>) = received.iter().partition(|line| line.starts_with(FAILED_ROW));
    let (counts, failed) = judge(ended.into_iter(), scripts);
    let stopped = match outcome {
        Outcome::Exited(0) => None,
        Outcome::Exited(status) => Some(format!("the runner of the scripts ended with {status}")),
        Outcome::TimedOut => Some("the guest ran past its limit".to_owned()),
        Outcome::Unread => Some("stdout was closed".to_owned()),
        Outcome::Failed { reason, console } => {
            for line in console {
                eprintln!("console: {line}");
            }
            Some(reason)
        }
    };
    Ok(GuestRun {
        counts,
        failed,
        failed_rows,
        stopped,
    })
}

fn names(scripts: &[Script]) -> String {
    let names: Vec<_> = scripts.iter().map(|script| script.path.to_string_lossy()).collect();
    names.join(" ")
}

fn scripts(folder: &Path) -> Result<Vec<Script>> {
    let mut scripts = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "sh") {
            let limit = limit(&fs::read_to_string(&path)?).with_context(|| format!("in {}", path.display()))?;
            scripts.push(Script { path, limit });
        }
    }
    scripts.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(scripts)
}

fn limit(script: &str) -> Result<u64> {
    match script.lines().find_map(|line| line.strip_prefix("# limit:")) {
        Some(seconds) => seconds.trim().parse().context("the limit is a number of seconds"),
        None => Ok(LIMIT),
    }
}

/// From `STATUS PATH` reports: the counts, and the scripts that failed or have no report.
fn judge(reports: impl Iterator<Item = String>, scripts: Vec<Script>) -> (Counts, Vec<Script>) {
    let reports: Vec<_> = reports.collect();
    let mut counts = Counts::default();
    let mut failed = Vec::new();
    for script in scripts {
        let path = script.path.to_string_lossy();
        let status = reports
            .iter()
            .find_map(|report| report.strip_suffix(&*path)?.strip_suffix(' '));
        match status {
            Some("0") => counts.passed += 1,
            Some(SKIPPED) => counts.skipped += 1,
            _ => {
                counts.failed += 1;
                failed.push(script);
            }
        }
    }
    (counts, failed)
}

/// Shows the guest's output and picks the runner's reports from it.
struct Watch<W> {
    shown: W,
    line: Vec<u8>,
    reports: Sender<String>,
}

impl<W> Watch<W> {
    fn new(shown: W, reports: Sender<String>) -> Self {
        Self {
            shown,
            line: Vec::new(),
            reports,
        }
    }
}

impl<W: Write> Write for Watch<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for byte in bytes {
            if *byte != b'\n' {
                self.line.push(*byte);
                continue;
            }
            let report = self.line.strip_prefix(REPORT.as_bytes());
            let row = self.line.starts_with(FAILED_ROW.as_bytes()).then_some(&*self.line);
            if let Some(line) = report.or(row) {
                let _ = self.reports.send(String::from_utf8_lossy(line).into_owned());
            }
            self.line.clear();
        }
        self.shown.write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.shown.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_may_name_its_limit() {
        assert_eq!(limit("#!/bin/bash\n# limit: 300\n").unwrap(), 300);
        assert_eq!(limit("#!/bin/bash\n").unwrap(), LIMIT);
        assert!(limit("# limit: long\n").is_err());
    }

    #[test]
    fn a_script_that_never_reported_has_failed() {
        let scripts = ["t/a.sh", "t/b.sh", "t/c.sh", "t/d.sh"].map(|path| Script {
            path: path.into(),
            limit: 1,
        });
        let reports = ["0 t/a.sh", "77 t/b.sh", "137 t/c.sh"].map(str::to_owned);
        let (counts, failed) = judge(reports.into_iter(), scripts.into());
        assert_eq!(
            counts,
            Counts {
                passed: 1,
                failed: 2,
                skipped: 1
            }
        );
        assert_eq!(names(&failed), "t/c.sh t/d.sh");
    }

    #[test]
    fn reports_are_found_wherever_the_output_is_cut() {
        let (reports, received) = mpsc::channel();
        let mut watch = Watch::new(Vec::new(), reports);
        for piece in [
            "some\nguest-script",
            "-ended 0 ",
            "a.sh\nnot a guest-script-ended 1 b.sh\nFAILED  a row",
            "\n",
        ] {
            watch.write_all(piece.as_bytes()).unwrap();
        }
        assert!(watch.shown.ends_with(b"a row\n"), "everything is shown");
        drop(watch);
        assert_eq!(received.iter().collect::<Vec<_>>(), ["0 a.sh", "FAILED  a row"]);
    }
}
