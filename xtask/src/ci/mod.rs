//! `cargo xtask ci`: every check of this workspace ([`steps`]), in order, with a summary at the
//! end.
//!
//! Missing packages are installed when run as root on Debian; otherwise a step that lacks one is
//! skipped with the reason, or fails under `CI=true`. Steps with time-sensitive tests run one after
//! another; the rest run in the [`background`]. The [`Scope`] is the short form, which CI runs, or
//! `--full`. The summary repeats the output of failed tests ([`cargo_test`]) and rows ([`rows`]),
//! and lists what was retried.

mod background;
mod cargo_test;
mod guest;
mod licences;
mod package;
pub(crate) mod rows;
mod safe;
mod steps;

pub(crate) use cargo_test::tests;
pub(crate) use steps::{command, stdout, succeed};

use anyhow::{Context, Result, bail};
use background::Background;
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
      --full        run everything: release builds, sanitizers, peers, whole products of parameters
      --only NAME   run this step alone; may be given several times
      --skip NAME   leave this step out; may be given several times
      --list        show the steps' names
  -h, --help        show this

Exit status: 0 when nothing failed, 1 when something did, 2 for a wrong call.
";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// What CI runs: covering arrays of large products.
    Short,
    Full,
}

pub(crate) struct Step {
    /// The argument of `--only` and `--skip`.
    pub(crate) name: &'static str,
    /// One line for `--list`.
    pub(crate) about: &'static str,
    place: Place,
    full_only: bool,
    run: fn(Scope) -> Result<Verdict>,
}

impl Step {
    const fn new(name: &'static str, place: Place, run: fn(Scope) -> Result<Verdict>, about: &'static str) -> Self {
        let full_only = false;
        Self {
            name,
            about,
            place,
            full_only,
            run,
        }
    }

    const fn full(name: &'static str, place: Place, run: fn(Scope) -> Result<Verdict>, about: &'static str) -> Self {
        Self {
            full_only: true,
            ..Self::new(name, place, run, about)
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Before all others: cheap, or the others need its effects.
    First,
    /// In order: its tests depend on time, so no other such step may run beside it.
    InOrder,
    /// Beside those at a low priority.
    Background,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    /// Not run, for this reason.
    Skipped(String),
    /// Counted tests; the step failed if one of them did, or for the reason given.
    Counted(Counts, Option<String>),
    /// Counted tests of which some passed only when retried: these, with their output.
    Retried(Counts, String),
}

impl Verdict {
    pub(crate) fn and(self, other: Verdict) -> Verdict {
        match (self, other) {
            (Verdict::Retried(mut counts, why), Verdict::Retried(others, other_why)) => {
                counts.add(others);
                Verdict::Retried(counts, format!("{why}\n{other_why}"))
            }
            (Verdict::Retried(counts, why), Verdict::Counted(mut others, failure))
            | (Verdict::Counted(mut others, failure), Verdict::Retried(counts, why)) => {
                others.add(counts);
                match failure {
                    Some(failure) => Verdict::Counted(others, Some(format!("{failure}\n{why}"))),
                    None if others.failed > 0 => Verdict::Counted(others, Some(why)),
                    None => Verdict::Retried(others, why),
                }
            }
            (Verdict::Counted(mut counts, why), Verdict::Counted(others, other_why)) => {
                counts.add(others);
                Verdict::Counted(counts, why.or(other_why))
            }
            (Verdict::Counted(counts, why), _) | (_, Verdict::Counted(counts, why)) => Verdict::Counted(counts, why),
            (Verdict::Retried(counts, why), _) | (_, Verdict::Retried(counts, why)) => Verdict::Retried(counts, why),
            (first, _) => first,
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, other: Counts) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

const MARKS: [&str; 3] = ["ok", "FAILED", "skipped"];

/// A line of the summary.
pub(crate) struct Line {
    name: &'static str,
    mark: &'static str,
    note: String,
    pub(crate) counts: Counts,
    retried: bool,
    took: Duration,
}

/// The command line.
struct Call {
    scope: Scope,
    steps: Vec<&'static Step>,
    /// The file for the only step's line, when this process runs it for [`background`].
    verdict: Option<PathBuf>,
}

/// The command-line form. Returns the exit status.
pub(crate) fn main(arguments: lexopt::Parser) -> Result<u8> {
    let Some(Call { scope, steps, verdict }) = parse(arguments)? else {
        return Ok(0);
    };
    if let Some(file) = verdict {
        let [step] = steps[..] else {
            bail!("--verdict takes one step")
        };
        let line = perform(step, scope);
        fs::write(&file, line.serialize()).with_context(|| format!("cannot write {}", file.display()))?;
        return Ok(u8::from(line.counts.failed > 0));
    }

    let started = Instant::now();
    let lines = run(&steps, scope)?;
    let ordered = steps
        .iter()
        .flat_map(|step| lines.iter().filter(|line| line.name == step.name));
    let mut total = Counts::default();
    for line in ordered.clone() {
        println!("{line}");
        total.add(line.counts);
    }
    println!("{:<12} {:<8} {:>7.1} s", "total", "", started.elapsed().as_secs_f64());
    let retried: Vec<_> = ordered.filter(|line| line.retried).map(|line| line.name).collect();
    println!(
        "retried: {}",
        if retried.is_empty() {
            "none".to_owned()
        } else {
            retried.join(", ")
        }
    );
    println!(
        "{} passed, {} failed, {} skipped",
        total.passed, total.failed, total.skipped
    );
    Ok(u8::from(total.failed > 0))
}

/// Runs the steps, each in its place. The lines are in the order in which the steps ended.
fn run(steps: &[&'static Step], scope: Scope) -> Result<Vec<Line>> {
    let placed = |place| steps.iter().copied().filter(move |step| step.place == place);
    let mut lines: Vec<_> = placed(Place::First).map(|step| run_here(step, scope)).collect();
    if placed(Place::InOrder).next().is_none() {
        lines.extend(placed(Place::Background).map(|step| run_here(step, scope)));
        return Ok(lines);
    }
    let mut background = Background::start(placed(Place::Background).collect(), scope)?;
    for step in placed(Place::InOrder) {
        lines.push(run_here(step, scope));
        // The output of a step stays in one piece.
        lines.extend(background.ended());
    }
    lines.extend(background.wait());
    Ok(lines)
}

fn run_here(step: &'static Step, scope: Scope) -> Line {
    let line = perform(step, scope);
    line.show_end();
    line
}

fn perform(step: &'static Step, scope: Scope) -> Line {
    println!("== {}: {}", step.name, step.about);
    let started = Instant::now();
    judge(step.name, (step.run)(scope), started.elapsed())
}

/// Runs a command, prints its output, and passes each line to `read`.
fn run_lines(command: &mut Command, mut read: impl FnMut(&str)) -> Result<ExitStatus> {
    each_line(command, |line| {
        print_line(line)?;
        read(&String::from_utf8_lossy(line));
        Ok(())
    })
}

fn print_line(line: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(line)?;
    stdout.write_all(b"\n")
}

fn each_line(command: &mut Command, mut read: impl FnMut(&[u8]) -> io::Result<()>) -> Result<ExitStatus> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    let output = child.stdout.take().context("it has no output")?;
    for line in BufReader::new(output).split(b'\n') {
        read(&line?)?;
    }
    Ok(child.wait()?)
}

/// Whether a missing package is a failure rather than a reason to skip.
pub(crate) fn under_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| value == "true" || value == "1")
}

/// The verdict when the machine lacks packages.
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
    let retried = matches!(result, Ok(Verdict::Retried(..)));
    let one = |passed, failed, skipped| Counts {
        passed,
        failed,
        skipped,
    };
    let (mark, note, counts) = match result {
        Ok(Verdict::Passed) => (passed, String::new(), one(1, 0, 0)),
        Ok(Verdict::Skipped(why)) => (skipped, why, one(0, 0, 1)),
        Ok(Verdict::Retried(counts, why)) => (passed, format!("{}; {why}", count(counts)), counts),
        Ok(Verdict::Counted(counts, None)) if counts.failed == 0 => (passed, count(counts), counts),
        Ok(Verdict::Counted(counts, None)) => (failed, count(counts), counts),
        Ok(Verdict::Counted(mut counts, Some(why))) => {
            // A crash or a compile error fails no single test.
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
        retried,
        took,
    }
}

impl Line {
    /// Prints the end of a step.
    fn show_end(&self) {
        println!(
            "== {}: {} after {:.1} s{}\n",
            self.name,
            self.mark,
            self.took.as_secs_f64(),
            after_colon(&self.note)
        );
    }

    /// The form in which a background process reports it.
    fn serialize(&self) -> String {
        let Counts {
            passed,
            failed,
            skipped,
        } = self.counts;
        format!(
            "{}\n{passed} {failed} {skipped} {}\n{}",
            self.mark,
            u8::from(self.retried),
            self.note
        )
    }

    /// Parses the result of [`Line::serialize`].
    fn parse(name: &'static str, text: &str, took: Duration) -> Option<Line> {
        let (mark, rest) = text.split_once('\n')?;
        let (counts, note) = rest.split_once('\n')?;
        let mark = MARKS.into_iter().find(|known| *known == mark)?;
        let counts: Vec<u64> = counts.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
        let [passed, failed, skipped, retried] = counts[..] else {
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
            retried: retried == 1,
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

/// The steps to run, in order; `None` after `--help` or `--list`.
fn parse(mut arguments: lexopt::Parser) -> Result<Option<Call>> {
    use lexopt::prelude::*;
    let (mut only, mut skip, mut verdict, mut scope) = (Vec::new(), Vec::new(), None, Scope::Short);
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
            Long("full") => scope = Scope::Full,
            Long("only") => only.push(known(&arguments.value()?.string()?)?),
            Long("skip") => skip.push(known(&arguments.value()?.string()?)?),
            Long("verdict") => verdict = Some(arguments.value()?.into()),
            other => return Err(other.unexpected().into()),
        }
    }
    let in_scope = |step: &Step| scope == Scope::Full || !step.full_only;
    let wanted = |step: &&Step| {
        let named = only.contains(&step.name) || only.is_empty() && in_scope(step);
        named && !skip.contains(&step.name)
    };
    Ok(Some(Call {
        scope,
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
        let all = chosen(&["--full"]);
        assert_eq!(all.len(), steps::ALL.len());
        assert_eq!(chosen(&["--only", "png"]), ["png"]);
        assert!(!chosen(&[]).contains(&"png"));
        assert_eq!(chosen(&["--only", "vm", "--only=fmt"]), ["fmt", "vm"]);
        assert_eq!(chosen(&["--full", "--skip", all[0]]), all[1..]);
        assert!(parse(lexopt::Parser::from_args(["--only", "nope"])).is_err());
    }

    #[test]
    fn lines_survive_serialization() {
        let counts = Counts {
            passed: 5,
            failed: 1,
            skipped: 2,
        };
        let result = Ok(Verdict::Counted(counts, Some("two\nlines".into())));
        let line = judge("x", result, Duration::ZERO);
        let read = Line::parse("x", &line.serialize(), Duration::ZERO).unwrap();
        assert_eq!((read.mark, read.counts), ("FAILED", counts));
        assert_eq!(read.note, line.note);
        for torn in [
            "",
            "ok",
            "ok\n1 0 0 0",
            "ok\n1 0 0\n",
            "well\n1 0 0 0\n",
            "ok\n1 0 0 x\n",
        ] {
            assert!(Line::parse("x", torn, Duration::ZERO).is_none(), "{torn:?}");
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
