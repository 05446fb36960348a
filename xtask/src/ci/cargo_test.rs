//! Runs `cargo test`, counts its results, and keeps what the failed tests said: a log is long, and the part of it that
//! reaches whoever must mend something is often only its end.
//!
//! What fails is run once more, alone. These tests move data between processes under time-outs, and a machine that
//! does not schedule one of them for longer than all its retries fails a test that finds nothing wrong. One that passes
//! alone is counted as passed, and named in the summary with what it said at first: it is to be looked into, not
//! forgotten. More than [`SECOND_TRIES`] failures are no accident, and a test that ended the whole program (no name is
//! known then) gets no second try.

use super::{Counts, Verdict, show_lines, steps::spelt};
use anyhow::Result;
use std::{
    fmt::Write as _,
    process::{Command, ExitStatus, Stdio},
};

/// As many failed tests are run again.
const SECOND_TRIES: usize = 3;
/// As many lines of what a failed test said are kept.
const LINES_KEPT: usize = 60;

/// What one run of cargo came to.
struct Run {
    counts: Counts,
    failures: Vec<Failure>,
    status: ExitStatus,
}

/// A failed test.
#[derive(Debug, PartialEq, Eq)]
struct Failure {
    name: String,
    said: String,
}

/// Where property tests begin: here always at the same place, so that a commit passes twice or fails twice; by hand elsewhere each time.
const PROPERTIES_SEED: &str = "PROPTEST_RNG_SEED";

/// Runs `cargo test`, shows what it prints, and adds up its results; what failed is run again alone.
pub(crate) fn tests(command: &mut Command) -> Result<Verdict> {
    if std::env::var_os(PROPERTIES_SEED).is_none() {
        command.env(PROPERTIES_SEED, "20261122");
    }
    let first = run(command)?;
    let failure = |run: &Run, command: &Command| {
        (!run.status.success()).then(|| format!("{}: {}{}", spelt(command), run.status, told(&run.failures)))
    };
    let named = first.failures.len() as u64 == first.counts.failed;
    if first.failures.is_empty() || first.failures.len() > SECOND_TRIES || !named {
        return Ok(Verdict::Counted(first.counts, failure(&first, command)));
    }

    println!("== again, alone: {}", names(&first.failures));
    let mut again = alone(command, &first.failures);
    let second = run(&mut again)?;
    if !second.status.success() || second.counts.passed < first.counts.failed {
        return Ok(Verdict::Counted(first.counts, failure(&first, command)));
    }
    let counts = Counts {
        passed: first.counts.passed + first.counts.failed,
        failed: 0,
        ..first.counts
    };
    let note = format!("passed only when alone: {}", told(&first.failures));
    Ok(Verdict::Remarkable(counts, note))
}

/// The same call for these tests alone, one after another.
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

fn run(command: &mut Command) -> Result<Run> {
    let mut reader = Reader::default();
    let status = show_lines(command, |line| reader.take(line))?;
    Ok(Run {
        counts: reader.counts,
        failures: reader.failures,
        status,
    })
}

/// Reads what the test programs print, line by line.
#[derive(Default)]
struct Reader {
    counts: Counts,
    failures: Vec<Failure>,
    /// Whether the lines belong to what the last of `failures` said.
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
                said: String::new(),
            });
            (self.within, self.kept) = (true, 0);
        } else if line == "failures:" {
            self.within = false;
        } else if self.within && self.kept < LINES_KEPT && !line.is_empty() {
            self.kept += 1;
            if let Some(last) = self.failures.last_mut() {
                let _ = writeln!(last.said, "    {line}");
            }
        }
    }
}

/// The numbers in `test result: ok. 17 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s`.
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

/// The names, and below them what each said.
fn told(failures: &[Failure]) -> String {
    let mut told = String::new();
    for Failure { name, said } in failures {
        let _ = write!(told, "\n  {name}\n{}", said.trim_end());
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read_from_what_cargo_prints() {
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
    fn failed_tests_are_known_by_name_with_what_they_said() {
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
            told(&reader.failures),
            "\n  a::two\n    thread 'a::two' panicked at src/lib.rs:1:1:\n    left is not right\n  three\n    Error: \"no\""
        );
    }

    #[test]
    fn the_second_try_is_the_same_call_for_those_tests_alone() {
        let mut command = Command::new("cargo");
        command.args(["test", "--workspace", "--", "--skip", "x"]).env("A", "1");
        let failures = [Failure {
            name: "a::two".into(),
            said: String::new(),
        }];
        let again = alone(&command, &failures);
        assert_eq!(
            spelt(&again),
            "cargo test --workspace -- --exact --test-threads 1 a::two"
        );
        assert_eq!(again.get_envs().count(), 1);
    }
}
