//! What `cargo xtask ci` checks.

use super::{Step, Verdict, cargo_test::tests, guest, lacking, licences, safe};
use crate::{instructions, kernels, sanitize, setup, target_folder, workspace};
use anyhow::{Context, Result, bail};
use std::{
    ffi::OsString,
    path::PathBuf,
    process::{Command, Stdio},
};

/// All steps, in the order in which they run: cheap ones first, and the guest last as it needs the builds.
pub(crate) const ALL: [Step; 16] = [
    Step {
        name: "setup",
        about: "what the other steps need from the machine",
        run: set_up,
    },
    Step {
        name: "fmt",
        about: "rustfmt has nothing to change",
        run: format,
    },
    Step {
        name: "safe",
        about: "no unsafe code in examples and perftest",
        run: safe::check,
    },
    Step {
        name: "clippy",
        about: "no warning from the compiler or clippy",
        run: clippy,
    },
    Step {
        name: "doc",
        about: "the documentation builds without a warning",
        run: doc,
    },
    Step {
        name: "test",
        about: "every test that needs no guest",
        run: test,
    },
    Step {
        name: "abi",
        about: "our bindings agree with those of rdma-sys",
        run: abi,
    },
    Step {
        name: "kernels",
        about: "the GPU's kernels and their report are what their source builds to",
        run: kernels::check,
    },
    Step {
        name: "build",
        about: "release builds",
        run: release,
    },
    Step {
        name: "stock",
        about: "stock RDMA programs on the drop-in libraries, without any privilege",
        run: stock,
    },
    Step {
        name: "swarm",
        about: "32 processes on one address, all connected, 1 GiB of traffic each, one killed every second",
        run: swarm,
    },
    Step {
        name: "licences",
        about: "licences and origins of what we depend on",
        run: licences::check,
    },
    Step {
        name: "instructions",
        about: "the data path costs no more than C with accounting, and neither locks nor allocates",
        run: count_instructions,
    },
    Step {
        name: "interop",
        about: "the feature `ibverbs`: the crate of that name beside ours",
        run: interop,
    },
    Step {
        name: "sanitize",
        about: "the safe API and all that is lock-free under sanitizers, valgrind and loom",
        run: sanitize::check,
    },
    Step {
        name: "vm",
        about: "the scripts of tests/vm in a guest with the kernel's rxe",
        run: vm,
    },
];

fn set_up() -> Result<Verdict> {
    let needs: Vec<_> = setup::ABI.into_iter().chain([setup::QEMU, setup::CXX]).collect();
    match setup::provide(&needs)?.as_slice() {
        [] => Ok(Verdict::Passed),
        missing => lacking(missing),
    }
}

/// The workspace, and the packages that are no members of it with the one that they share.
fn format() -> Result<Verdict> {
    cargo(&["fmt", "--all", "--check"])?;
    for (peer, _) in instructions::PEERS {
        let manifest = format!("tests/peers/{peer}/Cargo.toml");
        cargo(&["fmt", "--all", "--manifest-path", &manifest, "--check"])?;
    }
    Ok(Verdict::Passed)
}

fn clippy() -> Result<Verdict> {
    cargo(&[
        "clippy",
        "--workspace",
        "--all-targets",
        "--locked",
        "--",
        "-D",
        "warnings",
    ])
}

fn doc() -> Result<Verdict> {
    succeed(command(&["doc", "--workspace", "--no-deps", "--locked"]).env("RUSTDOCFLAGS", "-Dwarnings"))
}

fn test() -> Result<Verdict> {
    tests(&mut command(&["test", "--workspace", "--locked", "--no-fail-fast"]))
}

fn abi() -> Result<Verdict> {
    match setup::provide(&setup::ABI)?.as_slice() {
        [] => {}
        missing => return lacking(missing),
    }
    let mut command = command(&[
        "test",
        "--package",
        "doorbell-tests",
        "--features",
        "rdma-sys",
        "--test",
        "abi",
        "--locked",
    ]);
    command.env("LIBCLANG_PATH", setup::LIBCLANG);
    tests(&mut command)
}

fn release() -> Result<Verdict> {
    cargo(&[
        "build",
        "--release",
        "--workspace",
        "--exclude",
        "xtask",
        "--lib",
        "--bins",
        "--examples",
        "--locked",
    ])
}

fn stock() -> Result<Verdict> {
    match setup::provide(&setup::STOCK)?.as_slice() {
        [] => {}
        missing => return lacking(missing),
    }
    release()?;
    let program = target_folder()?.join("release/stock");
    let mut command = Command::new(&program);
    command
        .args(["host", "--check", "docs/STOCK.md"])
        .current_dir(workspace());
    let status = command
        .status()
        .with_context(|| format!("cannot run {}", program.display()))?;
    if !status.success() {
        bail!(
            "see above; when the tables are wrong, {} host --write docs/STOCK.md",
            program.display()
        );
    }
    Ok(Verdict::Passed)
}

fn swarm() -> Result<Verdict> {
    release()?;
    succeed(&mut Command::new(target_folder()?.join("release/swarm")))
}

fn vm() -> Result<Verdict> {
    match setup::provide(&[setup::QEMU])?.as_slice() {
        [] => {}
        missing => return lacking(missing),
    }
    release()?;
    guest::run(&test_binaries()?)
}

fn count_instructions() -> Result<Verdict> {
    match setup::provide(&setup::INSTRUCTIONS)?.as_slice() {
        [] => {}
        missing => return lacking(missing),
    }
    if !instructions::check(true)? {
        bail!("ours does more than it may; the table above says where");
    }
    Ok(Verdict::Passed)
}

/// Skipped where that crate cannot be built, which takes more than anything else here does.
fn interop() -> Result<Verdict> {
    match setup::provide(&setup::RDMA_CORE)?.as_slice() {
        [] => {}
        missing => return Ok(Verdict::Skipped(format!("missing: {}", missing.join(" ")))),
    }
    let package = ["--package", "doorbell-verbs", "--features", "ibverbs", "--locked"];
    let with_libclang = |arguments: &[&str]| {
        let mut command = command(arguments);
        command.env("LIBCLANG_PATH", setup::LIBCLANG);
        command
    };
    let clippy = [&["clippy", "--all-targets"], &package[..], &["--", "-D", "warnings"]].concat();
    succeed(&mut with_libclang(&clippy))?;
    tests(&mut with_libclang(
        &[&["test"], &package[..], &["--test", "verbs", "ibverbs::"]].concat(),
    ))
}

fn cargo(arguments: &[&str]) -> Result<Verdict> {
    succeed(&mut command(arguments))
}

/// Cargo, the same one that runs us, on the whole workspace.
pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(arguments)
        .current_dir(workspace())
        .stdin(Stdio::null())
        .env("CARGO_TERM_COLOR", "never");
    command
}

/// Runs a command whose exit status is the verdict.
pub(super) fn succeed(command: &mut Command) -> Result<Verdict> {
    let status = command
        .status()
        .with_context(|| format!("cannot run {:?}", command.get_program()))?;
    if !status.success() {
        bail!("{}: {status}", spelt(command));
    }
    Ok(Verdict::Passed)
}

pub(super) fn spelt(command: &Command) -> String {
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
    format!("cargo {}", words.join(" "))
}

/// The test programs of `doorbell-tests` and of the collectives, as variables for the guest's scripts: `DOORBELL_TEST_SIM=…/sim-1234`.
fn test_binaries() -> Result<Vec<(OsString, OsString)>> {
    let packages = ["--package", "doorbell-tests", "--package", "doorbell-collectives"];
    let mut command = command(&[&["test", "--no-run", "--tests", "--locked"], &packages[..]].concat());
    let output = command.output().context("cannot run cargo")?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("{}: {}\n{said}", spelt(&command), output.status);
    }
    Ok(said
        .lines()
        .filter_map(executable)
        .map(|(name, path)| (name.into(), workspace().join(path).into()))
        .collect())
}

/// Name and path from `Executable abi/main.rs (target/debug/deps/abi-0123456789abcdef)`.
fn executable(line: &str) -> Option<(String, PathBuf)> {
    let path = line
        .trim()
        .strip_prefix("Executable ")?
        .rsplit_once('(')?
        .1
        .strip_suffix(')')?;
    let path = PathBuf::from(path);
    let (name, _) = path.file_name()?.to_str()?.rsplit_once('-')?;
    Some((format!("DOORBELL_TEST_{}", name.to_uppercase().replace('-', "_")), path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_named_for_the_scripts() {
        let (name, path) = executable("  Executable abi/main.rs (target/debug/deps/abi-01ab)").unwrap();
        assert_eq!(
            (name.as_str(), path),
            ("DOORBELL_TEST_ABI", PathBuf::from("target/debug/deps/abi-01ab"))
        );
        let (name, _) = executable("  Executable unittests src/lib.rs (/x y/deps/doorbell_tests-01ab)").unwrap();
        assert_eq!(name, "DOORBELL_TEST_DOORBELL_TESTS");
        assert!(executable("   Compiling abi v0.1.0 (/x)").is_none());
    }
}
