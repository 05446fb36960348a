//! `cargo xtask sanitize`: the safe API over its in-memory provider, the device, its C interfaces
//! and the examples, under AddressSanitizer, ThreadSanitizer, Valgrind, Miri and loom.
//!
//! The sanitizers are unstable options of rustc, enabled through RUSTC_BOOTSTRAP. For
//! ThreadSanitizer the standard library is built with it, too, which takes a nightly.

mod dropin;
mod miri;
mod nightly;

use crate::{
    ci::{self, Counts, Scope, Verdict},
    setup, target_folder, workspace,
};
use anyhow::{Context, Result, bail};
use std::{env, path::PathBuf, process::Command, time::Instant};

const HELP: &str = "\
Test under sanitizers: memory errors, data races, thread interleavings

Usage: cargo xtask sanitize [TOOL]...

Tools:
  address    AddressSanitizer and LeakSanitizer
  dropin     stock programs on drop-in libraries with AddressSanitizer
  thread     ThreadSanitizer, where a nightly with Miri and rust-src is installed
  valgrind   memcheck
  loom       models of the lock-free parts, over all interleavings
  miri       undefined behaviour, where that nightly is installed
  all        all of them [default]

Exit status: 0 when nothing failed, 1 when something did, 2 on bad usage.
";

struct Tool {
    name: &'static str,
    needs: &'static [setup::Need],
    run: fn() -> Result<Verdict>,
}

const TOOLS: [Tool; 6] = [
    Tool {
        name: "address",
        needs: &[setup::SYMBOLIZER],
        run: address,
    },
    Tool {
        name: "dropin",
        needs: &setup::STOCK_SANITIZED,
        run: dropin::run,
    },
    Tool {
        name: "thread",
        needs: &[setup::SYMBOLIZER],
        run: thread,
    },
    Tool {
        name: "valgrind",
        needs: &[setup::VALGRIND],
        run: valgrind,
    },
    Tool {
        name: "loom",
        needs: &[],
        run: loom,
    },
    Tool {
        name: "miri",
        needs: &[],
        run: miri::run,
    },
];

/// The tests of the safe API over its in-memory provider, without those that only run the compiler.
const VERBS: [&str; 9] = [
    "--package",
    "doorbell-verbs",
    "--features",
    "tokio",
    "--lib",
    "--test",
    "verbs",
    "--locked",
    "--no-fail-fast",
];
/// The soft device's unit tests, among them its progress thread and two threads that park.
const DEVICE: [&str; 5] = ["--package", "doorbell-softroce", "--lib", "--locked", "--no-fail-fast"];
/// Devices that share memory in one process, where the two have one mapping
/// (`device/src/mapping.rs`), and in two. ThreadSanitizer has signal handlers of its own.
const SHARED: [&str; 8] = [
    "--package",
    "doorbell-softroce",
    "--test",
    "shm",
    "--locked",
    "--",
    "--skip",
    "signals::",
];
/// Reduction kernels, on memory that ends where they must stop.
const KERNELS: [&str; 5] = ["--package", "doorbell-collectives", "--lib", "--locked", "kernel::"];
/// Examples as programs, with both ends in one process or in several.
const EXAMPLES: [&str; 5] = [
    "--package",
    "doorbell-examples",
    "--tests",
    "--locked",
    "--no-fail-fast",
];
/// Streams and operations of tasks, with futures dropped at every await point: what they lend to a
/// device must neither leak nor be freed before the device is done with it.
const TASKS: [&str; 6] = [
    "--package",
    "doorbell-tests",
    "--test",
    "tokio",
    "--locked",
    "--no-fail-fast",
];
const BUT_THE_COMPILER: [&str; 3] = ["--", "--skip", "misuse"];

/// The command-line form. Returns the exit status.
pub(crate) fn main(arguments: lexopt::Parser) -> Result<u8> {
    let Some(chosen) = parse(arguments)? else { return Ok(0) };
    Ok(u8::from(run(&chosen)?.failed > 0))
}

/// `cargo xtask miri`, which is this tool alone.
pub(crate) fn miri(mut arguments: lexopt::Parser) -> Result<u8> {
    use lexopt::prelude::*;
    match arguments.next()? {
        None => {
            let tool: Vec<_> = TOOLS.iter().filter(|tool| tool.name == "miri").collect();
            Ok(u8::from(run(&tool)?.failed > 0))
        }
        Some(Short('h') | Long("help")) => {
            print!("{HELP}");
            Ok(0)
        }
        Some(other) => Err(other.unexpected().into()),
    }
}

pub(crate) fn check(scope: Scope) -> Result<Verdict> {
    let tools = TOOLS.iter().filter(|tool| scope == Scope::Full || tool.name == "loom");
    Ok(Verdict::Counted(run(&tools.collect::<Vec<_>>())?, None))
}

fn parse(mut arguments: lexopt::Parser) -> Result<Option<Vec<&'static Tool>>> {
    use lexopt::prelude::*;
    let mut names = Vec::new();
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('h') | Long("help") => {
                print!("{HELP}");
                return Ok(None);
            }
            Value(name) => names.push(name.string()?),
            other => return Err(other.unexpected().into()),
        }
    }
    let known = |name: &String| name == "all" || TOOLS.iter().any(|tool| tool.name == name);
    if let Some(name) = names.iter().find(|name| !known(name)) {
        bail!("no tool {name:?}; cargo xtask sanitize --help names them");
    }
    let wanted = |tool: &&Tool| names.is_empty() || names.iter().any(|name| name == "all" || name == tool.name);
    Ok(Some(TOOLS.iter().filter(wanted).collect()))
}

fn run(tools: &[&Tool]) -> Result<Counts> {
    let mut total = Counts::default();
    let mut lines = Vec::new();
    for tool in tools {
        println!("-- {}", tool.name);
        let started = Instant::now();
        let verdict = match setup::provide(tool.needs) {
            Ok(missing) if missing.is_empty() => (tool.run)(),
            Ok(missing) => ci::lacking(&missing),
            Err(error) => Err(error),
        };
        let line = ci::judge(tool.name, verdict, started.elapsed());
        total.add(line.counts);
        lines.push(line);
    }
    for line in &lines {
        println!("-- {line}");
    }
    Ok(total)
}

fn address() -> Result<Verdict> {
    const FLAGS: &str = "-Zsanitizer=address";
    let leaks = workspace().join("verbs/tests/sanitize/leaks.supp");
    let leaks = format!("suppressions={}:print_suppressions=0", leaks.display());
    let mut verbs = tests("address", FLAGS)?;
    let verbs = ci::tests(verbs.args(VERBS).args(BUT_THE_COMPILER).env("LSAN_OPTIONS", &leaks))?;
    let mut device = tests("address", FLAGS)?;
    device
        .args(DEVICE)
        .args(["--package", "doorbell-softroce-ibverbs", "--test", "api"])
        .args(["--package", "doorbell-tests", "--test", "conformance"]);
    // These tests leak registered memory and event channels themselves.
    let device = ci::tests(device.env("ASAN_OPTIONS", "detect_leaks=0"))?;
    // `--tests` would count for the packages above, too.
    let mut rdmacm = tests("address", FLAGS)?;
    rdmacm.args(["--package", "doorbell-softroce-rdmacm", "--tests", "--locked"]);
    let rdmacm = ci::tests(rdmacm.env("ASAN_OPTIONS", "detect_leaks=0"))?;
    let kernels = ci::tests(tests("address", FLAGS)?.args(KERNELS))?;
    let mut examples = tests("address", FLAGS)?;
    let examples = ci::tests(examples.args(EXAMPLES).env("LSAN_OPTIONS", &leaks))?;
    let mut tasks = tests("address", FLAGS)?;
    let tasks = ci::tests(tasks.args(TASKS).env("LSAN_OPTIONS", &leaks))?;
    Ok(verbs.and(device).and(rdmacm).and(kernels).and(examples).and(tasks))
}

fn thread() -> Result<Verdict> {
    if let Some(missing) = nightly::missing()? {
        return Ok(Verdict::Skipped(missing));
    }
    let run = |arguments: &[&[&str]]| -> Result<Verdict> {
        let mut command = nightly::cargo(&["test", "-Zbuild-std", "--target", &host()?]);
        command.arg("--target-dir").arg(folder("thread")?);
        command.args(arguments.concat());
        ci::tests(command.env("RUSTFLAGS", "-Zsanitizer=thread --cfg=doorbell_tsan"))
    };
    let verbs = run(&[&VERBS, &BUT_THE_COMPILER])?;
    let device = run(&[&DEVICE])?;
    let shared = run(&[&SHARED])?;
    Ok(verbs.and(device).and(shared))
}

fn valgrind() -> Result<Verdict> {
    let runner = format!("CARGO_TARGET_{}_RUNNER", host()?.to_uppercase().replace('-', "_"));
    // Leaks are LeakSanitizer's job. Valgrind runs one thread at a time: no tests of races.
    let mut command = ci::command(&["test"]);
    command.env(runner, "valgrind --quiet --error-exitcode=99 --leak-check=no");
    command.args(VERBS).args(BUT_THE_COMPILER);
    ci::tests(command.args(["--skip", "threads::", "--skip", "events::"]))
}

fn loom() -> Result<Verdict> {
    let mut command = tests("loom", "--cfg=doorbell_loom")?;
    command.args(["--package", "doorbell-verbs", "--package", "doorbell-softroce"]);
    ci::tests(command.args(["--lib", "--locked", "--no-fail-fast", "--", "model::"]))
}

fn tests(tool: &str, flags: &str) -> Result<Command> {
    cargo("test", tool, flags)
}

/// Cargo with flags for the target, but not for build scripts and proc macros.
fn cargo(subcommand: &str, tool: &str, flags: &str) -> Result<Command> {
    let mut command = ci::command(&[subcommand, "--target"]);
    command
        .arg(host()?)
        .arg("--target-dir")
        .arg(folder(tool)?)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", flags);
    Ok(command)
}

fn folder(tool: &str) -> Result<PathBuf> {
    Ok(target_folder()?.join("sanitize").join(tool))
}

pub(crate) fn host() -> Result<String> {
    rustc_version("host")
}

/// A line of `rustc -vV`.
pub(crate) fn rustc_version(name: &str) -> Result<String> {
    let said = rustc("-vV")?;
    let mut lines = said.lines().filter_map(|line| line.split_once(": "));
    let line = lines.find(|(is, _)| *is == name);
    let (_, value) = line.with_context(|| format!("rustc -vV names no {name}"))?;
    Ok(value.to_owned())
}

/// What rustc prints for this argument.
pub(crate) fn rustc(argument: &str) -> Result<String> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).arg(argument).output().context("cannot run rustc")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(arguments: &[&str]) -> Vec<&'static str> {
        let tools = parse(lexopt::Parser::from_args(arguments)).unwrap().unwrap();
        tools.iter().map(|tool| tool.name).collect()
    }

    #[test]
    fn tools_are_chosen_by_name_and_keep_their_order() {
        assert_eq!(chosen(&["loom", "address"]), ["address", "loom"]);
        assert_eq!(chosen(&[]).len(), TOOLS.len());
        assert_eq!(chosen(&["all"]), chosen(&[]));
        assert!(parse(lexopt::Parser::from_args(["memory"])).is_err());
    }
}
