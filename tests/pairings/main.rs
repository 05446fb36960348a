//! Each of `ib_{write,read,send,atomic}_{bw,lat}` of the package and of Doorbell, as server and as
//! client, in every pairing. Both ends must exit with status 0 and results that agree with those of
//! the package's tools among themselves.
//!
//! A case's pairings are interleaved, forward and reversed, and compared within a round, so that
//! other load affects all alike; disagreeing ones are repeated up to a limit. Where the package's
//! tools themselves disagree, the best runs are compared, as other load only worsens a result.

mod cases;
mod results;
mod rig;

use anyhow::{Context, Result, bail};
use cases::{Case, Environment};
use doorbell_tests::{
    environment::is_whole,
    process::{check_not_stopped, supervise},
    retry::RetryBudget,
    section,
};
use results::{Results, distance, greatest, least, median, ratio_by_rounds, ratio_of_best};
use rig::{Pairing, Rig};
use std::{fmt::Write, fs, path::PathBuf, process::ExitCode, time::Instant};

/// Default limit of repetitions where results disagree, as a multiple of `--repeats`.
const DEFAULT_LIMIT: usize = 8;

const USAGE: &str = "\
pairings host|udp|managed|rxe|wire [--doorbell FILE] [--only TEXT] [--repeats N] [--most N] [--within PERCENT] [--write FILE]
pairings host|udp|managed|rxe|wire --quick [--doorbell FILE] [--only TEXT]

  host, udp       both ends on this host, on the userspace device; over UDP
  managed         on this host by the connection manager
  rxe, wire       in the guest: both on the kernel's rxe; one of them on the userspace device
  --doorbell FILE the command [default: beside this program]
  --only TEXT     only cases whose description contains TEXT
  --repeats N     runs of each pairing [default: 3]
  --most N        limit of runs where results disagree [default: 8 times the repeats]
  --within P      allowed distance of results in percent [default: 10]
  --write FILE    write the table to its section of FILE rather than stdout
  --quick         only check that mixed pairings succeed with results; few iterations. Unless DOORBELL_SWEEP=all,
                  host and rxe run half of the cases each

Exit status: 0 all passed, 1 a failure, 2 bad usage.
";

struct Options {
    section: &'static str,
    environment: Environment,
    doorbell: PathBuf,
    only: String,
    repeats: usize,
    most: Option<usize>,
    within: f64,
    write: Option<PathBuf>,
    quick: bool,
}

impl Options {
    /// The allowed distance of results, as a factor.
    fn limit(&self) -> f64 {
        1.0 + self.within / 100.0
    }

    fn most(&self) -> usize {
        self.most.unwrap_or(DEFAULT_LIMIT * self.repeats)
    }
}

struct Outcome {
    /// The results of stock tools among themselves.
    stock: Vec<Results>,
    /// The ratio of each other pairing to these, by rounds.
    ratios: Vec<f64>,
    /// The same of the best runs.
    best: Vec<f64>,
    /// The spread of stock tools among themselves: maximum by minimum, of several sizes the median.
    spread: f64,
    runs: usize,
}

impl Outcome {
    /// By rounds, or by the best runs where the package's tools themselves spread further.
    fn agrees(&self, limit: f64) -> bool {
        near(&self.ratios, limit) || (self.spread > limit && near(&self.best, limit))
    }
}

fn near(ratios: &[f64], limit: f64) -> bool {
    ratios.iter().all(|&ratio| distance(ratio) <= limit)
}

fn main() -> ExitCode {
    supervise("pairings", USAGE, parse, run)
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options> {
    let named = arguments.next().unwrap_or_default();
    let &(section, environment) = Environment::ALL
        .iter()
        .find(|(name, _)| *name == named)
        .context("host, udp, managed, rxe or wire?")?;
    let mut options = Options {
        section,
        environment,
        doorbell: std::env::current_exe()?.with_file_name("doorbell"),
        only: String::new(),
        repeats: 3,
        most: None,
        within: 10.0,
        write: None,
        quick: false,
    };
    while let Some(name) = arguments.next() {
        if name == "--quick" {
            options.quick = true;
            continue;
        }
        let value = arguments.next().with_context(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--doorbell" => options.doorbell = value.into(),
            "--only" => options.only = value,
            "--repeats" => {
                options.repeats = count(&value).context("--repeats wants a number")?;
            }
            "--most" => options.most = Some(count(&value).context("--most wants a number")?),
            "--within" => {
                options.within = value
                    .parse()
                    .ok()
                    .filter(|percent| *percent > 0.0)
                    .context("--within wants a number")?;
            }
            "--write" => options.write = Some(value.into()),
            _ => bail!("{name}: no such option"),
        }
    }
    Ok(options)
}

fn count(value: &str) -> Option<usize> {
    value.parse().ok().filter(|&count| count > 0)
}

fn run(options: &Options) -> Result<bool> {
    let doorbell =
        fs::canonicalize(&options.doorbell).with_context(|| format!("no command at {}", options.doorbell.display()))?;
    let mut rig = Rig::new(doorbell)?;
    let mut table = String::from(
        "| test | stock's figure | stock's spread | stock serves ours | ours serves stock | ours serves ours | the same by the best runs | runs of each |\n|---|---|---|---|---|---|---|---|\n",
    );
    let (mut cases, mut failures) = (0, 0);
    let mut retries = RetryBudget::default();
    let chosen = if options.quick {
        cases::quick(options.environment, is_whole())
    } else {
        cases::all(options.environment)
    };
    for case in chosen {
        let what = case.describe();
        if !what.contains(&options.only) {
            continue;
        }
        cases += 1;
        if options.quick {
            failures += usize::from(!quick_pairs_succeed(
                &mut rig,
                &case,
                options.environment,
                &mut retries,
            )?);
            continue;
        }
        let started = Instant::now();
        let outcome = measure(&mut rig, &case, options);
        check_not_stopped()?;
        let took = started.elapsed().as_secs_f64();
        match outcome {
            Ok(outcome) => {
                let agrees = outcome.agrees(options.limit());
                failures += usize::from(!agrees);
                let mark = if agrees { "ok    " } else { "FAILED" };
                let written = |ratios: &[f64], between: &str| {
                    let ratios: Vec<String> = ratios.iter().map(|ratio| format!("{ratio:.3}")).collect();
                    ratios.join(between)
                };
                println!(
                    "{mark} {took:5.1} s {what}: {} ({}) of stock's {} ({} runs, spread {:.3})",
                    written(&outcome.ratios, " "),
                    written(&outcome.best, " "),
                    show(&case, &outcome.stock),
                    outcome.runs,
                    outcome.spread
                );
                let _ = writeln!(
                    table,
                    "| `{what}` | {} | {:.2} | {} | {} | {} |",
                    show(&case, &outcome.stock),
                    outcome.spread,
                    written(&outcome.ratios, " | "),
                    written(&outcome.best, " "),
                    outcome.runs
                );
            }
            Err(error) => {
                failures += 1;
                println!("FAILED {took:5.1} s {what}: {error:#}");
                let _ = writeln!(table, "| `{what}` | **fails** | | | | | | |");
            }
        }
    }
    println!("{cases} tests, {failures} failures");
    match &options.write {
        Some(file) => {
            let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
            fs::write(file, section::replaced(&text, options.section, &table)?)?;
        }
        // The guest's writes are dropped.
        None if !options.quick => println!("{table}"),
        None => {}
    }
    Ok(failures == 0)
}

/// A failure of a mixed pairing is retried while the budget lasts.
fn quick_pairs_succeed(
    rig: &mut Rig,
    case: &Case,
    environment: Environment,
    retries: &mut RetryBudget,
) -> Result<bool> {
    loop {
        let started = Instant::now();
        let ended = Pairing::MIXED.into_iter().try_for_each(|pairing| {
            let run = rig.run(case, environment, pairing);
            run.map(drop).with_context(|| pairing.to_string())
        });
        check_not_stopped()?;
        let what = format!("{:5.1} s {}", started.elapsed().as_secs_f64(), case.describe());
        match ended {
            Ok(()) => {
                println!("ok     {what}");
                return Ok(true);
            }
            Err(error) => println!("FAILED {what}: {error:#}"),
        }
        if !retries.take() {
            return Ok(false);
        }
    }
}

fn measure(rig: &mut Rig, case: &Case, options: &Options) -> Result<Outcome> {
    let mut all: [Vec<Results>; 4] = Default::default();
    loop {
        for _ in 0..options.repeats {
            let mut turn: Vec<_> = Pairing::ALL.iter().zip(&mut all).collect();
            if turn[0].1.len() % 2 == 1 {
                turn.reverse();
            }
            for (pairing, runs) in turn {
                let results = rig
                    .run(case, options.environment, *pairing)
                    .with_context(|| pairing.to_string())?;
                runs.push(results);
            }
        }
        let [stock, others @ ..] = &all;
        let ratios = compared(stock, others, ratio_by_rounds)?;
        if near(&ratios, options.limit()) || stock.len() + options.repeats > options.most() {
            let best = if case.is_latency() { least } else { greatest };
            let best = compared(stock, others, |runs, stock| ratio_of_best(runs, stock, best))?;
            let spread = spread(stock).context("no runs")?;
            let [stock, ..] = all;
            return Ok(Outcome {
                ratios,
                best,
                spread,
                runs: stock.len(),
                stock,
            });
        }
    }
}

fn compared(
    stock: &[Results],
    others: &[Vec<Results>],
    ratio: impl Fn(&[Results], &[Results]) -> Option<f64>,
) -> Result<Vec<f64>> {
    let ratios = others.iter().map(|runs| ratio(runs, stock));
    ratios
        .collect::<Option<Vec<f64>>>()
        .context("the ends measure different sizes")
}

/// The maximum by the minimum of the runs; of several sizes the median.
fn spread(runs: &[Results]) -> Option<f64> {
    let sizes = runs.first()?.sizes.len();
    let spreads = (0..sizes).map(|environment| {
        let values = || runs.iter().map(|run| run.values[environment]);
        values().fold(0.0, f64::max) / values().fold(f64::INFINITY, f64::min)
    });
    median(spreads.collect())
}

/// The median result with its unit; of all sizes the first's and the last's.
fn show(case: &Case, runs: &[Results]) -> String {
    let unit = if case.is_latency() { "us" } else { "MiB/s" };
    let at = |environment: usize| {
        median(
            runs.iter()
                .filter_map(|run| run.values.get(environment).copied())
                .collect(),
        )
    };
    let count = runs.first().map_or(0, |run| run.values.len());
    match (at(0), at(count.saturating_sub(1))) {
        (Some(first), Some(last)) if count > 1 => format!("{first:.2} to {last:.2} {unit}"),
        (Some(only), _) => format!("{only:.2} {unit}"),
        _ => String::new(),
    }
}
