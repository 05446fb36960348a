//! What `cargo xtask ci` checks.

use super::{Counts, Step, Verdict, guest, lacking, licences, safe};
use crate::{instructions, sanitize, setup, target_folder, workspace};
use anyhow::{Context, Result, bail};
use std::{
    ffi::OsString,
    io::{self, BufRead, BufReader, Write},
    path::PathBuf,
    process::{Command, Stdio},
};

/// All steps, in the order in which they run: cheap ones first, and the guest last as it needs the builds.
pub(crate) const ALL: [Step; 15] = [
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
    let needs: Vec<_> = setup::ABI.into_iter().chain([setup::QEMU]).collect();
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

/// Runs `cargo test`, shows what it prints, and adds up its results.
pub(crate) fn tests(command: &mut Command) -> Result<Verdict> {
    let mut child = command.stdout(Stdio::piped()).spawn().context("cannot run cargo")?;
    let output = child.stdout.take().context("cargo has no output")?;
    let mut counts = Counts::default();
    for line in BufReader::new(output).split(b'\n') {
        let line = line?;
        io::stdout().write_all(&line)?;
        println!();
        counts.add(result(&String::from_utf8_lossy(&line)).unwrap_or_default());
    }
    let status = child.wait()?;
    let failure = (!status.success()).then(|| format!("{}: {status}", spelt(command)));
    Ok(Verdict::Counted(counts, failure))
}

fn spelt(command: &Command) -> String {
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
    format!("cargo {}", words.join(" "))
}

/// The numbers in `test result: ok. 17 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s`.
fn result(line: &str) -> Option<Counts> {
    let numbers = line.strip_prefix("test result: ")?.split_once(". ")?.1;
    let number = |kind: &str| {
        let field = numbers.split("; ").find_map(|field| field.strip_suffix(kind));
        field.and_then(|number| number.trim().parse().ok())
    };
    Some(Counts {
        passed: number("passed")?,
        failed: number("failed")?,
        skipped: number("ignored")?,
    })
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
    fn results_are_read_from_what_cargo_prints() {
        let line = "test result: FAILED. 17 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s";
        assert_eq!(
            result(line),
            Some(Counts {
                passed: 17,
                failed: 2,
                skipped: 1
            })
        );
        assert_eq!(result("test result ... ok"), None);
        assert_eq!(result("running 3 tests"), None);
    }

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
