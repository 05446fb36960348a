//! The `doorbell` command: RDMA bandwidth, latency and collective tests, a list of devices, and the
//! machine's own limits.
//!
//! `plan` has the parameters, `command` runs `bw` and `lat`, `orchestrate` both ends on one
//! machine; `exchange` is the control connection, `run` measures by the loops of `engine`, `stats`
//! computes, `report` exports. `document` reads results back for `html` and `compare`. `classic` is
//! `ib_write_bw` and the other tools of perftest, selected by `argv[0]`; `dropin` is `doorbell run`
//! and `env`; `manual` makes completions and manual pages.
#![forbid(unsafe_code)]

mod chart;
mod classic;
mod cli;
mod coll;
mod command;
mod compare;
mod device;
mod devices;
mod diagnose;
mod document;
mod dropin;
mod engine;
mod exchange;
mod failure;
#[doc(hidden)]
pub mod fuzzing;
mod gpu;
mod html;
mod interrupt;
mod limits;
mod manual;
mod orchestrate;
mod output;
mod plan;
mod progress;
mod report;
mod run;
mod stats;
mod storage;
mod sweep;
mod topo;
mod units;

use std::env;
use std::path::Path;
use std::process::ExitCode;

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::classic::tool::Tool;
use crate::cli::{Command, Invocation};
use crate::failure::Failure;
use crate::plan::Plan;

pub use crate::dropin::EmbeddedLibrary;

/// The `main` of the `doorbell` program.
pub fn main() -> ExitCode {
    main_with(&[])
}

/// The same for a program that has the drop-in libraries in it. They are used where none are
/// installed beside it.
pub fn main_with(libraries: &'static [EmbeddedLibrary]) -> ExitCode {
    dropin::embed(libraries);
    if let Some(tool) = env::args_os()
        .next()
        .and_then(|name| Tool::from_program_name(Path::new(&name)))
    {
        log();
        return classic::main(tool);
    }
    let invocation = Invocation::parse();
    log();
    let (outcome, is_child) = match &invocation {
        Invocation::Cli(cli) => (run(&cli.command), cli.command.is_child()),
        Invocation::File(args) => (storage::run(args), false),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !is_child {
                eprintln!("doorbell: {failure}");
            }
            failure.exit_code()
        }
    }
}

fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Devices(args) => devices::run(args),
        Command::Diagnose(args) => diagnose::run(args),
        Command::Topo(args) => topo::run(args),
        Command::Gpu(args) => gpu::run(args),
        Command::Limits(args) => limits::run(args),
        Command::Bw(args) => command::run(&Plan::bw(args)?, &args.test, args.thresholds()),
        Command::Lat(args) => command::run(&Plan::lat(args)?, &args.test, args.thresholds()),
        Command::Sweep(args) => sweep::run(args),
        Command::Report(args) => html::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Coll(args) => coll::run(args),
        Command::Run(args) => dropin::run(args),
        Command::Env(args) => dropin::env(args),
        Command::Completions(args) => manual::completions(args),
        Command::Man(args) => manual::pages(args),
    }
}

/// Warnings of the libraries go to stderr. Open errors of a userspace device are reported by the
/// command itself, so that they appear once.
fn log() {
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(false);
    let filter = Targets::new()
        .with_default(LevelFilter::WARN)
        .with_target("doorbell_softroce_ibverbs", LevelFilter::OFF);
    tracing_subscriber::registry().with(lines).with(filter).init();
}
