//! Debian's package tools: download without installing, and install when running as root.

use anyhow::{Context, Result, bail};
use std::{
    path::Path,
    process::{Command, Output, Stdio},
};

pub(crate) fn is_available() -> bool {
    Command::new("apt-get")
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success())
}

pub(crate) fn is_root() -> bool {
    Command::new("id")
        .arg("-u")
        .output()
        .is_ok_and(|output| output.stdout == b"0\n")
}

/// Installs packages; root only. Refreshes the package lists and retries when the first attempt
/// fails: a fresh container has no lists, and a stale list names files that are gone.
pub(crate) fn install(packages: &[&str]) -> Result<()> {
    let attempt = || {
        apt_get(
            &[
                "install",
                "--yes",
                "--no-install-recommends",
                "-o",
                "DPkg::Lock::Timeout=300",
            ],
            packages,
        )
    };
    if attempt().is_ok() {
        return Ok(());
    }
    update()?;
    attempt().with_context(|| format!("apt-get cannot install {}", packages.join(" ")))
}

/// Downloads packages (`NAME` or `NAME=VERSION`) into a folder; needs no root.
pub(crate) fn download(packages: &[String], folder: &Path) -> Result<()> {
    with_fresh_lists(|| {
        let output = Command::new("apt-get")
            .args(["--quiet", "download"])
            .args(packages)
            .current_dir(folder)
            .output()
            .context("cannot run apt-get")?;
        checked(output, "apt-get download").map(drop)
    })
}

/// The missing packages, with versions, that installing `packages` requires, themselves included.
pub(crate) fn lacking(packages: &[&str]) -> Result<Vec<String>> {
    with_fresh_lists(|| {
        let output = Command::new("apt-get")
            .args(["--simulate", "--no-install-recommends", "install"])
            .args(packages)
            .env("LC_ALL", "C")
            .output()
            .context("cannot run apt-get")?;
        Ok(installations(&checked(output, "apt-get --simulate install")?))
    })
}

/// The package with the kernel of Debian's release: what `linux-image-amd64` depends on.
pub(crate) fn kernel_package() -> Result<String> {
    with_fresh_lists(|| {
        let output = Command::new("apt-cache")
            .args(["depends", "linux-image-amd64"])
            .env("LC_ALL", "C")
            .output()
            .context("cannot run apt-cache (the guest is made from Debian's packages)")?;
        dependency(&checked(output, "apt-cache depends")?)
            .context("linux-image-amd64 names no kernel (the guest needs a Debian release and its package lists)")
    })
}

/// The version that `apt-get download` fetches.
pub(crate) fn candidate(package: &str) -> Result<String> {
    let output = Command::new("apt-cache")
        .args(["policy", package])
        .env("LC_ALL", "C")
        .output()?;
    let text = checked(output, "apt-cache policy")?;
    let version = text.lines().find_map(|line| line.trim().strip_prefix("Candidate: "));
    Ok(version.context("the kernel package has no version")?.to_owned())
}

/// Runs `attempt`, once more after `apt-get update` when it fails and we are root.
fn with_fresh_lists<T>(attempt: impl Fn() -> Result<T>) -> Result<T> {
    match attempt() {
        Err(_) if is_root() => {
            update()?;
            attempt()
        }
        Err(error) => Err(error.context("try `apt-get update` as root first")),
        done => done,
    }
}

fn update() -> Result<()> {
    apt_get(&["update", "-o", "DPkg::Lock::Timeout=300"], &[])
}

fn apt_get(options: &[&str], packages: &[&str]) -> Result<()> {
    let output = Command::new("apt-get")
        .arg("--quiet")
        .args(options)
        .args(packages)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .output()
        .context("cannot run apt-get")?;
    checked(output, &format!("apt-get {}", options[0])).map(drop)
}

fn checked(output: Output, what: &str) -> Result<String> {
    if !output.status.success() {
        bail!("{what} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// `NAME=VERSION` from lines such as `Inst perftest (4.5+0.17-1 Debian:12.15/oldstable [amd64])`.
/// The version to be replaced, if any, precedes the parenthesis in brackets.
fn installations(simulation: &str) -> Vec<String> {
    let installation = |line: &str| {
        let rest = line.strip_prefix("Inst ")?;
        let name = rest.split_whitespace().next()?;
        let version = rest.split_once('(')?.1.split_whitespace().next()?;
        Some(format!("{name}={version}"))
    };
    simulation.lines().filter_map(installation).collect()
}

fn dependency(listing: &str) -> Option<String> {
    listing
        .lines()
        .find_map(|line| line.trim().strip_prefix("Depends: "))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installations_are_read_from_a_simulation() {
        let text = "Reading package lists...\n\
            Inst libmnl0 (1.0.4-3 Debian:12.15/oldstable [amd64])\n\
            Inst libc6 [2.36-9] (2.36-9+deb12u13 Debian:12.15/oldstable [amd64])\n\
            Conf libmnl0 (1.0.4-3 Debian:12.15/oldstable [amd64])\n";
        assert_eq!(installations(text), ["libmnl0=1.0.4-3", "libc6=2.36-9+deb12u13"]);
    }

    #[test]
    fn the_kernel_package_is_the_dependency_of_the_metapackage() {
        assert_eq!(
            dependency("linux-image-amd64\n  Depends: linux-image-6.1.0-9-amd64\n").unwrap(),
            "linux-image-6.1.0-9-amd64"
        );
        assert_eq!(dependency("linux-image-amd64\n"), None);
    }
}
