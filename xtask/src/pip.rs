//! Pinned packages from PyPI, in folders of `target`.

use anyhow::{Context, Result, ensure};
use std::{fs, path::Path, process::Command};

/// Installs wheels into a folder, in place of others than these; `options` are more of pip's.
pub(crate) fn provide(folder: &Path, wheels: &[&str], options: &[&str]) -> Result<()> {
    let stamp = folder.join("doorbell-wheels.txt");
    let wanted = wheels.join("\n");
    if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    eprintln!("pip: installing {}", wheels.join(" "));
    let installed = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"])
        .args([
            "--no-deps",
            "--no-compile",
            "--only-binary=:all:",
            "--root-user-action=ignore",
        ])
        .arg("--target")
        .arg(folder)
        .args(options)
        .args(wheels)
        .status()
        .context("cannot run python3")?;
    ensure!(installed.success(), "pip: {installed}");
    fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))
}
