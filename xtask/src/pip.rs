//! Pinned packages from PyPI, in folders of `target`.

use anyhow::{Context, Result, ensure};
use std::{fs, path::Path, process::Command};

/// Installs wheels into a folder, in place of others than these; `options` are more of pip's.
pub(crate) fn provide(folder: &Path, wheels: &[&str], options: &[&str]) -> Result<()> {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"])
        .args([
            "--no-deps",
            "--no-compile",
            "--only-binary=:all:",
            "--root-user-action=ignore",
        ])
        .arg("--target")
        .arg(folder)
        .args(options)
        .args(wheels);
    once(folder, wheels, &mut pip)
}

/// Writes files of a wheel, NAME==VERSION, into a folder, in place of others. pip downloads no more
/// of the wheel than has them.
pub(crate) fn provide_files(folder: &Path, wheel: &str, files: &[&str]) -> Result<()> {
    let mut pip = Command::new("python3");
    pip.args(["-c", include_str!("pip_files.py"), wheel]);
    pip.arg(folder).args(files);
    once(folder, &[&[wheel], files].concat(), &mut pip)
}

/// Fills a folder, unless it has what is wanted.
fn once(folder: &Path, wanted: &[&str], pip: &mut Command) -> Result<()> {
    let stamp = folder.join("doorbell-wheels.txt");
    let wanted = wanted.join("\n");
    if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    eprintln!("pip: installing {}", wanted.replace('\n', " "));
    let installed = pip.status().context("cannot run python3")?;
    ensure!(installed.success(), "pip: {installed}");
    fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))
}
