//! `doorbell run`, `doorbell env` and the drop-in libraries: symbols and versions compared with the
//! system's, C programs, sysfs, signals and exit statuses.

mod command;
mod faults;
mod layout;
mod mps;
mod nccl;
mod programs;
mod suite;
mod symbols;
mod sysfs;
mod wheels;

use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};

use doorbell_tests::built;

/// On a device of this test's own, without the developer's environment.
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

/// Unused by other tests of this process, and by other processes that run this soon.
fn address() -> String {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    format!("127.{}.{low}.{}", 96 + high % 32, NEXT.fetch_add(1, Ordering::Relaxed))
}

fn run(words: &[&str]) -> Output {
    let words = [&["run", "--"], words].concat();
    doorbell(&words).output().expect("doorbell was built")
}

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

/// Reports why a check cannot run here; panics under `CI=true`.
fn missing(what: &str) {
    assert!(std::env::var("CI").as_deref() != Ok("true"), "missing under CI: {what}");
    eprintln!("skipped: {what}");
}
