//! `cargo xtask sanitize`: the safe API over its provider in memory, and what is lock-free in the soft device, under tools that see what a test by itself does not.
//!
//! The sanitizers' runtimes come with rustc, as an unstable option, so they are asked for as its bootstrap asks; the standard library is not rebuilt, so it is not
//! instrumented. What that leads to is told in `verbs/tests/sanitize`, beside what each tool is to pass over. Each tool builds in a folder of its own under `target/sanitize`.

use crate::{
    ci::{self, Counts, Scope, Verdict},
    setup, target_folder, workspace,
};
use anyhow::{Context, Result, bail};
use std::{
    env,
    path::PathBuf,
    process::{Command, Stdio},
    time::Instant,
};

const HELP: &str = "\
Test under tools that see what tests do not: memory, data races, orders of threads

Usage: cargo xtask sanitize [TOOL]...

Tools:
  address    AddressSanitizer and LeakSanitizer
  thread     ThreadSanitizer
  valgrind   memcheck
  loom       models of all that is lock-free, through all orders of their steps
  miri       the interpreter of Rust's own rules, where its component is installed
  all        all of them, as without any

Exit status: 0 when nothing failed, 1 when something did, 2 for a wrong call.
";

/// What can be asked for.
struct Tool {
    name: &'static str,
    /// What it needs of the machine.
    needs: &'static [setup::Need],
    run: fn() -> Result<Verdict>,
}

const TOOLS: [Tool; 5] = [
    Tool {
        name: "address",
        needs: &[setup::SYMBOLIZER],
        run: address,
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
        run: miri,
    },
];

/// The tests of the safe API over a provider in memory, but those that run the compiler, to whom it is all the same.
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
/// Those of the soft device's own parts, among them its progress thread and two threads that park.
const DEVICE: [&str; 5] = ["--package", "doorbell-softroce", "--lib", "--locked", "--no-fail-fast"];
/// The reductions of collectives, in memories that end where they may not read or write any further.
const KERNELS: [&str; 5] = ["--package", "doorbell-collectives", "--lib", "--locked", "kernel::"];
const BUT_THE_COMPILER: [&str; 3] = ["--", "--skip", "misuse"];

/// The command-line form. Returns the exit status.
pub(crate) fn main(arguments: lexopt::Parser) -> Result<u8> {
    let Some(chosen) = parse(arguments)? else { return Ok(0) };
    Ok(u8::from(run(&chosen)?.failed > 0))
}

/// The step of `cargo xtask ci`.
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
    let leaks = format!(
        "suppressions={}:print_suppressions=0",
        suppressions("leaks.supp").display()
    );
    let mut verbs = tests("address", FLAGS)?;
    let verbs = ci::tests(verbs.args(VERBS).args(BUT_THE_COMPILER).env("LSAN_OPTIONS", leaks))?;
    let mut device = tests("address", FLAGS)?;
    device
        .args(DEVICE)
        .args(["--package", "doorbell-softroce-ibverbs", "--test", "api"]);
    // The memory that these register is leaked by the tests themselves.
    let device = ci::tests(device.env("ASAN_OPTIONS", "detect_leaks=0"))?;
    let kernels = ci::tests(tests("address", FLAGS)?.args(KERNELS))?;
    Ok(verbs.and(device).and(kernels))
}

fn thread() -> Result<Verdict> {
    // The second is what a standard library without instrumentation needs.
    const FLAGS: &str = "-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer --cfg=doorbell_tsan";
    let options = format!("suppressions={}", suppressions("threads.supp").display());
    let run = |arguments: &[&[&str]]| -> Result<Verdict> {
        let mut command = tests("thread", FLAGS)?;
        command.args(arguments.concat()).env("TSAN_OPTIONS", &options);
        // Tests that panic on purpose would print backtraces, whose cache the library guards by a lock that is not seen.
        ci::tests(command.env("RUST_BACKTRACE", "0"))
    };
    let verbs = run(&[&VERBS, &BUT_THE_COMPILER])?;
    let device = run(&[&DEVICE])?;
    Ok(verbs.and(device))
}

fn valgrind() -> Result<Verdict> {
    let runner = format!("CARGO_TARGET_{}_RUNNER", host()?.to_uppercase().replace('-', "_"));
    // What was never freed is LeakSanitizer's business; and as one thread runs at a time, those tests in which several race or wait for one another say no more than elsewhere.
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

fn miri() -> Result<Verdict> {
    let asked = ci::command(&["miri", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .context("cannot run cargo")?;
    if !asked.success() {
        // It comes with nightly toolchains, and is not asked of every machine.
        return Ok(Verdict::Skipped(
            "this toolchain has no Miri (rustup component add miri)".into(),
        ));
    }
    let mut command = ci::command(&[
        "miri",
        "test",
        "--package",
        "doorbell-verbs",
        "--test",
        "verbs",
        "--locked",
    ]);
    command.arg("--target-dir").arg(folder("miri")?);
    // Files and clocks are the host's. Registered memory is known to devices and peers by number: its provenance is exposed. What a device does not let go of is leaked.
    command.env(
        "MIRIFLAGS",
        "-Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks",
    );
    let verbs = ci::tests(command.env("PROPTEST_CASES", "8"))?;
    let mut command = ci::command(&["miri", "test"]);
    command.args(KERNELS).arg("--target-dir").arg(folder("miri")?);
    Ok(verbs.and(ci::tests(command.env("MIRIFLAGS", "-Zmiri-disable-isolation"))?))
}

/// `cargo test` with flags for all that it builds, but not for what runs while building.
fn tests(tool: &str, flags: &str) -> Result<Command> {
    let mut command = ci::command(&["test", "--target"]);
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

fn suppressions(file: &str) -> PathBuf {
    workspace().join("verbs/tests/sanitize").join(file)
}

/// The triple of this machine.
fn host() -> Result<String> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).arg("-vV").output().context("cannot run rustc")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV names no host")?.to_owned())
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
