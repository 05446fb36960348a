//! Runs `cargo test`, counts its results, and keeps the output of failed tests for the summary.
//!
//! Failed tests are run once more, alone: a machine that stalls a process for longer than all
//! retries fails a correct test. The summary lists it with its first output. More than [`RETRIES`]
//! failures are not retried, nor is a test that ended its program.

use super::{Counts, Verdict, each_line, print_line, steps::display};
use anyhow::{Result, bail};
use std::{
    fmt::Write as _,
    io::{self, Write as _},
    process::{Command, ExitStatus, Stdio},
    thread,
};

const RETRIES: usize = 3;
const LINES_KEPT: usize = 60;

struct Run {
    counts: Counts,
    failures: Vec<Failure>,
    status: ExitStatus,
}

#[derive(Debug, PartialEq, Eq)]
struct Failure {
    name: String,
    output: String,
}

/// Fixed here, so that a commit passes or fails twice; random by hand.
const PROPERTIES_SEED: &str = "PROPTEST_RNG_SEED";

/// Runs `cargo test`, prints its output and adds up its results; failed tests are run again alone.
pub(crate) fn tests(command: &mut Command) -> Result<Verdict> {
    let first = first_run(command, print_line)?;
    verdict(command, first)
}

/// Runs two calls of `cargo test` side by side, and prints the output of one after the other's.
pub(crate) fn side_by_side([one, other]: [&mut Command; 2]) -> Result<Verdict> {
    let mut printed = Vec::new();
    let (first, second) = thread::scope(|scope| {
        let second = scope.spawn(|| {
            first_run(other, |line| {
                printed.extend_from_slice(line);
                printed.push(b'\n');
                Ok(())
            })
        });
        let first = first_run(one, print_line);
        let second = second
            .join()
            .unwrap_or_else(|_| bail!("the thread that ran tests panicked"));
        (first, second)
    });
    io::stdout().write_all(&printed)?;
    Ok(verdict(one, first?)?.and(verdict(other, second?)?))
}

fn first_run(command: &mut Command, show: impl FnMut(&[u8]) -> io::Result<()>) -> Result<Run> {
    if std::env::var_os(PROPERTIES_SEED).is_none() {
        command.env(PROPERTIES_SEED, "20261122");
    }
    run(command, show)
}

fn verdict(command: &Command, first: Run) -> Result<Verdict> {
    let failure = |run: &Run, command: &Command| {
        (!run.status.success()).then(|| format!("{}: {}{}", display(command), run.status, listed(&run.failures)))
    };
    let named = first.failures.len() as u64 == first.counts.failed;
    if first.failures.is_empty() || first.failures.len() > RETRIES || !named {
        return Ok(Verdict::Counted(first.counts, failure(&first, command)));
    }

    println!("== again, alone: {}", names(&first.failures));
    let mut again = alone(command, &first.failures);
    let second = run(&mut again, print_line)?;
    if !second.status.success() || second.counts.passed < first.counts.failed {
        return Ok(Verdict::Counted(first.counts, failure(&first, command)));
    }
    let counts = Counts {
        passed: first.counts.passed + first.counts.failed,
        failed: 0,
        ..first.counts
    };
    let note = format!("passed only when alone: {}", listed(&first.failures));
    Ok(Verdict::Retried(counts, note))
}

fn alone(command: &Command, failures: &[Failure]) -> Command {
    let mut again = Command::new(command.get_program());
    let arguments: Vec<_> = command.get_args().collect();
    again.args(arguments.iter().take_while(|argument| **argument != "--"));
    again.args(["--", "--exact", "--test-threads", "1"]);
    again.args(failures.iter().map(|failure| &failure.name));
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => again.env(name, value),
            None => again.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        again.current_dir(folder);
    }
    again.stdin(Stdio::null());
    again
}

fn run(command: &mut Command, mut show: impl FnMut(&[u8]) -> io::Result<()>) -> Result<Run> {
    let mut reader = Reader::default();
    let status = each_line(command, |line| {
        show(line)?;
        reader.take(&String::from_utf8_lossy(line));
        Ok(())
    })?;
    Ok(Run {
        counts: reader.counts,
        failures: reader.failures,
        status,
    })
}

#[derive(Default)]
struct Reader {
    counts: Counts,
    failures: Vec<Failure>,
    /// Whether the line belongs to the last failure's output.
    within: bool,
    kept: usize,
}

impl Reader {
    fn take(&mut self, line: &str) {
        if let Some(counts) = result(line) {
            self.counts.add(counts);
            self.within = false;
            return;
        }
        let section = line
            .strip_prefix("---- ")
            .and_then(|rest| rest.strip_suffix(" stdout ----"));
        if let Some(name) = section {
            self.failures.push(Failure {
                name: name.to_owned(),
                output: String::new(),
            });
            (self.within, self.kept) = (true, 0);
        } else if line == "failures:" {
            self.within = false;
        } else if self.within && self.kept < LINES_KEPT && !line.is_empty() {
            self.kept += 1;
            if let Some(last) = self.failures.last_mut() {
                let _ = writeln!(last.output, "    {line}");
            }
        }
    }
}

/// The numbers in `test result: ok. 17 passed; 0 failed; 1 ignored; 0 measured; …`.
fn result(line: &str) -> Option<Counts> {
    let numbers = line.strip_prefix("test result: ")?.split_once(". ")?.1;
    let number = |kind: &str| {
        let field = numbers.split("; ").find_map(|field| field.strip_suffix(kind));
        field.and_then(|number| number.trim().parse().ok())
    };
    Some(Counts {
        passed: number("passed")?,
        failed: number("failed")?,
        skipped: number("ignored")?,
    })
}

fn names(failures: &[Failure]) -> String {
    let names: Vec<_> = failures.iter().map(|failure| failure.name.as_str()).collect();
    names.join(", ")
}

fn listed(failures: &[Failure]) -> String {
    let mut text = String::new();
    for Failure { name, output } in failures {
        let _ = write!(text, "\n  {name}\n{}", output.trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_parsed() {
        let line = "test result: FAILED. 17 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s";
        assert_eq!(
            result(line),
            Some(Counts {
                passed: 17,
                failed: 2,
                skipped: 1
            })
        );
        assert_eq!(result("test result ... ok"), None);
        assert_eq!(result("running 3 tests"), None);
    }

    #[test]
    fn failed_tests_are_listed_with_their_output() {
        let mut reader = Reader::default();
        let printed = "\
running 3 tests
test a::one ... ok
test a::two ... FAILED
test three ... FAILED

failures:

---- a::two stdout ----

thread 'a::two' panicked at src/lib.rs:1:1:
left is not right

---- three stdout ----
Error: \"no\"


failures:
    a::two
    three

test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
not part of any test";
        printed.lines().for_each(|line| reader.take(line));
        assert_eq!((reader.counts.passed, reader.counts.failed), (1, 2));
        assert_eq!(names(&reader.failures), "a::two, three");
        assert_eq!(
            listed(&reader.failures),
            "\n  a::two\n    thread 'a::two' panicked at src/lib.rs:1:1:\n    left is not right\n  three\n    Error: \"no\""
        );
    }

    #[test]
    fn a_retry_is_the_same_call_for_those_tests_alone() {
        let mut command = Command::new("cargo");
        command.args(["test", "--workspace", "--", "--skip", "x"]).env("A", "1");
        let failures = [Failure {
            name: "a::two".into(),
            output: String::new(),
        }];
        let again = alone(&command, &failures);
        assert_eq!(
            display(&again),
            "cargo test --workspace -- --exact --test-threads 1 a::two"
        );
        assert_eq!(again.get_envs().count(), 1);
    }
}
