//! What `cargo xtask ci` checks.

use super::{Place, Step, Verdict, cargo_test::tests, guest, lacking, licences, rows, safe};
use crate::{instructions, kernels, sanitize, setup, target_folder, tidy, workspace};
use anyhow::{Context, Result, bail};
use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::PathBuf,
    process::{Command, Stdio},
};

/// All steps, in the order in which they run: in their turn cheap ones first and the guest last. Behind those what others need first, and last what has cargo
/// lock the folder that tests are built in: the tests of the drop-in libraries build, too, and would wait for it.
pub(crate) const ALL: [Step; 17] = [
    Step {
        name: "setup",
        about: "what the other steps need from the machine",
        place: Place::First,
        run: set_up,
    },
    Step {
        name: "fmt",
        about: "rustfmt has nothing to change",
        place: Place::InTurn,
        run: format,
    },
    Step {
        name: "safe",
        about: "no unsafe code in examples and perftest",
        place: Place::InTurn,
        run: safe::check,
    },
    Step {
        name: "tidy",
        about: "words, widths, lengths, fields, variables and visibility",
        place: Place::InTurn,
        run: tidy::check,
    },
    Step {
        name: "test",
        about: "every test that needs no guest",
        place: Place::InTurn,
        run: test,
    },
    Step {
        name: "build",
        about: "release builds",
        place: Place::Behind,
        run: release,
    },
    Step {
        name: "browser",
        about: "reports in a headless browser: their charts hold the numbers of the results, on a desktop and on a phone",
        place: Place::Behind,
        run: browser,
    },
    Step {
        name: "instructions",
        about: "the data path costs no more than C with accounting, and neither locks nor allocates",
        place: Place::Behind,
        run: count_instructions,
    },
    Step {
        name: "kernels",
        about: "the GPU's kernels and their report are what their source builds to",
        place: Place::Behind,
        run: kernels::check,
    },
    Step {
        name: "licences",
        about: "licences and origins of what we depend on",
        place: Place::Behind,
        run: licences::check,
    },
    Step {
        name: "sanitize",
        about: "the safe API and all that is lock-free under sanitizers, valgrind and loom",
        place: Place::Behind,
        run: sanitize::check,
    },
    Step {
        name: "clippy",
        about: "no warning from the compiler or clippy",
        place: Place::Behind,
        run: clippy,
    },
    Step {
        name: "doc",
        about: "the documentation builds without a warning",
        place: Place::Behind,
        run: doc,
    },
    Step {
        name: "interop",
        about: "the feature `ibverbs`: the crate of that name beside ours",
        place: Place::Behind,
        run: interop,
    },
    Step {
        name: "stock",
        about: "stock RDMA programs on the drop-in libraries, without any privilege; and with the classic tools at the other end",
        place: Place::InTurn,
        run: stock,
    },
    Step {
        name: "swarm",
        about: "32 processes on one address, all connected, 1 GiB of traffic each, one killed every second",
        place: Place::InTurn,
        run: swarm,
    },
    Step {
        name: "vm",
        about: "the scripts of tests/vm in a guest with the kernel's rxe",
        place: Place::InTurn,
        run: vm,
    },
];

/// All that any step needs, as two of them that run beside each other would wait for each other's installing.
fn set_up() -> Result<Verdict> {
    let each = [setup::QEMU, setup::CXX, setup::SYMBOLIZER, setup::BROWSER];
    let lists = [
        &setup::ABI[..],
        &setup::STOCK,
        &setup::KERNELS,
        &setup::INSTRUCTIONS,
        &setup::RDMA_CORE,
    ];
    let needs: Vec<_> = lists.concat().into_iter().chain(each).collect();
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
    tests(test_command()?.arg("--no-fail-fast"))
}

/// `cargo test` for all tests that need no guest. With those that compare our bindings with rdma-sys', where that can be built: apart from the others they
/// would have all that is below them built once more.
fn test_command() -> Result<Command> {
    let mut command = command(&["test", "--workspace", "--locked"]);
    if setup::provide(&setup::ABI)?.is_empty() {
        command.args(["--features", "doorbell-tests/rdma-sys"]);
        command.env("LIBCLANG_PATH", setup::LIBCLANG);
    }
    Ok(command)
}

/// Builds what is released and what tests it, by one call: cargo builds anew what another choice of packages would have with other features.
pub(crate) fn release() -> Result<Verdict> {
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
    // What `doorbell` is by the names of perftest comes after, with perftest itself at the other end.
    let tables = rows::run("stock", &["host", "--check", "docs/STOCK.md"])?;
    let pairings = rows::run("pairings", &["host", "--quick"])?;
    rows::verdict(&[tables, pairings])
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

/// Looks at reports as people do. The screenshots stay in the target folder, to be looked at.
fn browser() -> Result<Verdict> {
    match setup::provide(&[setup::BROWSER])?.as_slice() {
        [] => {}
        missing => return lacking(missing),
    }
    release()?;
    let target = target_folder()?;
    let program = target.join("release/browser");
    let status = Command::new(&program)
        .arg("--keep")
        .arg(target.join("ci/browser"))
        .status()
        .with_context(|| format!("cannot run {}", program.display()))?;
    if !status.success() {
        bail!("a report is not what it should be; see above");
    }
    Ok(Verdict::Passed)
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

/// The test programs as variables for the guest's scripts: `DOORBELL_TEST_SIM=…/sim-1234`. They are those that the step `test` runs, so that nothing is built for
/// the guest alone. A name that two packages gave is nobody's.
fn test_binaries() -> Result<Vec<(OsString, OsString)>> {
    let mut command = test_command()?;
    command.arg("--no-run");
    let output = command.output().context("cannot run cargo")?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("{}: {}\n{said}", spelt(&command), output.status);
    }
    Ok(unique(said.lines().filter_map(executable))
        .map(|(name, path)| (name.into(), workspace().join(path).into()))
        .collect())
}

/// Those whose name no other has.
fn unique(programs: impl Iterator<Item = (String, PathBuf)>) -> impl Iterator<Item = (String, PathBuf)> {
    let mut by_name: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for (name, path) in programs {
        by_name.entry(name).or_default().push(path);
    }
    by_name
        .into_iter()
        .filter_map(|(name, paths)| Some((name, <[PathBuf; 1]>::try_from(paths).ok()?)))
        .map(|(name, [path])| (name, path))
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

    #[test]
    fn a_name_that_two_test_programs_have_is_left_out() {
        let programs = [("CM", "one/cm-1"), ("SIM", "sim-2"), ("CM", "other/cm-3")];
        let kept: Vec<_> = unique(programs.into_iter().map(|(name, path)| (name.to_owned(), path.into()))).collect();
        assert_eq!(kept, [("SIM".to_owned(), PathBuf::from("sim-2"))]);
    }
}
