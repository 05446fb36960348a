//! `cargo xtask instructions`: how many instructions a call of the data path costs, beside the same in C.
//!
//! Everything is built in one run from `tests/instructions`: a libibverbs that does nothing (`provider.c`), a program for each C column, and ours, each doing
//! what a row names over and over. Callgrind counts inside the functions named `measure_`, less what the provider's own (`stub_`) cost, which is the same for all.
//! Each row is run twice, and the difference of the counts divided by that of the iterations: what happens once per program cancels.

mod callgrind;

use crate::{setup, target_folder, workspace};
use anyhow::{Context, Error, Result, bail};
use std::{
    env,
    fmt::{self, Display},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const HELP: &str = "\
Count instructions per call of the data path, beside C

Usage: cargo xtask instructions [OPTIONS]

Options:
      --report  exit with status 0 even when ours costs too much
  -h, --help    show this

Exits with status 1 when ours takes more than 2 instructions per call above C with accounting in any row.
";

/// How many instructions per call ours may take above C with accounting.
const MARGIN: f64 = 2.0;

/// Iterations of the two runs: both after all of a queue of 128 has been used; their difference is whole rounds of it.
const ITERATIONS: (u64, u64) = (256, 1280);

/// A row of the table: the name that the programs know, what it is, and the function counted (the beginning of its name).
struct Row {
    name: &'static str,
    about: &'static str,
    function: &'static str,
}

/// Rows end in `_wr` where requests go through `ibv_wr_*` and not as a list, and in `_ex` where the completion queue is an extended one.
const ROWS: [Row; 10] = [
    Row {
        name: "write",
        about: "one WRITE, list",
        function: "measure_write",
    },
    Row {
        name: "write_wr",
        about: "one WRITE, ibv_wr",
        function: "measure_write",
    },
    Row {
        name: "inline",
        about: "one inline WRITE of 16 B, list",
        function: "measure_inline",
    },
    Row {
        name: "inline_wr",
        about: "one inline WRITE of 16 B, ibv_wr",
        function: "measure_inline",
    },
    Row {
        name: "batch",
        about: "16 WRITEs, list",
        function: "measure_batch",
    },
    Row {
        name: "batch_wr",
        about: "16 WRITEs, ibv_wr",
        function: "measure_batch",
    },
    Row {
        name: "receive",
        about: "one receive",
        function: "measure_receive",
    },
    Row {
        name: "list",
        about: "16 receives",
        function: "measure_list",
    },
    Row {
        name: "drain",
        about: "drain 16 completions, classic",
        function: "measure_drain",
    },
    Row {
        name: "drain_ex",
        about: "drain 16 completions, extended",
        function: "measure_drain",
    },
];

/// The exit status of a program that has no such call; it says why on stdout.
const LACKS: i32 = 3;

/// What a row costs in a column, in instructions per call.
#[derive(Debug, Clone, PartialEq)]
enum Cost {
    Counted(f64),
    /// The column has no such call, for this reason.
    Lacking(String),
}

impl Cost {
    /// Whether it is at most the margin above C with accounting.
    fn is_within(&self, accounting: &Self) -> bool {
        matches!((self, accounting), (Self::Counted(ours), Self::Counted(c)) if *ours <= c + MARGIN)
    }
}

impl Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Counted(cost) => f.pad(&format!("{cost:.1}")),
            Self::Lacking(_) => f.pad("–"),
        }
    }
}

/// The command.
pub(crate) fn main(mut arguments: lexopt::Parser) -> Result<u8> {
    use lexopt::prelude::*;
    let mut report = false;
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('h') | Long("help") => {
                print!("{HELP}");
                return Ok(0);
            }
            Long("report") => report = true,
            other => return Err(other.unexpected().into()),
        }
    }
    match setup::provide(&setup::INSTRUCTIONS)?.as_slice() {
        [] => {}
        missing => bail!("missing: {} (as root: apt-get install {0})", missing.join(" ")),
    }
    let all_within = count(&Programs::build()?)?;
    Ok(u8::from(!all_within && !report))
}

/// Counts and prints every row. Whether ours costs no more than it may.
fn count(programs: &Programs) -> Result<bool> {
    println!(
        "{:<34} {:>8} {:>18} {:>8}",
        "instructions per call", "ours", "C with accounting", "bare C"
    );
    let mut all_within = true;
    for row in &ROWS {
        let ours = programs.cost(&programs.ours, row)?;
        let accounting = programs.cost(&programs.accounting, row)?;
        let bare = programs.cost(&programs.bare, row)?;
        let mark = if ours.is_within(&accounting) { "" } else { "  too many" };
        all_within &= mark.is_empty();
        println!("{:<34} {ours:>8} {accounting:>18} {bare:>8}{mark}", row.about);
    }
    Ok(all_within)
}

/// What is run.
struct Programs {
    folder: PathBuf,
    ours: PathBuf,
    accounting: PathBuf,
    bare: PathBuf,
}

impl Programs {
    /// Builds them, the C ones by `gcc -O2`.
    fn build() -> Result<Self> {
        let folder = target_folder()?.join("instructions");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let source = workspace().join("tests/instructions");
        let provider = folder.join("libibverbs.so.1");
        gcc(
            &["-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1"],
            &[source.join("provider.c"), source.join("datapath.c")],
            &provider,
        )?;
        let peer = |variant: &str| -> Result<PathBuf> {
            let program = folder.join(variant);
            let sources = [
                source.join("peer.c"),
                source.join(variant).with_extension("c"),
                provider.clone(),
            ];
            gcc(&[], &sources, &program)?;
            Ok(program)
        };
        let (accounting, bare) = (peer("accounting")?, peer("bare")?);
        Ok(Self {
            ours: build_ours()?,
            accounting,
            bare,
            folder,
        })
    }

    /// Instructions per call of `row` in `program`.
    fn cost(&self, program: &Path, row: &Row) -> Result<Cost> {
        let (few, many) = ITERATIONS;
        let least = match self.count(program, row, few)? {
            Ok(least) => least,
            Err(reason) => return Ok(Cost::Lacking(reason)),
        };
        let most = self.count(program, row, many)?.map_err(Error::msg)?;
        Ok(Cost::Counted(most.saturating_sub(least) as f64 / (many - few) as f64))
    }

    /// Instructions in all calls of `row` when `program` repeats it, or why it has no such call.
    fn count(&self, program: &Path, row: &Row, iterations: u64) -> Result<Result<u64, String>> {
        let profile = self.folder.join("callgrind.out");
        let output = Command::new("valgrind")
            .args(["--tool=callgrind", "--compress-strings=no", "--compress-pos=no"])
            .arg(format!("--callgrind-out-file={}", profile.display()))
            .arg(format!("--toggle-collect=*{}*", row.function))
            .arg(program)
            .args([row.name, &iterations.to_string()])
            // The provider in place of the system's libibverbs.
            .env("LD_LIBRARY_PATH", &self.folder)
            .output()
            .context("cannot run valgrind")?;
        if output.status.code() == Some(LACKS) {
            return Ok(Err(String::from_utf8_lossy(&output.stdout).trim().to_owned()));
        }
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("{} {}: {}\n{said}", program.display(), row.name, output.status);
        }
        let profile = fs::read_to_string(&profile).with_context(|| format!("cannot read {}", profile.display()))?;
        match callgrind::own_cost(&profile) {
            0 => bail!("{} {}: callgrind met no {}", program.display(), row.name, row.function),
            cost => Ok(Ok(cost)),
        }
    }
}

fn gcc(options: &[&str], sources: &[PathBuf], output: &Path) -> Result<()> {
    let status = Command::new("gcc")
        .args(["-O2", "-Wall", "-Wextra", "-Werror"])
        .args(options)
        .arg("-o")
        .arg(output)
        .args(sources)
        .status()
        .context("cannot run gcc")?;
    if !status.success() {
        bail!("gcc for {}: {status}", output.display());
    }
    Ok(())
}

/// Our column, as a user would build it: the release profile.
fn build_ours() -> Result<PathBuf> {
    let status = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--release", "--locked", "--package", "doorbell-tests"])
        .args(["--bin", "instructions"])
        .current_dir(workspace())
        .status()
        .context("cannot run cargo")?;
    if !status.success() {
        bail!("cargo build: {status}");
    }
    Ok(target_folder()?.join("release/instructions"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_instructions_above_c_pass_and_more_do_not() {
        let within = |ours| Cost::Counted(ours).is_within(&Cost::Counted(50.0));
        assert!(within(30.0));
        assert!(within(52.0));
        assert!(!within(52.1));
        assert!(!Cost::Lacking("not written yet".to_owned()).is_within(&Cost::Counted(50.0)));
    }
}
