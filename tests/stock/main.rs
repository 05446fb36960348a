//! Stock RDMA programs on the soft device: runs [`cases`], both ends under `doorbell run` without
//! any privilege, and makes the tables of `docs/STOCK.md`.
//!
//! [`rig`] runs a pair; [`judge`] checks the output; [`tool`] has each family's command lines;
//! [`trouble`] interrupts and kills; [`table`] writes. A program that fails, or a difference from
//! the committed tables, fails the run; a failure is retried alone.

mod cases;
mod judge;
mod rig;
mod table;
mod tool;
mod trouble;

use anyhow::{Context, Result, bail};
use cases::Grid;
use doorbell_tests::{
    environment::is_whole,
    process::{check_not_stopped, supervise},
    retry::RetryBudget,
    section,
};
use rig::{Outcome, Rig};
use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

const USAGE: &str = "\
stock host|wire [--doorbell FILE] [--only TEXT] [--quick] [--jobs N] [--check FILE | --write FILE]

  host            both ends on this host
  wire            one end on the kernel's rxe, in the guest
  --doorbell FILE the command [default: beside this program]
  --only TEXT     only cells whose description contains TEXT
  --quick         run every second cell of each line and column, and latencies of all sizes of one tool alone; the
                  others count as in the --check FILE; with DOORBELL_SWEEP=all, run all
  --jobs N        pairs at a time [default: half of the processors]
  --check FILE    fail when the tables of FILE differ from the results
  --write FILE    write the tables to FILE

Exit status: 0 all passed, 1 a failure, 2 bad usage.
";

struct Options {
    section: &'static str,
    doorbell: PathBuf,
    only: String,
    /// Of how many cells in each line and column one is run.
    every: usize,
    jobs: usize,
    check: Option<PathBuf>,
    write: Option<PathBuf>,
}

struct Cell {
    grid: &'static Grid,
    tool: &'static str,
    options: &'static str,
    diagonal: usize,
}

impl Cell {
    fn describe(&self) -> String {
        format!("{} {} [{}]", self.tool, self.options, self.grid.title)
    }

    /// A C tool measures the clock rate for 0.2 s before it prints the latency of a size.
    fn is_slow(&self) -> bool {
        self.options.contains("-a ") && matches!(self.tool, "ib_write_lat" | "ib_read_lat")
    }

    fn run(&self, rig: &Rig, folder: &str) -> Outcome {
        let started = Instant::now();
        let outcome = rig
            .pair(folder, self.tool, self.options, self.grid.environment)
            .unwrap_or_else(|error| Outcome::Fails(format!("{error:#}")));
        let what = format!("{:5.1} s {}", started.elapsed().as_secs_f64(), self.describe());
        outcome.show(&what, &rig.outputs_of(folder, &outcome));
        outcome
    }
}

fn main() -> ExitCode {
    supervise("stock", USAGE, parse, run)
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options> {
    let section = match arguments.next().as_deref() {
        Some("host") => "host",
        Some("wire") => "wire",
        _ => bail!("host or wire?"),
    };
    let mut options = Options {
        section,
        every: 1,
        doorbell: std::env::current_exe()?.with_file_name("doorbell"),
        only: String::new(),
        jobs: thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2)),
        check: None,
        write: None,
    };
    while let Some(name) = arguments.next() {
        if name == "--quick" {
            options.every = if is_whole() { 1 } else { 2 };
            continue;
        }
        let value = arguments.next().with_context(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--doorbell" => options.doorbell = value.into(),
            "--only" => options.only = value,
            "--jobs" => {
                options.jobs = value
                    .parse()
                    .ok()
                    .filter(|&jobs| jobs > 0)
                    .context("--jobs wants a number")?
            }
            "--check" => options.check = Some(value.into()),
            "--write" => options.write = Some(value.into()),
            _ => bail!("{name}: no such option"),
        }
    }
    Ok(options)
}

fn run(options: &Options) -> Result<bool> {
    let doorbell =
        fs::canonicalize(&options.doorbell).with_context(|| format!("no command at {}", options.doorbell.display()))?;
    let rig = Rig::new(doorbell)?;
    let grids = match options.section {
        "host" => cases::HOST,
        _ => cases::WIRE,
    };
    let cells: Vec<Cell> = grids
        .iter()
        .flat_map(|grid| {
            grid.lines.iter().enumerate().flat_map(move |(row, &options)| {
                let cell = move |(column, &tool)| Cell {
                    grid,
                    tool,
                    options,
                    diagonal: row + column,
                };
                grid.tools.iter().enumerate().map(cell)
            })
        })
        .filter(|cell| cell.describe().contains(&options.only))
        .collect();
    let mut outcomes = match &options.check {
        Some(file) if options.every > 1 => expected(file, options.section, grids)?,
        _ => vec![None; cells.len()],
    };
    let whole = options.every == 1;
    let chosen = |cell: &Cell| cell.diagonal.is_multiple_of(options.every) && (whole || !cell.is_slow());
    // In the guest everything shares one emulated wire.
    let jobs = if options.section == "wire" { 1 } else { options.jobs };
    let run: Vec<&Cell> = cells.iter().filter(|cell| chosen(cell)).collect();
    let mut results = fill(&rig, &run, jobs);
    check_not_stopped()?;
    let mut retries = RetryBudget::default();
    for (index, (cell, outcome)) in run.iter().zip(&mut results).enumerate() {
        if outcome.fails() && retries.take() {
            *outcome = cell.run(&rig, &format!("again-{index}"));
            check_not_stopped()?;
        }
    }
    let mut failures = results.iter().filter(|outcome| outcome.fails()).count();
    println!("{} pairs", results.len());
    let places = outcomes.iter_mut().zip(&cells).filter(|(_, cell)| chosen(cell));
    for ((place, _), result) in places.zip(results) {
        *place = Some(result);
    }

    let mut body = Vec::new();
    if options.section == "host" && options.only.is_empty() {
        let managed = managed(&rig, &mut retries)?;
        let (singles, troubles) = trouble::all(&rig, &mut retries)?;
        let lines = managed.iter().chain(&singles).chain(&troubles);
        failures += lines.filter(|line| line.outcome.fails()).count();
        body.push(table::lines("Programs of rdmacm-utils", &managed));
        body.push(table::lines("Programs with one end", &singles));
        body.push(table::lines("When things go wrong", &troubles));
    }
    println!("{failures} failures");
    // Tables need all cells.
    let outcomes: Option<Vec<Outcome>> = outcomes.into_iter().collect();
    let Some(outcomes) = outcomes.filter(|_| options.only.is_empty()) else {
        return Ok(failures == 0);
    };

    let mut outcomes = outcomes.as_slice();
    for (index, grid) in grids.iter().enumerate() {
        let (own, rest) = outcomes.split_at(grid.lines.len() * grid.tools.len());
        body.insert(index, table::grid(grid, own));
        outcomes = rest;
    }
    let body = body.join("\n");
    if let Some(file) = &options.write {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        fs::write(file, section::replaced(&text, options.section, &body)?)?;
    }
    let mut same = true;
    if let Some(file) = &options.check {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        for line in table::differences(&text, options.section, &body)? {
            println!("FAILED       {}: {line}", file.display());
            same = false;
        }
    }
    if options.check.is_none() && options.write.is_none() || !same {
        println!("{body}");
    }
    Ok(failures == 0 && same)
}

fn managed(rig: &Rig, retries: &mut RetryBudget) -> Result<Vec<table::Line>> {
    let lines = cases::MANAGED.iter().enumerate().map(|(index, pair)| {
        let what = format!("`{}`", pair.client.replace(" -p PORT", "").replace("HOST", "127.0.0.1"));
        let mut tries = 0;
        table::Line::tried(what, pair.about, retries, || {
            tries += 1;
            let folder = format!("managed-{index}-{tries}");
            let outcome = rig.managed(&folder, pair)?;
            let output = rig.outputs_of(&folder, &outcome);
            Ok((outcome, output))
        })
    });
    lines.collect()
}

/// The outcomes in the committed tables, cell by cell.
fn expected(file: &Path, section: &str, grids: &[Grid]) -> Result<Vec<Option<Outcome>>> {
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let text = &text[section::span(&text, section)?];
    let all = grids.iter().map(|grid| {
        table::read(grid, text).with_context(|| format!("{} has no whole table {:?}", file.display(), grid.title))
    });
    Ok(all
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .map(Some)
        .collect())
}

/// Runs cells, several at a time; returns their outcomes in order.
fn fill(rig: &Rig, cells: &[&Cell], jobs: usize) -> Vec<Outcome> {
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(vec![None; cells.len()]);
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(cell) = cells.get(index) else { break };
                    let outcome = cell.run(rig, &format!("pair-{index}"));
                    outcomes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())[index] = Some(outcome);
                }
            });
        }
    });
    let outcomes = outcomes.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    let all = outcomes
        .into_iter()
        .map(|outcome| outcome.unwrap_or_else(|| Outcome::Fails("it was not run".to_owned())));
    all.collect()
}
