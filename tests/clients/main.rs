//! Clients of RDMA that others wrote, on the drop-in libraries under `doorbell run`, and the tables
//! of `docs/CLIENTS.md`.
//!
//! [`cases`] has the rows, [`rig`] runs them, [`read`] finds in a client's output what it verified,
//! [`pyverbs`] counts rdma-core's tests, [`table`] writes. A failure is retried alone.

mod cases;
mod pyverbs;
mod read;
mod rig;
mod table;

use anyhow::{Context, Result, bail, ensure};
use cases::Case;
use doorbell_tests::{
    process::{check_not_stopped, supervise},
    retry::RetryBudget,
};
use pyverbs::Suite;
use rig::{Outcome, Rig};
use std::{fs, path::PathBuf, process::ExitCode, time::Instant};

const USAGE: &str = "\
clients [NAME...] [--full] [--list] [--doorbell FILE] [--wheels FOLDER]
        [--check FILE | --write FILE [--rxe FILE]]

  NAME            only rows whose client and mode contain it
  --full          also the rows that take long or need large packages; of each row also the client without RDMA, and
                  each end killed
  --list          show the rows
  --doorbell FILE the command [default: beside this program]
  --wheels FOLDER packages from PyPI, for the rows that need them
  --check FILE    fail when a row verified something else than in the table of FILE
  --write FILE    write the rows that were run to the table of FILE, each with all columns
  --rxe FILE      what rdma-core's tests print on the kernel's rxe, for the table of FILE beside soft0's

Exit status: 0 all passed, 1 a failure, 2 bad usage.
";

struct Options {
    names: Vec<String>,
    full: bool,
    list: bool,
    doorbell: PathBuf,
    wheels: Option<PathBuf>,
    check: Option<PathBuf>,
    write: Option<PathBuf>,
    rxe: Option<PathBuf>,
}

fn main() -> ExitCode {
    supervise("clients", USAGE, parse, run)
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options> {
    let mut options = Options {
        names: Vec::new(),
        full: false,
        list: false,
        doorbell: std::env::current_exe()?.with_file_name("doorbell"),
        wheels: None,
        check: None,
        write: None,
        rxe: None,
    };
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--full" => options.full = true,
            "--list" => options.list = true,
            "--doorbell" => options.doorbell = value()?.into(),
            "--wheels" => options.wheels = Some(value()?.into()),
            "--check" => options.check = Some(value()?.into()),
            "--write" => options.write = Some(value()?.into()),
            "--rxe" => options.rxe = Some(value()?.into()),
            name if name.starts_with('-') => bail!("{name}: no such option"),
            name => options.names.push(name.to_owned()),
        }
    }
    Ok(options)
}

impl Options {
    fn chooses(&self, case: &Case) -> bool {
        let what = describe(case);
        let named = self.names.is_empty() || self.names.iter().any(|name| what.contains(name.as_str()));
        named && (self.full || !case.full)
    }
}

fn describe(case: &Case) -> String {
    format!("{}, {}", case.client, case.mode)
}

fn run(options: &Options) -> Result<bool> {
    let cases: Vec<Case> = cases::all().into_iter().filter(|case| options.chooses(case)).collect();
    ensure!(!cases.is_empty(), "no such row; --list shows them");
    if options.list {
        cases.iter().for_each(|case| println!("{}", describe(case)));
        return Ok(true);
    }
    let rig = Rig::new(&options.doorbell, options.wheels.as_deref())?;
    let mut retries = RetryBudget::default();
    let mut rows = Vec::new();
    let whole = options.full || options.write.is_some();
    for (index, case) in cases.iter().enumerate() {
        let row = tried(&rig, case, whole, index, &mut retries)?;
        rows.extend(row.map(|outcome| (case, outcome)));
    }
    let failures = cases.len() - rows.len();
    println!("{} rows, {failures} failures", cases.len());
    let same = record(options, &rows)?;
    Ok(failures == 0 && same)
}

/// A row's outcome, tried again while the budget lasts; `None` when it fails.
fn tried(rig: &Rig, case: &Case, whole: bool, index: usize, retries: &mut RetryBudget) -> Result<Option<Outcome>> {
    let what = describe(case);
    for attempt in 1.. {
        let name = format!("{index}-{attempt}");
        let started = Instant::now();
        let outcome = rig.perform(case, whole, &name);
        check_not_stopped()?;
        let took = started.elapsed().as_secs_f64();
        match outcome {
            Ok(outcome) => {
                let Outcome { report, beside, killed } = &outcome;
                let [server, client] = killed;
                println!(
                    "ok           {took:5.1} s {what}: {}; {}, beside {beside}; killed: {server}, {client}",
                    report.verified, report.figure
                );
                return Ok(Some(outcome));
            }
            Err(error) => print!("FAILED       {took:5.1} s {what}: {error:#}\n{}", rig.outputs(&name)),
        }
        // Of many runs none may fail.
        if case.run.times > 1 || !retries.take() {
            break;
        }
    }
    Ok(None)
}

/// Writes the rows to the table, or compares them with it.
fn record(options: &Options, rows: &[(&Case, Outcome)]) -> Result<bool> {
    let Some(file) = options.write.as_ref().or(options.check.as_ref()) else {
        return Ok(true);
    };
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    if options.write.is_some() {
        let rxe = options.rxe.as_ref().map(fs::read_to_string).transpose()?;
        let rxe = rxe.map(|output| Suite::read(&output)).transpose()?;
        let version = |package| table::version(package, options.wheels.as_deref());
        fs::write(file, table::written(&text, rows, rxe.as_ref(), version)?)?;
        return Ok(true);
    }
    let differences = table::differences(&text, rows)?;
    for line in &differences {
        println!("FAILED       {}: {line}", file.display());
    }
    Ok(differences.is_empty())
}
