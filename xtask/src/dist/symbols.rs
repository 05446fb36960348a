//! The glibc that a program needs: the newest version of a symbol that it names.

use anyhow::{Context, Result, ensure};
use std::{fmt, path::Path, process::Command};

/// Of glibc: major and minor number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(pub(super) u32, pub(super) u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// What glibc consists of, beside which nothing is there for certain.
const GLIBC: [&str; 7] = [
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
];

/// # Errors
/// When it needs a library beside glibc's.
pub(super) fn needed(file: &Path) -> Result<Version> {
    let output = Command::new("objdump")
        .arg("-p")
        .arg(file)
        .output()
        .context("cannot run objdump (package binutils)")?;
    ensure!(output.status.success(), "objdump cannot read {}", file.display());
    let (version, libraries) = read(&String::from_utf8_lossy(&output.stdout));
    let others: Vec<_> = libraries
        .into_iter()
        .filter(|library| !GLIBC.contains(&library.as_str()))
        .collect();
    ensure!(others.is_empty(), "{} needs {}", file.display(), others.join(", "));
    version.with_context(|| format!("{} names no version of glibc", file.display()))
}

/// The newest version, and the libraries, in the private headers that objdump shows.
fn read(headers: &str) -> (Option<Version>, Vec<String>) {
    let libraries = headers
        .lines()
        .filter_map(|line| line.trim().strip_prefix("NEEDED").map(|name| name.trim().to_owned()));
    let versions = headers.split_whitespace().filter_map(|word| {
        let (major, minor) = word.strip_prefix("GLIBC_")?.split_once('.')?;
        // A third number is of versions before 2.4.
        let minor = minor.split('.').next()?;
        Some(Version(major.parse().ok()?, minor.parse().ok()?))
    });
    (versions.max(), libraries.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_is_by_number() {
        let headers = "Dynamic Section:\n  NEEDED               libm.so.6\n  NEEDED               libx.so.1\n\
            Version References:\n  required from libm.so.6:\n    0x09691a75 0x00 09 GLIBC_2.2.5\n\
            \x20   0x06969188 0x00 05 GLIBC_2.28\n    0x06969188 0x00 05 GLIBC_2.4\n";
        let (version, libraries) = read(headers);
        assert_eq!(version, Some(Version(2, 28)));
        assert_eq!(libraries, ["libm.so.6", "libx.so.1"]);
    }
}
