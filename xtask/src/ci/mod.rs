//! `cargo xtask ci`: every check of this workspace, in order, with a summary at the end.
//!
//! [`steps`] says what is checked; [`guest`] runs the scripts of `tests/vm` in a guest; [`licences`] checks what we depend
//! on. A step that fails does not keep the later ones from running. What a machine lacks is installed where we are root
//! on Debian; elsewhere the step that needs it is skipped and says what it lacks, or fails under `CI=true`.
//!
//! Steps whose tests know time run one after the other; those that build and count run behind them, on what they leave of the
//! processors ([`behind`]). What needs the others' builds waits for cargo's own locks.
//!
//! What a failed test said is repeated there, and a test that passed only in its second try is named there ([`cargo_test`]); so it is with the rows of
//! programs that try many ([`rows`]).
//! The closing line counts: every test that cargo ran, every script that the guest ran, and every other step, each once.

mod behind;
mod cargo_test;
mod guest;
mod licences;
mod rows;
mod safe;
mod steps;

pub(crate) use cargo_test::tests;
pub(crate) use steps::{command, release};

use anyhow::{Context, Result, bail};
use behind::Behind;
use std::{
    fmt, fs,
    io::{self, BufRead, BufReader, Write},
    path::PathBuf,
    process::{Command, ExitStatus, Stdio},
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
    /// When it runs.
    pub(crate) place: Place,
    /// Does it. An error is a failure of the step.
    pub(crate) run: fn() -> Result<Verdict>,
}

/// When a step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Before all others, as they need what it does.
    First,
    /// In its turn: it has tests that wait and give up, so that no other such step may run beside it.
    InTurn,
    /// Behind those, with what they leave of the processors: it does not matter when.
    Behind,
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

/// How a step that passed, one that failed and one that was skipped are marked.
const MARKS: [&str; 3] = ["ok", "FAILED", "skipped"];

/// A line of the summary.
pub(crate) struct Line {
    name: &'static str,
    mark: &'static str,
    note: String,
    pub(crate) counts: Counts,
    took: Duration,
}

/// What was asked for.
struct Call {
    steps: Vec<&'static Step>,
    /// Where to write how the only step ended, for the process that runs it behind others.
    verdict: Option<PathBuf>,
}

/// The command-line form. Returns the exit status.
pub(crate) fn main(arguments: lexopt::Parser) -> Result<u8> {
    let Some(Call { steps, verdict }) = parse(arguments)? else {
        return Ok(0);
    };
    if let Some(file) = verdict {
        let [step] = steps[..] else {
            bail!("--verdict is of one step")
        };
        let line = perform(step);
        fs::write(&file, line.written()).with_context(|| format!("cannot write {}", file.display()))?;
        return Ok(u8::from(line.counts.failed > 0));
    }

    let started = Instant::now();
    let lines = run(&steps)?;
    let mut total = Counts::default();
    for step in &steps {
        for line in lines.iter().filter(|line| line.name == step.name) {
            println!("{line}");
            total.add(line.counts);
        }
    }
    println!(
        "{:<12} {:<8} {:>7.1} s",
        "together",
        "",
        started.elapsed().as_secs_f64()
    );
    println!(
        "{} passed, {} failed, {} skipped",
        total.passed, total.failed, total.skipped
    );
    Ok(u8::from(total.failed > 0))
}

/// Runs the steps, each in its place. Their lines are in the order in which they ended.
fn run(steps: &[&'static Step]) -> Result<Vec<Line>> {
    let placed = |place| steps.iter().copied().filter(move |step| step.place == place);
    let mut lines: Vec<_> = placed(Place::First).map(run_here).collect();
    if placed(Place::InTurn).next().is_none() {
        lines.extend(placed(Place::Behind).map(run_here));
        return Ok(lines);
    }
    let mut behind = Behind::start(placed(Place::Behind).collect())?;
    for step in placed(Place::InTurn) {
        lines.push(run_here(step));
        // What steps print stays in one piece.
        lines.extend(behind.ended());
    }
    lines.extend(behind.rest());
    Ok(lines)
}

fn run_here(step: &'static Step) -> Line {
    let line = perform(step);
    line.show_end();
    line
}

fn perform(step: &'static Step) -> Line {
    println!("== {}: {}", step.name, step.about);
    let started = Instant::now();
    judge(step.name, (step.run)(), started.elapsed())
}

/// Runs a command, shows what it prints, and gives each line to `read`.
fn show_lines(command: &mut Command, mut read: impl FnMut(&str)) -> Result<ExitStatus> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    let output = child.stdout.take().context("it has no output")?;
    for line in BufReader::new(output).split(b'\n') {
        let line = line?;
        io::stdout().write_all(&line)?;
        println!();
        read(&String::from_utf8_lossy(&line));
    }
    Ok(child.wait()?)
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
    let [passed, failed, skipped] = MARKS;
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

impl Line {
    /// The end of what a step printed.
    fn show_end(&self) {
        println!(
            "== {}: {} after {:.1} s{}\n",
            self.name,
            self.mark,
            self.took.as_secs_f64(),
            after_colon(&self.note)
        );
    }

    /// As the process of a step behind others tells it.
    fn written(&self) -> String {
        let Counts {
            passed,
            failed,
            skipped,
        } = self.counts;
        format!("{}\n{passed} {failed} {skipped}\n{}", self.mark, self.note)
    }

    /// What [`Line::written`] made, if it is that.
    fn read(name: &'static str, written: &str, took: Duration) -> Option<Line> {
        let (mark, rest) = written.split_once('\n')?;
        let (counts, note) = rest.split_once('\n')?;
        let mark = MARKS.into_iter().find(|known| *known == mark)?;
        let counts: Vec<u64> = counts.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
        let [passed, failed, skipped] = counts[..] else {
            return None;
        };
        Some(Line {
            name,
            mark,
            note: note.to_owned(),
            counts: Counts {
                passed,
                failed,
                skipped,
            },
            took,
        })
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
fn parse(mut arguments: lexopt::Parser) -> Result<Option<Call>> {
    use lexopt::prelude::*;
    let (mut only, mut skip, mut verdict) = (Vec::new(), Vec::new(), None);
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
            Long("verdict") => verdict = Some(arguments.value()?.into()),
            other => return Err(other.unexpected().into()),
        }
    }
    let wanted = |step: &&Step| (only.is_empty() || only.contains(&step.name)) && !skip.contains(&step.name);
    Ok(Some(Call {
        steps: steps::ALL.iter().filter(wanted).collect(),
        verdict,
    }))
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
        let call = parse(lexopt::Parser::from_args(arguments)).unwrap().unwrap();
        call.steps.iter().map(|step| step.name).collect()
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
    fn a_line_is_read_as_it_was_written() {
        let counts = Counts {
            passed: 5,
            failed: 1,
            skipped: 2,
        };
        let result = Ok(Verdict::Counted(counts, Some("two\nlines".into())));
        let line = judge("x", result, Duration::ZERO);
        let read = Line::read("x", &line.written(), Duration::ZERO).unwrap();
        assert_eq!((read.mark, read.counts), ("FAILED", counts));
        assert_eq!(read.note, line.note);
        for torn in ["", "ok", "ok\n1 0 0", "ok\n1 0\n", "well\n1 0 0\n", "ok\n1 0 x\n"] {
            assert!(Line::read("x", torn, Duration::ZERO).is_none(), "{torn:?}");
        }
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
