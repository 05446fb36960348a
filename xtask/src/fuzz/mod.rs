//! `cargo xtask fuzz`: the targets of `tests/fuzz` under libFuzzer, in turns (decision 075).
//!
//! The instrumentation is LLVM's and rustc's own, enabled as cargo-fuzz does; AddressSanitizer,
//! through RUSTC_BOOTSTRAP, so that the pinned toolchain builds it. What a run finds is kept in the
//! target folder, and the committed corpora are made from it with `--minimize`.

mod coverage;
mod run;

use crate::{
    ci::{self, Counts, Scope, Verdict},
    setup, target_folder, workspace,
};
use anyhow::{Context, Result, bail};
use run::Outcome;
use std::{fs, path::PathBuf, time::Duration};

const HELP: &str = "\
Fuzz what peers, other processes and files say, guided by coverage

Usage: cargo xtask fuzz [OPTIONS] [TARGET]...

Options:
      --minutes N  time for all targets together, in equal parts [default: 10]
      --plain      without AddressSanitizer: for targets of safe code, some times as many executions
      --minimize   afterwards replace the committed corpora by small ones of the same coverage
      --coverage   fuzz nothing: replay the committed corpora, show the regions of each parser
  -h, --help       show this

Targets: the programs of tests/fuzz; all of them by default. A table shows the executions of this
run and of all runs in this target folder.

Exit status: 0 when nothing was found, 1 when something was, 2 for a wrong call.
";

/// With `ci --full`.
const MINUTES: f64 = 5.0;

struct Call {
    minutes: f64,
    is_plain: bool,
    minimize: bool,
    coverage: bool,
    targets: Vec<String>,
}

/// The command-line form. Returns the exit status.
pub(crate) fn main(arguments: lexopt::Parser) -> Result<u8> {
    let Some(call) = parse(arguments, &targets()?)? else {
        return Ok(0);
    };
    if call.coverage {
        coverage::show()?;
        return Ok(0);
    }
    match setup::provide(&[setup::CXX])?.as_slice() {
        [] => {}
        missing => bail!("missing: {}", missing.join(" ")),
    }
    let found = fuzz(&call)?;
    Ok(u8::from(found > 0))
}

pub(crate) fn check(_: Scope) -> Result<Verdict> {
    match setup::provide(&[setup::CXX])?.as_slice() {
        [] => {}
        missing => return ci::lacking(missing),
    }
    let targets = targets()?;
    let count = targets.len() as u64;
    let call = Call {
        minutes: MINUTES,
        is_plain: false,
        minimize: false,
        coverage: false,
        targets,
    };
    let failed = fuzz(&call)?;
    let passed = count - failed;
    Ok(Verdict::Counted(
        Counts {
            passed,
            failed,
            ..Counts::default()
        },
        (failed > 0).then(|| "a target failed; see above".to_owned()),
    ))
}

/// The names of the targets: those of their programs.
fn targets() -> Result<Vec<String>> {
    let folder = workspace().join("tests/fuzz/fuzz_targets");
    let files = fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut names = Vec::new();
    for file in files {
        let path = file?.path();
        names.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
    }
    names.sort();
    Ok(names)
}

fn parse(mut arguments: lexopt::Parser, known: &[String]) -> Result<Option<Call>> {
    use lexopt::prelude::*;
    let mut call = Call {
        minutes: 10.0,
        is_plain: false,
        minimize: false,
        coverage: false,
        targets: Vec::new(),
    };
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('h') | Long("help") => {
                print!("{HELP}");
                return Ok(None);
            }
            Long("minutes") => call.minutes = arguments.value()?.parse()?,
            Long("plain") => call.is_plain = true,
            Long("minimize") => call.minimize = true,
            Long("coverage") => call.coverage = true,
            Value(name) => call.targets.push(name.string()?),
            other => return Err(other.unexpected().into()),
        }
    }
    if let Some(name) = call.targets.iter().find(|name| !known.contains(name)) {
        bail!("no target {name:?}; there are {}", known.join(", "));
    }
    if !(call.minutes > 0.0 && call.minutes < 1e6) {
        bail!("--minutes {}: a positive number", call.minutes);
    }
    if call.targets.is_empty() {
        call.targets = known.to_vec();
    }
    Ok(Some(call))
}

/// Runs the targets in turns and prints the table; returns how many failed.
fn fuzz(call: &Call) -> Result<u64> {
    let programs = run::build(&call.targets, call.is_plain)?;
    let time = Duration::from_secs_f64(call.minutes * 60.0 / call.targets.len() as f64);
    let mut outcomes = Vec::new();
    for target in &call.targets {
        println!("-- {target}");
        outcomes.push(run::run(&programs.join(target), target, time)?);
    }
    if call.minimize {
        for target in &call.targets {
            run::minimize(&programs.join(target), target)?;
        }
    }
    print!("{}", table(&outcomes));
    Ok(outcomes.iter().filter(|outcome| outcome.finding.is_some()).count() as u64)
}

fn table(outcomes: &[Outcome]) -> String {
    let mut text = format!(
        "{:<20} {:>13} {:>9} {:>10} {:>9} {:>9} {:>15}\n",
        "target", "executions", "per s", "new units", "edges", "features", "all runs"
    );
    for outcome in outcomes {
        let Outcome {
            target,
            executions,
            per_second,
            new_units,
            edges,
            features,
            all_runs,
            finding,
        } = outcome;
        text += &format!(
            "{target:<20} {executions:>13} {per_second:>9} {new_units:>10} {edges:>9} {features:>9} {all_runs:>15}\n"
        );
        if let Some(finding) = finding {
            text += &format!("{target}: FAILED: {}\n", finding.display());
        }
    }
    let sum = |of: fn(&Outcome) -> u64| outcomes.iter().map(of).sum::<u64>();
    let all = (sum(|outcome| outcome.executions), sum(|outcome| outcome.all_runs));
    text + &format!("{:<20} {:>13} {:>56}\n", "all", all.0, all.1)
}

/// Where builds, corpora and findings are.
fn folder() -> Result<PathBuf> {
    Ok(target_folder()?.join("fuzz"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(arguments: &[&str]) -> Result<Option<Call>> {
        parse(lexopt::Parser::from_args(arguments), &["a".to_owned(), "b".to_owned()])
    }

    #[test]
    fn targets_are_chosen_by_name() {
        assert_eq!(call(&["b"]).unwrap().unwrap().targets, ["b"]);
        assert_eq!(call(&["--minutes", "0.5"]).unwrap().unwrap().targets, ["a", "b"]);
        assert!(call(&["c"]).is_err());
        assert!(call(&["--minutes", "0"]).is_err());
    }

    #[test]
    fn the_table_has_totals_and_findings() {
        let outcome = |target: &str, executions, finding: Option<PathBuf>| Outcome {
            target: target.to_owned(),
            executions,
            per_second: 10,
            new_units: 1,
            edges: 5,
            features: 7,
            all_runs: 2 * executions,
            finding,
        };
        let text = table(&[outcome("a", 100, None), outcome("b", 23, Some("crash-1".into()))]);
        let last: Vec<_> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last, ["all", "123", "246"]);
        assert!(text.contains("b: FAILED: crash-1"), "{text}");
    }
}
