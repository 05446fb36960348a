//! What programs that run others need of the machine: a folder of outputs and free TCP ports.

use anyhow::{Result, bail};
use std::{
    fs,
    net::{Ipv4Addr, Ipv6Addr, TcpListener},
    ops::Range,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU16, Ordering},
};

/// Lines of a program's output that are shown of a failed row.
const SHOWN: usize = 30;

/// A folder of outputs, removed at the end, and TCP ports, each used once.
#[derive(Debug)]
pub struct Scratch {
    folder: tempfile::TempDir,
    ports: Range<u16>,
    next: AtomicU16,
}

impl Scratch {
    /// Makes the folder. The ports are below the ephemeral range.
    pub fn new(name: &str, ports: Range<u16>) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix(&format!("{name}-")).tempdir()?;
        // Programs run as user 65534, which must be able to enter.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        let next = AtomicU16::new(ports.start);
        Ok(Self { folder, ports, next })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// A folder for one row, which user 65534 may write.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.folder.path().join(name);
        fs::create_dir_all(&folder)?;
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777))?;
        Ok(folder)
    }

    /// A free TCP port, not used by another row.
    pub fn port(&self) -> Result<u16> {
        self.ports(1)
    }

    /// The first of so many successive free TCP ports, not used by another row.
    pub fn ports(&self, count: u16) -> Result<u16> {
        loop {
            let first = self.next.fetch_add(count, Ordering::Relaxed);
            if !self.ports.contains(&(first + count - 1)) {
                bail!("no TCP ports of {:?} are left", self.ports);
            }
            if (first..first + count).all(is_free) {
                return Ok(first);
            }
        }
    }

    /// The last lines of the output of a row's processes.
    pub fn outputs(&self, folder: &str, processes: &[&str]) -> String {
        let output = |process: &&str| {
            let file = self.path().join(folder).join(process).with_extension("log");
            let text = fs::read(file).unwrap_or_default();
            indented(&format!("{process}: "), &String::from_utf8_lossy(&text))
        };
        processes.iter().map(output).collect()
    }
}

fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
        .is_ok()
}

/// The last lines of a program's output, indented below its row.
pub fn indented(process: &str, text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let shown = &lines[lines.len().saturating_sub(SHOWN)..];
    shown.iter().map(|line| format!("    {process}{line}\n")).collect()
}
