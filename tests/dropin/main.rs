//! `doorbell run`, `doorbell env` and the drop-in libraries: the symbols and versions of
//! `libibverbs.so.1` compared with the system's, C programs compiled against the real headers,
//! sysfs as tools see it, signals and exit statuses.
//!
//! Cargo builds no library of another package for a test, so the first test that needs them runs
//! cargo; then they are up to date however the tests are run.

mod command;
mod layout;
mod programs;
mod suite;
mod symbols;
mod sysfs;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

/// The folder with the command and the libraries.
fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        // This program is in TARGET/PROFILE/deps.
        let program = std::env::current_exe().expect("this program is somewhere");
        let folder = program.ancestors().nth(2).expect("cargo put it there").to_owned();
        let target = folder.parent().expect("cargo put it there");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--locked", "--target-dir"]).arg(target);
        if folder.ends_with("release") {
            cargo.arg("--release");
        }
        // With the features of `cargo test --workspace`, where the examples add test-only
        // dependencies: with fewer packages most would be built again, while the tests wait.
        cargo.args(["--workspace", "--exclude", "doorbell-tests", "--exclude", "xtask"]);
        cargo.args(["--lib", "--examples", "--bin", "doorbell"]);
        let status = cargo
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .expect("cargo runs");
        assert!(status.success(), "the libraries do not build");
        folder
    })
}

/// `doorbell` with these words, on a device of this test's own, without the developer's
/// environment.
fn doorbell(words: &[&str]) -> Command {
    let mut command = Command::new(built().join("doorbell"));
    command.args(words);
    let ours = std::env::vars_os().map(|(name, _)| name);
    for name in ours.filter(|name| name.to_string_lossy().starts_with("DOORBELL_")) {
        command.env_remove(name);
    }
    command.env("DOORBELL_SOFT_ADDR", address());
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// An address of 127.0.0.0/8 that no other test of this process uses, and no other process that
/// runs this soon.
fn address() -> String {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    format!("127.{}.{low}.{}", 96 + high % 32, NEXT.fetch_add(1, Ordering::Relaxed))
}

fn run(words: &[&str]) -> Output {
    let words = [&["run", "--"], words].concat();
    doorbell(&words).output().expect("doorbell was built")
}

/// The stdout of a command under `doorbell run`, which must succeed with an empty stderr.
fn stdout_of(words: &[&str]) -> String {
    let output = run(words);
    let (stdout, stderr) = texts(&output);
    assert!(
        output.status.success() && stderr.is_empty(),
        "{words:?}: {}\n{stdout}{stderr}",
        output.status
    );
    stdout
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// Reports why a check cannot run here.
///
/// # Panics
/// Under `CI=true`.
fn missing(what: &str) {
    assert!(std::env::var("CI").as_deref() != Ok("true"), "missing under CI: {what}");
    eprintln!("skipped: {what}");
}
