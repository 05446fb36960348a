//! `cargo xtask ci`: every check of this workspace, in order, with a summary at the end.
//!
//! [`steps`] says what is checked; [`guest`] runs the scripts of `tests/vm` in a guest; [`licences`] checks what we depend
//! on. A step that fails does not keep the later ones from running. What a machine lacks is installed where we are root
//! on Debian; elsewhere the step that needs it is skipped and says what it lacks, or fails under `CI=true`.
//!
//! What a failed test said is repeated there, and a test that passed only in its second try is named there ([`cargo_test`]).
//! The closing line counts: every test that cargo ran, every script that the guest ran, and every other step, each once.

mod cargo_test;
mod guest;
mod licences;
mod safe;
mod steps;

pub(crate) use cargo_test::tests;
pub(crate) use steps::command;

use anyhow::{Result, bail};
use std::{
    fmt,
    time::{Duration, Instant},
};

const HELP: &str = "\
Check everything

Usage: cargo xtask ci [OPTIONS]

Options:
      --only NAME   run this step alone; may be given several times
      --skip NAME   leave this step out; may be given several times
      --list        show the steps' names
  -h, --help        show this

Exit status: 0 when nothing failed, 1 when something did, 2 for a wrong call.
";

/// One check.
pub(crate) struct Step {
    /// What `--only` and `--skip` call it.
    pub(crate) name: &'static str,
    /// What it does, in a line.
    pub(crate) about: &'static str,
    /// Does it. An error is a failure of the step.
    pub(crate) run: fn() -> Result<Verdict>,
}

/// How a step ended, if it did not fail.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// All is well.
    Passed,
    /// It was not done, for this reason.
    Skipped(String),
    /// It ran tests of its own and counted them; it failed if one of them did, or for the reason given.
    Counted(Counts, Option<String>),
    /// The same, none failed, and there is something to look into.
    Remarkable(Counts, String),
}

impl Verdict {
    /// This one and another: what was counted in both.
    pub(crate) fn and(self, other: Verdict) -> Verdict {
        match (self, other) {
            (Verdict::Remarkable(mut counts, why), Verdict::Remarkable(others, other_why)) => {
                counts.add(others);
                Verdict::Remarkable(counts, format!("{why}\n{other_why}"))
            }
            (Verdict::Remarkable(counts, why), Verdict::Counted(mut others, failure))
            | (Verdict::Counted(mut others, failure), Verdict::Remarkable(counts, why)) => {
                others.add(counts);
                match failure {
                    Some(failure) => Verdict::Counted(others, Some(format!("{failure}\n{why}"))),
                    None if others.failed > 0 => Verdict::Counted(others, Some(why)),
                    None => Verdict::Remarkable(others, why),
                }
            }
            (Verdict::Counted(mut counts, why), Verdict::Counted(others, other_why)) => {
                counts.add(others);
                Verdict::Counted(counts, why.or(other_why))
            }
            (Verdict::Counted(counts, why), _) | (_, Verdict::Counted(counts, why)) => Verdict::Counted(counts, why),
            (Verdict::Remarkable(counts, why), _) | (_, Verdict::Remarkable(counts, why)) => {
                Verdict::Remarkable(counts, why)
            }
            (first, _) => first,
        }
    }
}

/// How many were there of each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Done, and well.
    pub(crate) passed: u64,
    /// Done, and not well.
    pub(crate) failed: u64,
    /// Not done.
    pub(crate) skipped: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, other: Counts) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// A line of the summary.
pub(crate) struct Line {
    name: &'static str,
    mark: &'static str,
    note: String,
    pub(crate) counts: Counts,
    took: Duration,
}

/// The command-line form. Returns the exit status.
pub(crate) fn main(arguments: lexopt::Parser) -> Result<u8> {
    let Some(chosen) = parse(arguments)? else { return Ok(0) };
    let mut lines = Vec::new();
    for step in chosen {
        println!("== {}: {}", step.name, step.about);
        let started = Instant::now();
        let line = judge(step.name, (step.run)(), started.elapsed());
        println!(
            "== {}: {} after {:.1} s{}\n",
            line.name,
            line.mark,
            line.took.as_secs_f64(),
            after_colon(&line.note)
        );
        lines.push(line);
    }

    let mut total = Counts::default();
    for line in &lines {
        println!("{line}");
        total.add(line.counts);
    }
    println!(
        "{} passed, {} failed, {} skipped",
        total.passed, total.failed, total.skipped
    );
    Ok(u8::from(total.failed > 0))
}

/// Whether a missing part is a failure and not a reason to skip.
pub(crate) fn under_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| value == "true" || value == "1")
}

/// The verdict on what a machine lacks.
pub(crate) fn lacking(missing: &[&str]) -> Result<Verdict> {
    let what = format!("missing: {} (as root: apt-get install {0})", missing.join(" "));
    if under_ci() {
        bail!(what)
    } else {
        Ok(Verdict::Skipped(what))
    }
}

pub(crate) fn judge(name: &'static str, result: Result<Verdict>, took: Duration) -> Line {
    let (passed, failed, skipped) = ("ok", "FAILED", "skipped");
    let one = |passed, failed, skipped| Counts {
        passed,
        failed,
        skipped,
    };
    let (mark, note, counts) = match result {
        Ok(Verdict::Passed) => (passed, String::new(), one(1, 0, 0)),
        Ok(Verdict::Skipped(why)) => (skipped, why, one(0, 0, 1)),
        Ok(Verdict::Remarkable(counts, why)) => (passed, format!("{}; {why}", count(counts)), counts),
        Ok(Verdict::Counted(counts, None)) if counts.failed == 0 => (passed, count(counts), counts),
        Ok(Verdict::Counted(counts, None)) => (failed, count(counts), counts),
        Ok(Verdict::Counted(mut counts, Some(why))) => {
            // What failed may be no single test: a crash, or code that does not compile.
            counts.failed = counts.failed.max(1);
            (failed, format!("{}; {why}", count(counts)), counts)
        }
        Err(error) => (failed, format!("{error:#}"), one(0, 1, 0)),
    };
    Line {
        name,
        mark,
        note,
        counts,
        took,
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<12} {:<8} {:>7.1} s  {}",
            self.name,
            self.mark,
            self.took.as_secs_f64(),
            self.note
        )
    }
}

fn count(counts: Counts) -> String {
    format!(
        "{} passed, {} failed, {} skipped",
        counts.passed, counts.failed, counts.skipped
    )
}

fn after_colon(note: &str) -> String {
    if note.is_empty() {
        String::new()
    } else {
        format!(": {note}")
    }
}

/// The steps to run, in their order; `None` when something was only to be shown.
fn parse(mut arguments: lexopt::Parser) -> Result<Option<Vec<&'static Step>>> {
    use lexopt::prelude::*;
    let (mut only, mut skip) = (Vec::new(), Vec::new());
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('h') | Long("help") => {
                print!("{HELP}");
                return Ok(None);
            }
            Long("list") => {
                for step in &steps::ALL {
                    println!("{:<12} {}", step.name, step.about);
                }
                return Ok(None);
            }
            Long("only") => only.push(known(&arguments.value()?.string()?)?),
            Long("skip") => skip.push(known(&arguments.value()?.string()?)?),
            other => return Err(other.unexpected().into()),
        }
    }
    let wanted = |step: &&Step| (only.is_empty() || only.contains(&step.name)) && !skip.contains(&step.name);
    Ok(Some(steps::ALL.iter().filter(wanted).collect()))
}

fn known(name: &str) -> Result<&'static str> {
    match steps::ALL.iter().find(|step| step.name == name) {
        Some(step) => Ok(step.name),
        None => bail!("no step {name:?}; cargo xtask ci --list shows them"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(arguments: &[&str]) -> Vec<&'static str> {
        let steps = parse(lexopt::Parser::from_args(arguments)).unwrap().unwrap();
        steps.iter().map(|step| step.name).collect()
    }

    #[test]
    fn steps_are_chosen_by_name_and_keep_their_order() {
        let all = chosen(&[]);
        assert_eq!(all.len(), steps::ALL.len());
        assert_eq!(chosen(&["--only", "vm", "--only=fmt"]), ["fmt", "vm"]);
        assert_eq!(chosen(&["--skip", all[0]]), all[1..]);
        assert!(parse(lexopt::Parser::from_args(["--only", "nope"])).is_err());
    }

    #[test]
    fn a_failure_is_always_counted() {
        let judged = |result| judge("x", result, Duration::ZERO).counts.failed;
        assert_eq!(judged(Ok(Verdict::Passed)), 0);
        assert_eq!(judged(Err(anyhow::anyhow!("no"))), 1);
        assert_eq!(
            judged(Ok(Verdict::Counted(
                Counts {
                    passed: 5,
                    ..Counts::default()
                },
                None
            ))),
            0
        );
        assert_eq!(
            judged(Ok(Verdict::Counted(
                Counts {
                    passed: 5,
                    ..Counts::default()
                },
                Some("crashed".into())
            ))),
            1
        );
        assert_eq!(
            judged(Ok(Verdict::Counted(
                Counts {
                    failed: 3,
                    ..Counts::default()
                },
                Some("cargo: 101".into())
            ))),
            3
        );
    }
}
