//! Runs the `doorbell` command in tests.

#![allow(dead_code, reason = "each test program that has this module uses a part of it")]

mod variables;

use std::process::{Command, Output, Stdio};

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
