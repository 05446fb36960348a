//! Miri: undefined behaviour, on the tests of each crate that need nothing that Miri lacks:
//! sockets, memfds, child processes, system calls of their own.

use super::{KERNELS, folder};
use crate::{
    ci::{self, Verdict},
    setup, workspace,
};
use anyhow::{Context, Result};
use std::process::{Command, Stdio};

/// Files and clocks are the host's. Devices and peers address registered memory by number, so its
/// provenance is exposed. Memory that a device keeps is leaked.
const FLAGS: &str = "-Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks";

/// Arguments of `cargo miri test`.
const RUNS: [&[&str]; 6] = [
    &["--package", "doorbell-verbs-sys", "--lib"],
    &["--package", "doorbell-verbs", "--test", "verbs"],
    &["--package", "doorbell-roce-proto", "--lib"],
    &[
        "--package",
        "doorbell-softroce",
        "--lib",
        "--",
        "combining_lock",
        "wakeup::tests",
        "memory::table",
        "links::shm_ring::record",
        "links::udp::fault",
    ],
    &KERNELS,
    &[
        "--package",
        "doorbell-fuzz",
        "--test",
        "corpus",
        "--",
        "endpoint",
        "connection_manager",
        "bootstrap",
        "classic",
        "result",
    ],
];

pub(super) fn run() -> Result<Verdict> {
    if !has_miri()? {
        return Ok(Verdict::Skipped(
            "no toolchain with Miri (rustup component add miri rust-src --toolchain nightly)".into(),
        ));
    }
    let mut total: Option<Verdict> = None;
    for arguments in RUNS {
        let mut command = cargo_miri();
        command
            .arg("test")
            .arg("--target-dir")
            .arg(folder("miri")?)
            .args(arguments);
        command.env("MIRIFLAGS", FLAGS).env("PROPTEST_CASES", "4");
        let verdict = ci::tests(&mut command)?;
        total = Some(match total {
            Some(before) => before.and(verdict),
            None => verdict,
        });
    }
    total.context("there are no runs")
}

/// A nightly's, as Miri comes with no other; by rustup, whatever toolchain runs this program.
fn cargo_miri() -> Command {
    let mut command = Command::new("rustup");
    command
        .args(["run", "nightly", "cargo", "miri"])
        .current_dir(workspace())
        .stdin(Stdio::null())
        .env("CARGO_TERM_COLOR", "never");
    // Cargo sets its own path for its children, and rustup the toolchain.
    for name in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    command
}

fn has_miri() -> Result<bool> {
    if !setup::in_path("rustup") {
        return Ok(false);
    }
    let mut version = cargo_miri();
    let status = version
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    Ok(status.context("cannot run rustup")?.success())
}
