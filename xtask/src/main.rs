//! The chores of this workspace: `cargo xtask COMMAND`.

mod apt;
mod ci;
mod classic;
mod clients;
mod dist;
mod fabric;
mod fuzz;
mod goals;
mod instructions;
mod kernels;
mod peers;
mod pip;
mod platforms;
mod python;
mod sanitize;
mod setup;
mod soak;
mod tidy;
mod vm;

use anyhow::{Context, Result};
use std::{
    env,
    path::{self, Path, PathBuf},
    process::ExitCode,
};

const HELP: &str = "\
The chores of this workspace

Usage: cargo xtask COMMAND [OPTIONS]

Commands:
  ci               check everything
  clients          run RDMA programs that others wrote on the drop-in libraries
  dist             make the packages of a release
  fabric           simulate fabrics over the protocol engine
  fuzz             run the fuzz targets of tests/fuzz for a time, or show their coverage
  goals            judge the project's goals by `doorbell limits`
  install-classic  link ib_write_bw and its like to the doorbell command
  instructions     count instructions per call of the data path, beside C
  kernels          build the GPU's reduction kernels and their report
  miri             test under Miri alone
  peers            measure the device beside other libraries
  python           run the tests of the Python package that need packages from PyPI
  sanitize         test under sanitizers, valgrind, loom and Miri
  soak             run processes on one address with kills, stops and faults for a time
  tidy             check the sources for what rustfmt and clippy do not
  vm               run a command in a guest with the kernel's rxe

Each has --help.
";

fn main() -> ExitCode {
    match run(lexopt::Parser::from_env()) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(mut arguments: lexopt::Parser) -> Result<u8> {
    use lexopt::prelude::*;
    match arguments.next()? {
        Some(Value(command)) if command == "ci" => ci::main(arguments),
        Some(Value(command)) if command == "clients" => clients::main(arguments),
        Some(Value(command)) if command == "dist" => dist::main(arguments),
        Some(Value(command)) if command == "fabric" => fabric::main(arguments),
        Some(Value(command)) if command == "fuzz" => fuzz::main(arguments),
        Some(Value(command)) if command == "goals" => goals::main(arguments),
        Some(Value(command)) if command == "install-classic" => classic::main(arguments),
        Some(Value(command)) if command == "instructions" => instructions::main(arguments),
        Some(Value(command)) if command == "kernels" => kernels::main(arguments),
        Some(Value(command)) if command == "miri" => sanitize::miri(arguments),
        Some(Value(command)) if command == "peers" => peers::main(arguments),
        Some(Value(command)) if command == "python" => python::main(arguments),
        Some(Value(command)) if command == "sanitize" => sanitize::main(arguments),
        Some(Value(command)) if command == "soak" => soak::main(arguments),
        Some(Value(command)) if command == "tidy" => tidy::main(arguments),
        Some(Value(command)) if command == "vm" => vm::main(arguments),
        None | Some(Short('h') | Long("help")) => {
            print!("{HELP}");
            Ok(0)
        }
        Some(other) => Err(other.unexpected().into()),
    }
}

fn workspace() -> PathBuf {
    // Cargo sets the variable; a copied binary falls back to the path of its build.
    let package =
        env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    package.parent().map_or_else(|| PathBuf::from("."), Path::to_owned)
}

/// Where cargo keeps what it downloads.
fn cargo_home() -> Result<PathBuf> {
    let chosen = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = || env::var_os("HOME").map(|home| Path::new(&home).join(".cargo"));
    chosen.or_else(home).context("neither CARGO_HOME nor HOME is set")
}

/// Where cargo builds; an absolute path.
fn target_folder() -> Result<PathBuf> {
    let chosen = env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    Ok(path::absolute(chosen.unwrap_or_else(|| workspace().join("target")))?)
}
