//! The conformance suite: the rules of IBTA vol 1 and the man pages for verbs, each a case with its
//! clause, for any device: the system's libibverbs (in the guest the kernel's rxe) or the soft
//! device's table. Both queue pairs of a case are on the device under test.
//!
//! `cases/` has the rules by area, `rig/` the objects that they use; [`command`] is the program. A
//! waiver file (`docs/waivers`) lists a device's deviations; a waived case must still fail, so that
//! the file cannot outlive its reasons.

mod cases;
mod report;
mod rig;
mod runner;
pub mod waivers;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use doorbell_verbs_sys::Api;

use rig::Bench;

use crate::raw;

const USAGE: &str = "conformance [--device NAME] [--system] [--address IP] [--only PART]… [--waivers FILE] [--json] [--seed N] [--quiet-ms N] [--patience-ms N] | --list | --matrix";

struct Case {
    /// Area and rule, as in `post/queue-full`.
    name: String,
    /// The clause or table of IBTA vol 1, or the man page.
    clause: &'static str,
    rule: String,
    run: Box<Check>,
}

/// Checks a device for a rule.
type Check = dyn Fn(&Bench) -> Result<()> + Send + Sync;

fn case(
    name: &str,
    clause: &'static str,
    rule: &str,
    run: impl Fn(&Bench) -> Result<()> + Send + Sync + 'static,
) -> Case {
    Case {
        name: name.to_owned(),
        clause,
        rule: rule.to_owned(),
        run: Box::new(run),
    }
}

#[derive(Debug)]
struct Options {
    list: bool,
    /// Print the device's matrix of states and events.
    matrix: bool,
    device: String,
    /// Use the system's library for any device name.
    system: bool,
    address: Option<std::net::IpAddr>,
    only: Vec<String>,
    waivers: Option<PathBuf>,
    json: bool,
    seed: u64,
    quiet: Duration,
    time_limit: Duration,
}

/// The program: 0 when every case conforms or is waived, 1 when one does not, 2 for bad usage.
pub fn command(arguments: impl Iterator<Item = String>) -> ExitCode {
    let options = match parse(arguments) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error:#}\nusage: {USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{}: {error:#}", options.device);
            ExitCode::FAILURE
        }
    }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options> {
    let mut options = Options {
        list: false,
        matrix: false,
        device: "soft0".to_owned(),
        system: false,
        address: None,
        only: Vec::new(),
        waivers: None,
        json: false,
        seed: 1,
        quiet: Duration::from_millis(30),
        time_limit: Duration::from_secs(20),
    };
    while let Some(name) = arguments.next() {
        match name.as_str() {
            "--list" => {
                options.list = true;
                continue;
            }
            "--matrix" => {
                options.matrix = true;
                continue;
            }
            "--system" => {
                options.system = true;
                continue;
            }
            "--json" => {
                options.json = true;
                continue;
            }
            _ => {}
        }
        let value = arguments.next().with_context(|| format!("{name} needs a value"))?;
        let wrong = || format!("{name} {value}");
        match name.as_str() {
            "--device" => options.device = value,
            "--address" => options.address = Some(value.parse().with_context(wrong)?),
            "--only" => options.only.push(value),
            "--waivers" => options.waivers = Some(value.into()),
            "--seed" => options.seed = value.parse().with_context(wrong)?,
            "--quiet-ms" => options.quiet = Duration::from_millis(value.parse().with_context(wrong)?),
            "--patience-ms" => options.time_limit = Duration::from_millis(value.parse().with_context(wrong)?),
            _ => bail!("{name}: no such option"),
        }
    }
    Ok(options)
}

fn run(options: &Options) -> Result<bool> {
    let mut cases = cases::all();
    let names: Vec<String> = cases.iter().map(|case| case.name.clone()).collect();
    if options.list {
        report::list(&cases);
        return Ok(true);
    }
    if options.matrix {
        let api = api_for(options)?;
        let bench = || Bench::new(api, &options.device, options.seed, [options.quiet, options.time_limit]);
        print!("{}", cases::matrix(bench));
        return Ok(true);
    }
    let waivers = options
        .waivers
        .as_deref()
        .map(waivers::read)
        .transpose()?
        .unwrap_or_default();
    waivers::check(&waivers, &names)?;
    if !options.only.is_empty() {
        cases.retain(|case| options.only.iter().any(|part| case.name.contains(part)));
        ensure!(
            !cases.is_empty(),
            "no case has {} in its name",
            options.only.join(" or ")
        );
    }
    let api = api_for(options)?;
    let results = runner::run(api, options, cases, &waivers, |result| {
        report::print_case(options, result)
    });
    report::print_summary(options, &results);
    Ok(results.iter().all(runner::CaseResult::is_good))
}

/// The verbs for the device: the system's for any name with `--system`.
fn api_for(options: &Options) -> Result<&'static Api> {
    if options.system {
        return Ok(Api::load()?);
    }
    raw::api_for(&options.device, options.address)
}
