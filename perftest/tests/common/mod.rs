//! Runs the `doorbell` command in tests.

#![allow(dead_code, reason = "each test program that has this module uses a part of it")]

pub(crate) mod server;
mod variables;

use std::fmt::Display;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use nix::unistd::Pid;
use serde_json::Value;

use self::variables::VARIABLES;

/// The command with these arguments, its output piped.
pub(crate) fn doorbell(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_doorbell"));
    command.args(line.split_whitespace());
    for name in VARIABLES {
        command.env_remove(name);
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

pub(crate) fn run(line: &str) -> Output {
    doorbell(line).output().expect("the binary runs")
}

pub(crate) fn json(line: &str) -> Value {
    json_of(doorbell(line))
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn complaint(output: &Output) -> Vec<String> {
    stderr(output)
        .lines()
        .filter(|line| !line.starts_with("doorbell: warning:"))
        .map(str::to_owned)
        .collect()
}

pub(crate) fn json_of(mut command: Command) -> Value {
    let output = command.arg("--json").output().expect("the binary runs");
    assert!(output.status.success(), "{command:?}: {}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{command:?}: {e}: {output:?}"))
}

/// The published schema of results.
pub(crate) fn schema() -> Value {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/schema/result.schema.json");
    serde_json::from_str(&fs::read_to_string(file).expect("the schema")).expect("JSON")
}

pub(crate) fn children_of(parent: u32) -> Vec<Pid> {
    let processes = fs::read_dir("/proc").expect("a folder").flatten();
    processes
        .filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            (fields_of(pid)?.get(1)?.parse() == Ok(parent)).then(|| Pid::from_raw(pid))
        })
        .collect()
}

/// Whether a process has not ended; one that is not reaped yet has.
pub(crate) fn is_running(pid: Pid) -> bool {
    fields_of(pid).is_some_and(|fields| fields.first().is_some_and(|state| state != "Z"))
}

/// The CPU time of a process, in ticks of 10 ms; constant after it has ended, until it is reaped.
pub(crate) fn ticks_of(pid: u32) -> u64 {
    let fields = fields_of(pid).expect("it is not reaped yet");
    // utime and stime are fields 14 and 15.
    let times = fields[11..13].iter().map(|field| field.parse::<u64>());
    times.sum::<Result<u64, _>>().expect("numbers")
}

/// The fields of proc_pid_stat(5) after the name, which may contain anything: from the third on.
fn fields_of(pid: impl Display) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(stat.rsplit(')').next()?.split_whitespace().map(str::to_owned).collect())
}
