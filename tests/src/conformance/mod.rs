//! The conformance suite: what IBTA vol 1 and the man pages say of verbs, each rule a case with its clause, over any device.
//!
//! The same code runs over the system's libibverbs, which in the guest is the kernel's rxe, and over the soft device's table. Both queue pairs of a case are on the
//! one device under test, which so talks to itself. `cases/` has the rules by area; `rig/` the objects that they are written with; [`command`] is the program
//! `conformance`. What a device lacks or does otherwise, with the reason, stands in a waiver file (`docs/waivers`): a waived case must fail still, so that the file
//! cannot outlive its reasons.

mod cases;
mod report;
mod rig;
mod runner;
mod waivers;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs_sys::Api;

use rig::Bench;

const USAGE: &str = "conformance [--device NAME] [--system] [--address IP] [--only PART]… [--waivers FILE] [--json] [--seed N] [--quiet-ms N] [--patience-ms N] | --list | --matrix";

/// A rule.
struct Case {
    /// Area and rule, as in `post/queue-full`.
    name: String,
    /// Where the rule stands: a clause or table of IBTA vol 1, or a man page.
    clause: &'static str,
    /// The rule in one line.
    says: String,
    run: Box<Check>,
}

/// Holds a device to a rule.
type Check = dyn Fn(&Bench) -> Result<()> + Send + Sync;

/// A case with a fixed name.
fn case(
    name: &str,
    clause: &'static str,
    says: &str,
    run: impl Fn(&Bench) -> Result<()> + Send + Sync + 'static,
) -> Case {
    Case {
        name: name.to_owned(),
        clause,
        says: says.to_owned(),
        run: Box::new(run),
    }
}

/// What the command line asks for.
#[derive(Debug)]
struct Options {
    list: bool,
    /// Print the matrix of state and event as the device has it.
    matrix: bool,
    device: String,
    /// Reach it by the system's library whatever it is called.
    system: bool,
    address: Option<std::net::IpAddr>,
    only: Vec<String>,
    waivers: Option<PathBuf>,
    json: bool,
    seed: u64,
    quiet: Duration,
    patience: Duration,
}

/// The program: 0 when every case conforms or is waived, 1 when one does not, 2 when the command line is wrong.
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
        patience: Duration::from_secs(20),
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
            "--patience-ms" => options.patience = Duration::from_millis(value.parse().with_context(wrong)?),
            _ => bail!("{name}: no such option"),
        }
    }
    Ok(options)
}

/// Whether all went well.
fn run(options: &Options) -> Result<bool> {
    let mut cases = cases::all();
    let names: Vec<String> = cases.iter().map(|case| case.name.clone()).collect();
    if options.list {
        report::list(&cases);
        return Ok(true);
    }
    if options.matrix {
        let api = table(options)?;
        let bench = || Bench::new(api, &options.device, options.seed, [options.quiet, options.patience]);
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
    let api = table(options)?;
    let results = runner::run(api, options, cases, &waivers, |result| report::tell(options, result));
    report::sum_up(options, &results);
    Ok(results.iter().all(runner::CaseResult::is_good))
}

/// The verbs that the device is to be reached by: one whose name begins with `soft` is made here, any other is the system's, and all with `--system`.
fn table(options: &Options) -> Result<&'static Api> {
    if options.system || !options.device.starts_with("soft") {
        return Ok(Api::load()?);
    }
    configure(vec![DeviceConfig {
        address: options.address,
        seed: Some(options.seed),
        ..DeviceConfig::new(&options.device)
    }])?;
    Ok(api())
}
