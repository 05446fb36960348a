//! The suite on NVIDIA's driver, plus cases of two processes. A program that runs without cargo and
//! prints the result of each case, or why there is no GPU; under cargo it then uses the stand-in.
//!
//! `gpu [FILTER]` runs the cases whose names contain FILTER; `gpu --measure` prints costs.

#[path = "../suite/mod.rs"]
mod suite;

mod measure;
mod processes;

use std::env;
use std::process::{Command, ExitCode};
use std::time::Instant;

use doorbell_cuda::Driver;
use doorbell_cuda_standin::{ExecutionMode, environment};
use suite::{CASES, Verdict};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let first = arguments.first().map_or("", String::as_str);
    if first == processes::CHILD {
        return said(processes::child(&arguments[1..]));
    }
    let driver = match Driver::load() {
        Ok(driver) => driver,
        // Cargo sets the variable: the repository, from which the stand-in is built, is present.
        Err(absent) if env::var_os("CARGO_MANIFEST_DIR").is_some() && doorbell_cuda_standin::missing().is_none() => {
            println!("on the CPU stand-in, as there is {absent}");
            return on_the_stand_in(&arguments);
        }
        Err(absent) => {
            println!("skipped: {absent}");
            return ExitCode::SUCCESS;
        }
    };
    println!("{driver:?}");
    for device in driver.devices().into_iter().flatten() {
        let name = device.name().unwrap_or_else(|error| error.to_string());
        println!("{device}: {name}, {:?}", device.pci_bus_id());
    }
    if first == "--measure" {
        return said(measure::all(driver));
    }
    // Options that `cargo test` may pass to a test harness are ignored.
    let filter = Some(first).filter(|first| !first.starts_with('-')).unwrap_or_default();
    let mut failed = 0;
    for case in CASES
        .iter()
        .chain(processes::CASES)
        .filter(|case| case.name.contains(filter))
    {
        let begun = Instant::now();
        let outcome = std::panic::catch_unwind(|| (case.run)(driver));
        let said = match outcome {
            Ok(Ok(Verdict::Passed)) => "ok".to_owned(),
            Ok(Ok(Verdict::Skipped(why))) => format!("skipped: {why}"),
            Ok(Err(error)) => {
                failed += 1;
                format!("FAILED: {error}")
            }
            Err(_) => {
                failed += 1;
                "FAILED: see above".to_owned()
            }
        };
        println!("{} ... {said} ({:.0?})", case.name, begun.elapsed());
    }
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        println!("{failed} failed");
        ExitCode::FAILURE
    }
}

fn on_the_stand_in(arguments: &[String]) -> ExitCode {
    let status = env::current_exe().and_then(|program| {
        Command::new(program)
            .args(arguments)
            .env_remove("CARGO_MANIFEST_DIR")
            .envs(environment(ExecutionMode::Prompt, 2))
            .status()
    });
    match status {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(status) => said(Err(status.to_string().into())),
        Err(error) => said(Err(error.into())),
    }
}

fn said(result: Result<(), Box<dyn std::error::Error>>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
