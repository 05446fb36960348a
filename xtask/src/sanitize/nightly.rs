//! A nightly toolchain, by rustup, whatever toolchain runs this program: with Miri, and with the
//! source of the standard library, which is built with ThreadSanitizer.

use crate::{ci, setup, workspace};
use anyhow::{Context, Result};
use std::{
    path::Path,
    process::{Command, Stdio},
};

const INSTALL: [&str; 9] = [
    "toolchain",
    "install",
    "nightly",
    "--profile",
    "minimal",
    "--component",
    "miri",
    "--component",
    "rust-src",
];

/// Its cargo, on the workspace.
pub(super) fn cargo(arguments: &[&str]) -> Command {
    let mut command = of_nightly("cargo");
    command.args(arguments);
    command
}

/// What is missing, with the command that installs it; `None` when all is there. Installs it in CI
/// alone: the toolchains of a developer's machine are left as they are.
pub(super) fn missing() -> Result<Option<String>> {
    let rustup = setup::in_path("rustup");
    if rustup && is_complete()? {
        return Ok(None);
    }
    let install = format!("rustup {}", INSTALL.join(" "));
    if rustup && std::env::var_os("CI").is_some() {
        println!("{install}");
        let status = Command::new("rustup").args(INSTALL).stdin(Stdio::null()).status();
        if status.context("cannot run rustup")?.success() && is_complete()? {
            return Ok(None);
        }
    }
    Ok(Some(format!("no nightly with Miri and rust-src ({install})")))
}

fn is_complete() -> Result<bool> {
    let mut miri = cargo(&["miri", "--version"]);
    let status = miri.stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !status.context("cannot run rustup")?.success() {
        return Ok(false);
    }
    let sysroot = ci::stdout(of_nightly("rustc").args(["--print", "sysroot"]))?;
    let sysroot = String::from_utf8(sysroot).context("not text")?;
    Ok(Path::new(sysroot.trim())
        .join("lib/rustlib/src/rust/library/Cargo.lock")
        .exists())
}

fn of_nightly(program: &str) -> Command {
    let mut command = Command::new("rustup");
    command
        .args(["run", "nightly", program])
        .current_dir(workspace())
        .stdin(Stdio::null())
        .env("CARGO_TERM_COLOR", "never");
    // Cargo sets its own path for its children, and rustup the toolchain.
    for name in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    command
}
