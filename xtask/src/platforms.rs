//! Other targets than the machine's own, and the lowest Rust version: that the code compiles, and
//! with `--full` that programs of aarch64 run, in an emulator.

use crate::{
    ci::{self, Scope, Verdict},
    setup::{self, Need},
    target_folder, workspace,
};
use anyhow::{Context, Result, bail, ensure};
use std::{
    env, fs,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
};

const AARCH64: &str = "aarch64-unknown-linux-gnu";
const MUSL: &str = "x86_64-unknown-linux-musl";
const PROGRAMS: [&str; 3] = ["doorbell-perftest", "doorbell-dropin", "doorbell-sysfs"];

/// What is not only for Linux.
const PORTABLE: &str = "doorbell-roce-proto";
const FOREIGN: [&str; 2] = ["x86_64-apple-darwin", "x86_64-pc-windows-gnu"];

const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";
/// Debian's folder of the libraries of aarch64.
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";

const EMULATION: [Need; 3] = [
    Need {
        package: "gcc-aarch64-linux-gnu",
        found: || setup::in_path(LINKER),
    },
    Need {
        package: "libc6-dev-arm64-cross",
        found: || Path::new(LIBRARIES).join("lib/libc.so.6").exists(),
    },
    Need {
        package: "qemu-user",
        found: || setup::in_path(EMULATOR),
    },
];

pub(crate) fn check(scope: Scope) -> Result<Verdict> {
    let targets: &[&str] = match scope {
        Scope::Short => &[AARCH64, MUSL],
        Scope::Full => &[AARCH64, MUSL, "aarch64-unknown-linux-musl"],
    };
    if !rustup(&["target", "list", "--installed"], &["target", "add"], targets)? {
        return Ok(Verdict::Skipped(format!("rustup has not {}", targets.join(" "))));
    }
    let mut check = check_of(&PROGRAMS);
    for target in targets {
        check.args(["--target", target]);
    }
    ci::succeed(&mut check)?;
    match scope {
        Scope::Short => Ok(Verdict::Passed),
        Scope::Full => Ok(foreign()?.and(lowest_version()?).and(emulated()?)),
    }
}

/// Whether rustup lists all `wanted`; in CI it installs those that it does not.
fn rustup(list: &[&str], add: &[&str], wanted: &[&str]) -> Result<bool> {
    if !setup::in_path("rustup") {
        return Ok(false);
    }
    let listed = Command::new("rustup")
        .args(list)
        .output()
        .context("cannot run rustup")?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let is_missing = |one: &&&str| !listed.lines().any(|line| line.starts_with(**one));
    let missing: Vec<_> = wanted.iter().filter(is_missing).collect();
    if missing.is_empty() {
        return Ok(true);
    }
    if env::var_os("CI").is_none() {
        return Ok(false);
    }
    let mut command = Command::new("rustup");
    command.args(add).args(missing).stdin(Stdio::null());
    Ok(command.status().context("cannot run rustup")?.success())
}

/// Other systems: one crate compiles, and the others are refused in a sentence.
fn foreign() -> Result<Verdict> {
    if !rustup(&["target", "list", "--installed"], &["target", "add"], &FOREIGN)? {
        return Ok(Verdict::Skipped(format!("rustup has not {}", FOREIGN.join(" "))));
    }
    for target in FOREIGN {
        ci::succeed(check_of(&[PORTABLE]).args(["--target", target]))?;
        let output = check_of(&["doorbell-verbs"]).args(["--target", target]).output()?;
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let is_sentence = |line: &str| line.contains("Doorbell is for 64-bit little-endian Linux");
        let refused = !output.status.success() && errors.lines().any(is_sentence);
        ensure!(
            refused && !errors.contains("error["),
            "{target}: not one sentence refuses doorbell-verbs:\n{errors}"
        );
    }
    Ok(Verdict::Passed)
}

/// Whatever users compile, by the version that Cargo.toml names.
fn lowest_version() -> Result<Verdict> {
    let manifest = fs::read_to_string(workspace().join("Cargo.toml"))?;
    let version = manifest
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = "))
        .context("Cargo.toml names no rust-version")?
        .trim_matches('"');
    let toolchain = format!("{version}.0");
    let install = ["toolchain", "install", "--profile", "minimal"];
    if !rustup(&["toolchain", "list"], &install, &[&toolchain])? {
        return Ok(Verdict::Skipped(format!("rustup has not Rust {toolchain}")));
    }
    let mut check = Command::new("rustup");
    check
        .args(["run", &toolchain, "cargo", "check", "--workspace", "--exclude", "xtask"])
        .args(["--exclude", "doorbell-fuzz", "--locked"])
        .current_dir(workspace())
        // This process runs under cargo, which names its own compiler to its children.
        .env_remove("RUSTC")
        .env_remove("RUSTUP_TOOLCHAIN")
        .env("CARGO_TARGET_DIR", target_folder()?.join("rust").join(&toolchain))
        .stdin(Stdio::null());
    ci::succeed(&mut check)
}

/// The tests of two crates and a measurement, with every byte checked, by an emulator.
fn emulated() -> Result<Verdict> {
    match setup::provide(&EMULATION)?.as_slice() {
        [] => {}
        missing => return ci::lacking(missing),
    }
    let build = |arguments: &[&str]| {
        let mut command = ci::command(arguments);
        command
            .args(["--locked", "--target", AARCH64])
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
            .env(
                "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
                format!("{EMULATOR} -L {LIBRARIES}"),
            );
        command
    };
    let packages = ["--package", PORTABLE, "--package", "doorbell-verbs"];
    let verdict = ci::tests(build(&["test", "--lib"]).args(packages))?;
    ci::succeed(&mut build(&["build", "--package", "doorbell-perftest"]))?;
    measure(&target_folder()?.join(AARCH64).join("debug/doorbell"))?;
    Ok(verdict)
}

/// Two commands, as one cannot start the other: that takes an emulator registered with the kernel.
fn measure(program: &Path) -> Result<()> {
    let run = |arguments: &[&str]| {
        let mut command = Command::new(EMULATOR);
        command.args(["-L", LIBRARIES]).arg(program).args(arguments);
        command.stdin(Stdio::null());
        command
    };
    let test = ["bw", "write", "--verify", "-n", "200", "-d", "soft0"];
    let mut server = run(&[&test[..], &["--server", "--port", "0"]].concat());
    let mut server = Reaped(server.stderr(Stdio::piped()).spawn()?);
    let stderr = server.0.stderr.take().context("its stderr is a pipe")?;
    let mut stderr = BufReader::new(stderr);
    let mut line = String::new();
    while !line.contains(" waits for a client on ") {
        line.clear();
        if stderr.read_line(&mut line)? == 0 {
            bail!("{AARCH64}: the server has not begun");
        }
        print!("{line}");
    }
    let port = line.trim_end().rsplit(':').next().unwrap_or_default().to_owned();
    // Nothing it writes may block it.
    let rest = thread::spawn(move || stderr.read_to_end(&mut Vec::new()));
    let output = run(&[&test[..], &["127.0.0.1", "--port", &port]].concat()).output()?;
    let table = String::from_utf8_lossy(&output.stdout);
    print!("{table}{}", String::from_utf8_lossy(&output.stderr));
    let has_row = table.lines().any(|line| line.trim_start().starts_with("65536 "));
    ensure!(output.status.success() && has_row, "{AARCH64}: no table of figures");
    ensure!(server.0.wait()?.success(), "{AARCH64}: the server failed");
    drop(rest.join());
    Ok(())
}

/// A process that is ended when this is dropped.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        // Fails without effect for one that has exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn check_of(packages: &[&str]) -> Command {
    let mut command = ci::command(&["check", "--locked"]);
    for package in packages {
        command.args(["--package", package]);
    }
    command
}
