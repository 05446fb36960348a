//! The frame of the GPU tools: options, driver, exit status.

use std::process::ExitCode;

use anyhow::Result;
use doorbell_cuda::Driver;

/// Runs a tool on the command line's arguments. The exit status is 0 if all results were right, 1
/// if one was wrong, 2 for a usage error or a failure, 77 without a GPU.
pub fn main<O>(
    name: &str,
    usage: &str,
    parse: impl FnOnce(std::iter::Skip<std::env::Args>) -> Result<Option<O>>,
    run: impl FnOnce(Driver, &O) -> Result<bool>,
) -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{usage}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{name}: {error:#}");
            return ExitCode::from(2);
        }
    };
    let driver = match Driver::load() {
        Ok(driver) => driver,
        Err(absent) => {
            eprintln!("{name}: no GPU: {absent}");
            return ExitCode::from(77);
        }
    };
    match run(driver, &options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("{name}: {error:#}");
            ExitCode::from(2)
        }
    }
}
