//! `cargo xtask soak`: the swarm of `tests` for a time, with kills, stops, faults and pressure.

use crate::{
    ci::{Scope, Verdict, command, succeed},
    target_folder,
};
use anyhow::{Result, bail};
use std::process::Command;

const HELP: &str = "\
Soak the userspace device: processes on one address, all connected, some killed, stopped, replaced

Usage: cargo xtask soak [OPTIONS]

Options:
      --minutes N    how long [default: 10]
      --processes N  [default: 32]
      --seed N       of sizes, kinds and victims [default: 1]
  -h, --help         show this

Exit status: 0 when all data was right and nothing was left, 1 when not, 2 for a wrong call.
";

/// Processes wait for a processor so long that retries are longer.
const OPTIONS: [&str; 4] = ["--minutes", "10", "--timeout", "18"];

/// The command-line form. Returns the exit status.
pub(crate) fn main(mut arguments: lexopt::Parser) -> Result<u8> {
    use lexopt::prelude::*;
    let mut options: Vec<_> = OPTIONS.iter().map(|word| (*word).to_owned()).collect();
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('h') | Long("help") => {
                print!("{HELP}");
                return Ok(0);
            }
            Long(name @ ("minutes" | "processes" | "seed")) => {
                let name = format!("--{name}");
                options.extend([name, arguments.value()?.string()?]);
            }
            other => return Err(other.unexpected().into()),
        }
    }
    succeed(&mut command(&[
        "build",
        "--locked",
        "--package",
        "doorbell-tests",
        "--bin",
        "swarm",
    ]))?;
    let status = Command::new(target_folder()?.join("debug/swarm"))
        .args(options)
        .status()?;
    match status.code() {
        Some(2) => bail!("swarm refused its options"),
        code => Ok(u8::from(code != Some(0))),
    }
}

/// With the programs that `ci` has built.
pub(crate) fn check(_: Scope) -> Result<Verdict> {
    succeed(Command::new(target_folder()?.join("release/swarm")).args(OPTIONS))
}
