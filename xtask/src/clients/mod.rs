//! `cargo xtask clients`: RDMA programs that others wrote, on the drop-in libraries, and the tables
//! of docs/CLIENTS.md. It installs them and builds; the program `clients` of `tests/clients` runs
//! the rows.

mod crates;

use crate::{
    ci::{Verdict, command, lacking, rows, succeed},
    pip, setup, target_folder,
    vm::{Request, machine::Outcome},
};
use anyhow::{Context, Result, bail};
use std::{fs::File, io, path::Path, process::Command};

const HELP: &str = "\
Run RDMA programs that others wrote on the drop-in libraries

Usage: cargo xtask clients [NAME...] [OPTIONS]

  NAME              only rows whose client and mode contain it
Options:
      --full        also the rows that take long or need large packages; of each row also the client without
                    RDMA, and each end killed
      --list        show the rows
      --check FILE  fail when a row verified something else than in the table of FILE
      --write FILE  write the rows that were run to the table of FILE (docs/CLIENTS.md), with all columns; runs
                    rdma-core's tests on the kernel's rxe in a guest, too
  -h, --help        show this

Exit status: 0 all passed, 1 a failure, 2 a wrong call.
";

/// The command-line form. Returns the exit status.
pub(crate) fn main(mut arguments: lexopt::Parser) -> Result<u8> {
    let words: Vec<String> = arguments
        .raw_args()?
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    if words.iter().any(|word| word == "-h" || word == "--help") {
        print!("{HELP}");
        return Ok(0);
    }
    build()?;
    let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
    let rxe = target_folder()?.join("clients-rxe.txt");
    if words.contains(&"--write") {
        suite_on_rxe(&rxe)?;
        words.extend(["--rxe", rxe.to_str().context("the target folder's name is not UTF-8")?]);
    }
    match run(&target_folder()?.join("release"), &words) {
        Ok(Verdict::Skipped(why)) => {
            eprintln!("clients: {why}");
            Ok(1)
        }
        Ok(_) => Ok(0),
        Err(error) => {
            eprintln!("clients: {error:#}");
            Ok(1)
        }
    }
}

/// rdma-core's tests on the kernel's rxe, with their output in `file`.
fn suite_on_rxe(file: &Path) -> Result<()> {
    let copy = "cd /tmp && cp -r /usr/share/doc/rdma-core/tests . && gunzip tests/*.gz";
    // Status 1: a test failed, which the output shows.
    let tests = "{ /usr/bin/python3 -B tests/run_tests.py --dev rxe0 -v || test $? = 1; } 2>&1";
    let command = ["sh", "-c", &format!("{copy} && {tests}")].map(Into::into);
    let output = File::create(file).with_context(|| format!("cannot write {}", file.display()))?;
    match Request::new(command.into()).run(Box::new(output), Box::new(io::stderr()))? {
        Outcome::Exited(0) => Ok(()),
        _ => bail!("rdma-core's tests could not be run on rxe: {}", file.display()),
    }
}

/// As released, for the figures.
fn build() -> Result<Verdict> {
    let libraries = ["doorbell-perftest", "doorbell-dropin", "doorbell-sysfs"];
    let packages = libraries.into_iter().flat_map(|package| ["-p", package]);
    succeed(command(&["build", "--release", "--locked"]).args(packages))?;
    let program = ["-p", "doorbell-tests", "--bin", "clients"];
    succeed(command(&["build", "--release", "--locked"]).args(program))
}

/// Runs the program in the folder `programs`, with what its rows need installed.
pub(crate) fn run(programs: &Path, arguments: &[&str]) -> Result<Verdict> {
    let mut needs = setup::CLIENTS.to_vec();
    if arguments.contains(&"--full") {
        needs.extend(setup::LARGE_CLIENTS);
    }
    let program = programs.join("clients");
    let of_crates = chooses_crates(&program, arguments)?;
    if of_crates {
        needs.extend(setup::RDMA_CORE);
    }
    match setup::provide(&needs)?.as_slice() {
        [] => {}
        missing => return lacking(missing),
    }
    let wheels = target_folder()?.join("clients-python").display().to_string();
    let mut arguments = arguments.to_vec();
    if arguments.contains(&"--full") {
        pip::provide(wheels.as_ref(), &setup::CLIENT_WHEELS, &[setup::CLIENT_WHEELS_PYTHON])?;
        arguments.extend(["--wheels", wheels.as_str()]);
    }
    if of_crates {
        crates::build(&programs.with_file_name("crates"))?;
    }
    rows::verdict(&[rows::run(&program, &arguments, &[])?])
}

/// Whether rows of crates are among those that the arguments choose.
fn chooses_crates(program: &Path, arguments: &[&str]) -> Result<bool> {
    // A wrong call is reported by the run itself.
    let list = Command::new(program).args(arguments).arg("--list").output()?.stdout;
    Ok(String::from_utf8_lossy(&list)
        .lines()
        .any(|row| row.starts_with("crate ")))
}
