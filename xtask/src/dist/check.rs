//! The step `dist`: the packages are made twice in different folders with the same bytes, and each
//! is installed and used as by its users (tests/packages).

use super::{SUMS, build};
use crate::{
    apt,
    ci::{Counts, Scope, Verdict, stdout, succeed},
    setup, target_folder, workspace,
};
use anyhow::{Context, Result, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

const SUITES: [&str; 2] = ["bookworm", "trixie"];
/// The oldest and the newest that the wheel is for, and Debian 12's.
const PYTHONS: [&str; 3] = ["3.9", "3.11", "3.13"];

/// What one check came to.
enum Outcome {
    Ok,
    /// For this reason.
    Skipped(String),
}

pub(crate) fn check(_: Scope) -> Result<Verdict> {
    let folder = target_folder()?.join("dist");
    let mut tally = Tally::default();
    let made = tally.take("packages", || make(&workspace(), &target_folder()?, &folder));
    if !made {
        return Ok(Verdict::Counted(tally.counts, None));
    }
    tally.take("the same bytes elsewhere", || same_elsewhere(&folder));
    tally.take("GitHub's and GitLab's setup", || script("ci.sh", &[&folder]));
    let program = &target_folder()?.join("dist-program");
    let archive = find(&folder, "libdoorbell-", ".tar.gz")?;
    tally.take("a program with the C library", || script("c.sh", &[&archive, program]));
    let wheel = find(&folder, "", ".whl")?;
    for version in PYTHONS {
        tally.take(&format!("wheel in Python {version}"), || match python(version) {
            Some(python) => script("wheel.sh", &[&python, &wheel]),
            None => Ok(Outcome::Skipped("no such Python".to_owned())),
        });
    }
    for suite in SUITES {
        tally.take(&format!("deb in {suite}"), || debian(suite, &folder, program));
    }
    Ok(Verdict::Counted(tally.counts, None))
}

#[derive(Default)]
struct Tally {
    counts: Counts,
}

impl Tally {
    /// Runs a check and prints its outcome and time. Returns whether it did not fail.
    fn take(&mut self, name: &str, check: impl FnOnce() -> Result<Outcome>) -> bool {
        let started = Instant::now();
        let outcome = check();
        let (mark, count) = match &outcome {
            Ok(Outcome::Ok) => ("ok".to_owned(), &mut self.counts.passed),
            Ok(Outcome::Skipped(why)) => (format!("skipped: {why}"), &mut self.counts.skipped),
            Err(error) => (format!("FAILED: {error:#}"), &mut self.counts.failed),
        };
        *count += 1;
        println!("dist: {name}: {mark} ({:.1} s)", started.elapsed().as_secs_f64());
        outcome.is_ok()
    }
}

/// As another process: which sources it takes and where it builds are of its environment.
fn make(sources: &Path, target: &Path, out: &Path) -> Result<Outcome> {
    // Not by its path: another build may have replaced the file meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["dist", "--out"])
        .arg(out)
        .current_dir(sources)
        .env("CARGO_MANIFEST_DIR", sources.join("xtask"))
        .env("CARGO_TARGET_DIR", target);
    succeed(&mut command).map(|_| Outcome::Ok)
}

fn same_elsewhere(first: &Path) -> Result<Outcome> {
    let copy = &target_folder()?.join("dist-copy");
    let remove = || fs::remove_dir_all(copy).with_context(|| format!("cannot remove {}", copy.display()));
    if copy.exists() {
        remove()?;
    }
    for file in sources()? {
        let to = copy.join(&file);
        fs::create_dir_all(to.parent().unwrap_or(copy))?;
        fs::copy(workspace().join(&file), &to).with_context(|| format!("cannot copy {file}"))?;
    }
    let (target, out) = (copy.join("target"), copy.join("dist"));
    // The linker is the same, and 400 MB.
    let linker = build::linker(&target);
    fs::create_dir_all(linker.parent().unwrap_or(copy))?;
    std::os::unix::fs::symlink(build::linker(&target_folder()?), &linker)?;
    make(copy, &target, &out)?;
    let sums = |folder: &Path| fs::read_to_string(folder.join(SUMS));
    let (ours, others) = (sums(first)?, sums(&out)?);
    ensure!(ours == others, "built twice, the digests differ:\n{ours}{others}");
    remove().map(|()| Outcome::Ok)
}

/// The files that a clone with the present changes would have.
fn sources() -> Result<Vec<String>> {
    let mut git = Command::new("git");
    git.args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
        .current_dir(workspace());
    let names = String::from_utf8(stdout(&mut git)?)?;
    let names = names.split_terminator('\0').map(str::to_owned);
    Ok(names.filter(|name| workspace().join(name).is_file()).collect())
}

/// `program` is of c.sh.
fn debian(suite: &str, packages: &Path, program: &Path) -> Result<Outcome> {
    if !apt::is_root() {
        return Ok(Outcome::Skipped("not run as root".to_owned()));
    }
    match setup::provide(&[setup::DEBOOTSTRAP])?.as_slice() {
        [] => {}
        missing => return Ok(Outcome::Skipped(format!("missing: {}", missing.join(" ")))),
    }
    let cache = target_folder()?.join("debian");
    fs::create_dir_all(&cache)?;
    let mut unshare = Command::new("unshare");
    unshare
        .args(["--mount", "--pid", "--fork"])
        .arg(workspace().join("tests/packages/deb.sh"))
        .arg(suite)
        .args([&cache, packages, program]);
    succeed(unshare.stdin(Stdio::null())).map(|_| Outcome::Ok)
}

fn script(name: &str, arguments: &[&Path]) -> Result<Outcome> {
    let mut script = Command::new(workspace().join("tests/packages").join(name));
    script.args(arguments).stdin(Stdio::null());
    succeed(&mut script).map(|_| Outcome::Ok)
}

fn find(folder: &Path, beginning: &str, ending: &str) -> Result<PathBuf> {
    let sums = fs::read_to_string(folder.join(SUMS))?;
    let name = sums.lines().filter_map(|line| line.split_whitespace().nth(1));
    let name = name
        .into_iter()
        .find(|name| name.starts_with(beginning) && name.ends_with(ending));
    Ok(folder.join(name.with_context(|| format!("no {beginning}*{ending} in {}", folder.display()))?))
}

/// The program of a Python of this version; pyenv's stand-ins take theirs from a variable.
fn python(version: &str) -> Option<PathBuf> {
    let output = Command::new(format!("python{version}"))
        .args(["-c", "import sys; print(sys.executable)"])
        .env("PYENV_VERSION", version)
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let path = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| PathBuf::from(path.trim()))
}
