//! The steps of `cargo xtask ci`.

use super::{
    Place, Scope, Step, Verdict,
    cargo_test::{side_by_side, tests},
    guest, lacking, licences, package, rows, safe,
};
use crate::{
    clients, dist, fuzz, instructions, kernels, pip, platforms, python, sanitize, setup, soak, target_folder, tidy,
    workspace,
};
use anyhow::{Context, Result, bail};
use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// In order: the guest first, which keeps one processor busy while the background uses the others.
/// In the background: what needs no build first.
pub(crate) const ALL: [Step; 29] = [
    Step::new(
        "setup",
        Place::First,
        set_up,
        "what the other steps need from the machine",
    ),
    Step::new("fmt", Place::First, format, "rustfmt has nothing to change"),
    Step::new(
        "safe",
        Place::First,
        safe::check,
        "no unsafe code in examples and perftest",
    ),
    Step::new(
        "tidy",
        Place::First,
        tidy::check,
        "words, widths, lengths, fields, variables and visibility",
    ),
    Step::new("build", Place::First, build, "programs, libraries and tests"),
    Step::new(
        "vm",
        Place::InOrder,
        vm,
        "the scripts of tests/vm in a guest with the kernel's rxe",
    ),
    Step::new(
        "test",
        Place::InOrder,
        test,
        "every test that needs no guest, but the documentation's",
    ),
    Step::new(
        "browser",
        Place::Background,
        browser,
        "the charts of reports in a headless browser, on a desktop and on a phone",
    ),
    Step::new(
        "kernels",
        Place::Background,
        kernels::check,
        "the PTX is what the GPU kernels' sources build to",
    ),
    Step::new(
        "licences",
        Place::Background,
        licences::check,
        "licences and origins of what we depend on",
    ),
    Step::new(
        "package",
        Place::Background,
        package::check,
        "the crates can be published; with --full they build from what is packed, and the command installs",
    ),
    Step::new(
        "advisories",
        Place::Background,
        licences::advisories,
        "no known vulnerability in what we depend on, and nothing unmaintained",
    ),
    Step::new(
        "instructions",
        Place::Background,
        count_instructions,
        "the data path costs no more than C with accounting, and neither locks nor allocates",
    ),
    Step::new(
        "sanitize",
        Place::Background,
        sanitize::check,
        "loom models; with --full sanitizers, valgrind and Miri",
    ),
    Step::new(
        "clippy",
        Place::Background,
        clippy,
        "no warning from the compiler or clippy",
    ),
    Step::new(
        "doc",
        Place::Background,
        doc,
        "the documentation builds without a warning",
    ),
    Step::new(
        "doctest",
        Place::Background,
        doctest,
        "the examples in documentation and book",
    ),
    Step::new(
        "platforms",
        Place::Background,
        platforms::check,
        "aarch64 and musl compile; with --full also the lowest Rust version, and aarch64 runs in an emulator",
    ),
    Step::full(
        "nextest",
        Place::Background,
        nextest,
        "the tests of doorbell-test by cargo-nextest: each in a process of its own",
    ),
    Step::full(
        "interop",
        Place::Background,
        interop,
        "the feature `ibverbs`: the crate of that name beside ours",
    ),
    Step::new(
        "grpc",
        Place::Background,
        grpc,
        "gRPC by tonic over the streams of tasks",
    ),
    Step::full(
        "fuzz",
        Place::Background,
        fuzz::check,
        "the fuzz targets for five minutes; their corpora are replayed by the tests",
    ),
    Step::full("png", Place::Background, png, "the feature `png`: charts as pixels"),
    Step::new(
        "stock",
        Place::InOrder,
        stock,
        "stock RDMA programs on the drop-in libraries, unprivileged; the classic tools with perftest's",
    ),
    Step::new(
        "clients",
        Place::InOrder,
        clients,
        "clients that others wrote on the drop-in libraries; with --full all of docs/CLIENTS.md",
    ),
    Step::new(
        "python",
        Place::InOrder,
        python::check,
        "the Python package with NumPy, mpi4py and a sample of PyTorch's own tests; with --full all of them, and Ray",
    ),
    Step::new(
        "swarm",
        Place::InOrder,
        swarm,
        "processes on one address, all connected, one killed every second",
    ),
    Step::full(
        "soak",
        Place::InOrder,
        soak::check,
        "such processes killed, stopped and replaced, with link faults, for ten minutes",
    ),
    Step::full(
        "dist",
        Place::InOrder,
        dist::check,
        "the packages: the same bytes twice; Debian 12 and 13, three Pythons",
    ),
];

/// Installs for all steps at once: two that install at the same time would wait for each other.
fn set_up(_: Scope) -> Result<Verdict> {
    let each = [setup::QEMU, setup::CXX, setup::SYMBOLIZER, setup::BROWSER];
    let lists = [
        &setup::ABI[..],
        &setup::STOCK,
        &setup::CLIENTS,
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

/// Not a member of the workspace either; the step `package` builds it.
pub(super) const CLI: &str = "bindings/cli/Cargo.toml";

/// The workspace, and the packages of tests/peers that are not its members.
fn format(_: Scope) -> Result<Verdict> {
    cargo(&["fmt", "--all", "--check"])?;
    for (peer, _) in instructions::PEERS {
        let manifest = format!("tests/peers/{peer}/Cargo.toml");
        cargo(&["fmt", "--all", "--manifest-path", &manifest, "--check"])?;
    }
    // Without `--all`, which takes the crates by path, too.
    cargo(&["fmt", "--manifest-path", TONIC, "--check"])?;
    cargo(&["fmt", "--manifest-path", CLI, "--check"])?;
    Ok(Verdict::Passed)
}

fn clippy(_: Scope) -> Result<Verdict> {
    let check = |packages: &[&str]| {
        let rest = ["--all-targets", "--locked", "--", "-D", "warnings"];
        cargo(&[&["clippy"], packages, &rest].concat())
    };
    // Alone it has no feature: the others enable `gpu`.
    Ok(check(&["--workspace"])?.and(check(&["--package", "doorbell-collectives"])?))
}

fn doc(_: Scope) -> Result<Verdict> {
    succeed(command(&["doc", "--workspace", "--no-deps", "--locked"]).env("RUSTDOCFLAGS", "-Dwarnings"))
}

/// Builds everything in one call, so that each dependency is built with one set of features.
fn build(scope: Scope) -> Result<Verdict> {
    let targets = ["build", "--lib", "--bins", "--tests", "--examples"];
    succeed(&mut tested(&targets))?;
    // Its own lock file has what it needs.
    cargo(&["tree", "--manifest-path", CLI, "--locked", "--depth", "0"])?;
    if scope == Scope::Full {
        release()?;
    }
    Ok(Verdict::Passed)
}

/// Where the programs are that stock, swarm, browser and the guest run: built with assertions, and
/// with `--full` as released.
fn programs(scope: Scope) -> Result<PathBuf> {
    let profile = if scope == Scope::Full { "release" } else { "debug" };
    Ok(target_folder()?.join(profile))
}

/// Integration tests that together take half of the time of all tests.
const HALF: [&str; 6] = ["classic", "classic_managed", "dropin", "gpu", "gpu_verbs", "sim"];

/// Two halves side by side, as most tests wait for most of their time.
fn test(scope: Scope) -> Result<Verdict> {
    // Without them their test is skipped, or fails under `CI=true`.
    let vllm = target_folder()?.join("pip/vllm");
    if let Err(error) = pip::provide_files(&vllm, setup::VLLM, &setup::VLLM_FILES) {
        eprintln!("test: no files of {}: {error:#}", setup::VLLM);
    }
    let (half, others): (Vec<_>, Vec<_>) = integration_tests()?
        .into_iter()
        .partition(|name| HALF.contains(&name.as_str()));
    let command = |kinds: &[&str], names: Vec<String>| -> Result<Command> {
        let mut command = tested(kinds);
        for name in names {
            // A pattern: the program's name has underscores where its target's has dashes.
            command.args(["--test", &name.replace('_', "?")]);
        }
        command.arg("--no-fail-fast").envs(environment(scope).iter().copied());
        Ok(command)
    };
    let mut one = command(&["test", "--lib", "--bins", "--examples"], others)?;
    let mut other = command(&["test"], half)?;
    side_by_side([&mut one, &mut other])
}

fn doctest(_: Scope) -> Result<Verdict> {
    tests(tested(&["test", "--doc"]).arg("--no-fail-fast"))
}

/// Skipped where it is not installed: Debian has none, and building it takes longer than all tests.
fn nextest(_: Scope) -> Result<Verdict> {
    if !setup::in_path("cargo-nextest") {
        return Ok(Verdict::Skipped("cargo-nextest is not installed".to_owned()));
    }
    // More at once than processors: they wait for most of their time.
    let filter = ["--filterset", "package(doorbell-test)", "--test-threads", "16"];
    succeed(tested(&["nextest", "run"]).args(["--no-fail-fast"]).args(filter))
}

/// Variables of tests: with `--full` those of large products run the whole product, not a sample.
fn environment(scope: Scope) -> &'static [(&'static str, &'static str)] {
    match scope {
        Scope::Short => &[],
        Scope::Full => &[("DOORBELL_COLLECTIVES_WHOLE", "1"), ("DOORBELL_SWEEP", "all")],
    }
}

/// Cargo for the whole workspace, with one set of features.
fn tested(arguments: &[&str]) -> Command {
    let mut command = command(arguments);
    command.args(["--workspace", "--locked"]);
    command
}

fn release() -> Result<Verdict> {
    let targets = ["--lib", "--bins", "--examples"];
    let packages = ["--workspace", "--exclude", "xtask", "--locked"];
    cargo(&[&["build", "--release"], &packages[..], &targets].concat())
}

fn stock(scope: Scope) -> Result<Verdict> {
    match setup::provide(&setup::STOCK)?.as_slice() {
        [] => {}
        missing => return lacking(missing),
    }
    let programs = programs(scope)?;
    // The classic names of `doorbell` come second, with perftest itself at the other end.
    let run = |name, arguments: &[&str]| rows::run(&programs.join(name), arguments, environment(scope));
    let tables = run("stock", &["host", "--quick", "--check", "docs/STOCK.md"])?;
    let pairings = run("pairings", &["host", "--quick"])?;
    rows::verdict(&[tables, pairings])
}

fn clients(scope: Scope) -> Result<Verdict> {
    let full = (scope == Scope::Full).then_some("--full");
    let arguments: Vec<_> = full.into_iter().chain(["--check", "docs/CLIENTS.md"]).collect();
    clients::run(&programs(scope)?, &arguments)
}

fn swarm(scope: Scope) -> Result<Verdict> {
    let mut swarm = Command::new(programs(scope)?.join("swarm"));
    if scope == Scope::Short {
        swarm.args(["--processes", "16", "--bytes", "134217728"]);
    }
    succeed(&mut swarm)
}

fn vm(scope: Scope) -> Result<Verdict> {
    match setup::provide(&[setup::QEMU])?.as_slice() {
        [] => {}
        missing => return lacking(missing),
    }
    let mut variables = test_binaries()?;
    let extent = environment(scope).iter();
    variables.extend(extent.map(|(name, value)| (name.into(), value.into())));
    guest::run(&programs(scope)?, &variables)
}

/// Leaves the screenshots in the target folder.
fn browser(scope: Scope) -> Result<Verdict> {
    match setup::provide(&[setup::BROWSER])?.as_slice() {
        [] => {}
        missing => return lacking(missing),
    }
    let program = programs(scope)?.join("browser");
    let status = Command::new(&program)
        .arg("--keep")
        .arg(target_folder()?.join("ci/browser"))
        .status()
        .with_context(|| format!("cannot run {}", program.display()))?;
    if !status.success() {
        bail!("a report is not what it should be; see above");
    }
    Ok(Verdict::Passed)
}

/// The peers' crates, which are not ours to keep at a level, are counted with `--full`.
fn count_instructions(scope: Scope) -> Result<Verdict> {
    match setup::provide(&setup::INSTRUCTIONS)?.as_slice() {
        [] => {}
        missing => return lacking(missing),
    }
    if !instructions::check(scope == Scope::Full)? {
        bail!("ours does more than it may; the table above says where");
    }
    Ok(Verdict::Passed)
}

fn png(_: Scope) -> Result<Verdict> {
    let package = ["--package", "doorbell-perftest", "--features", "png", "--locked"];
    cargo(&[&["clippy", "--all-targets"], &package[..], &["--", "-D", "warnings"]].concat())?;
    tests(&mut command(
        &[&["test"], &package[..], &["--", "png", "report"]].concat(),
    ))
}

/// Skipped where the crate `ibverbs` cannot be built: it needs more than any other step.
fn interop(_: Scope) -> Result<Verdict> {
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

/// Not a member of the workspace.
const TONIC: &str = "tests/peers/tonic/Cargo.toml";

fn grpc(_: Scope) -> Result<Verdict> {
    let folder = target_folder()?;
    let on_tonic = |arguments: &[&str]| {
        let mut command = command(arguments);
        command.args(["--manifest-path", TONIC, "--locked", "--target-dir"]);
        command.arg(&folder);
        command
    };
    succeed(on_tonic(&["clippy", "--all-targets"]).args(["--", "-D", "warnings"]))?;
    tests(&mut on_tonic(&["test"]))
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

pub(crate) fn succeed(command: &mut Command) -> Result<Verdict> {
    let status = command
        .status()
        .with_context(|| format!("cannot run {:?}", command.get_program()))?;
    if !status.success() {
        bail!("{}: {status}", display(command));
    }
    Ok(Verdict::Passed)
}

/// What a command prints.
pub(crate) fn stdout(command: &mut Command) -> Result<Vec<u8>> {
    let output = command
        .output()
        .with_context(|| format!("cannot run {:?}", command.get_program()))?;
    if !output.status.success() {
        bail!(
            "{}: {}",
            display(command),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(output.stdout)
}

pub(crate) fn display(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or_default();
    let words = std::iter::once(program).chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    words.join(" ")
}

/// Variables such as `DOORBELL_TEST_SIM=…/sim-1234`, where one package alone uses the name.
fn test_binaries() -> Result<Vec<(OsString, OsString)>> {
    let listed = listed_test_programs()?;
    let programs = listed
        .lines()
        .filter_map(executable)
        .map(|program| (program.variable(), program.path));
    Ok(unique(programs)
        .map(|(name, path)| (name.into(), workspace().join(path).into()))
        .collect())
}

/// The names of the integration tests of all packages, each once.
fn integration_tests() -> Result<BTreeSet<String>> {
    let listed = listed_test_programs()?;
    let programs = listed.lines().filter_map(executable);
    Ok(programs
        .filter(|program| !program.is_unit)
        .map(|program| program.name)
        .collect())
}

fn listed_test_programs() -> Result<String> {
    let mut command = tested(&["test", "--no-run"]);
    let output = command.output().context("cannot run cargo")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() {
        bail!("{}: {}\n{said}", display(&command), output.status);
    }
    Ok(said)
}

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

#[derive(Debug, PartialEq, Eq)]
struct TestProgram {
    /// With underscores in place of dashes.
    name: String,
    path: PathBuf,
    /// Of a library's or program's own tests.
    is_unit: bool,
}

impl TestProgram {
    fn variable(&self) -> String {
        format!("DOORBELL_TEST_{}", self.name.to_uppercase())
    }
}

/// From a line `Executable abi/main.rs (target/debug/deps/abi-0123456789abcdef)`.
fn executable(line: &str) -> Option<TestProgram> {
    let (source, path) = line.trim().strip_prefix("Executable ")?.rsplit_once('(')?;
    let path = PathBuf::from(path.strip_suffix(')')?);
    let (name, _) = path.file_name()?.to_str()?.rsplit_once('-')?;
    Some(TestProgram {
        name: name.replace('-', "_"),
        is_unit: source.starts_with("unittests "),
        path,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_named_for_the_scripts() {
        let program = executable("  Executable abi/main.rs (target/debug/deps/abi-01ab)").unwrap();
        assert_eq!(
            (program.variable().as_str(), program.is_unit),
            ("DOORBELL_TEST_ABI", false)
        );
        assert_eq!(program.path, PathBuf::from("target/debug/deps/abi-01ab"));
        let program = executable("  Executable unittests src/lib.rs (/x y/deps/doorbell_tests-01ab)").unwrap();
        assert_eq!(
            (program.variable().as_str(), program.is_unit),
            ("DOORBELL_TEST_DOORBELL_TESTS", true)
        );
        assert!(executable("   Compiling abi v0.1.0 (/x)").is_none());
    }

    #[test]
    fn a_name_that_two_test_programs_have_is_left_out() {
        let programs = [("CM", "one/cm-1"), ("SIM", "sim-2"), ("CM", "other/cm-3")];
        let kept: Vec<_> = unique(programs.into_iter().map(|(name, path)| (name.to_owned(), path.into()))).collect();
        assert_eq!(kept, [("SIM".to_owned(), PathBuf::from("sim-2"))]);
    }
}
