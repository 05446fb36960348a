//! What installations consist of, by path below their prefix.

use super::{build::Built, notices};
use crate::{
    ci::{stdout, succeed},
    target_folder, workspace,
};
use anyhow::{Context, Result};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// A file of a package.
#[derive(Debug, Clone)]
pub(super) struct File {
    /// Below the prefix, without a leading slash.
    pub(super) path: String,
    pub(super) kind: Kind,
    pub(super) bytes: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Plain,
    Executable,
    /// A symbolic link to this, without bytes.
    Link(PathBuf),
}

impl File {
    pub(super) fn new(path: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Self {
        File {
            path: path.into(),
            kind: Kind::Plain,
            bytes: bytes.into(),
        }
    }

    pub(super) fn mode(&self) -> u32 {
        match self.kind {
            Kind::Plain => 0o644,
            Kind::Executable => 0o755,
            Kind::Link(_) => 0o777,
        }
    }
}

/// What is installed together: an archive and a Debian package.
pub(super) struct Installation {
    pub(super) files: Vec<File>,
    /// The archive's name begins with this.
    pub(super) name: &'static str,
    pub(super) debian: Debian,
}

/// The fields of the Debian package that are its own.
pub(super) struct Debian {
    pub(super) package: &'static str,
    pub(super) section: &'static str,
    /// Others that it needs of this version.
    pub(super) depends: Option<&'static str>,
    pub(super) suggests: Option<&'static str>,
    pub(super) description: &'static str,
}

const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/doorbell"),
    ("zsh", "share/zsh/site-functions/_doorbell"),
    ("fish", "share/fish/vendor_completions.d/doorbell.fish"),
];

const LICENCES: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];

/// All installations; the command's is the first.
pub(super) fn all(built: &Built) -> Result<[Installation; 3]> {
    let notices = notices::make()?;
    let documented = |mut files: Vec<File>, package, sources: &str| {
        for text in LICENCES {
            let bytes = read(&workspace().join(text))?;
            files.push(File::new(format!("share/doc/{package}/{text}"), bytes));
        }
        let readme = read(&workspace().join(sources).join("README.md"))?;
        files.push(File::new(format!("share/doc/{package}/README.md"), readme));
        files.push(File::new(
            format!("share/doc/{package}/THIRD-PARTY"),
            notices.as_bytes(),
        ));
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok::<_, anyhow::Error>(files)
    };
    Ok([
        Installation {
            files: documented(command(built)?, "doorbell", "")?,
            name: "doorbell",
            debian: Debian {
                package: "doorbell",
                section: "net",
                depends: None,
                suggests: Some("doorbell-nccl, ibverbs-utils, perftest, rdmacm-utils"),
                description: "\
RDMA tests, and a userspace RoCEv2 device for any program
 The command doorbell measures bandwidth and latency of RDMA, on adapters, on
 the kernel's software devices and on a userspace RoCEv2 device. It runs any
 program that is linked with libibverbs or librdmacm on the userspace device,
 without an adapter, a kernel module or root.",
            },
        },
        Installation {
            files: documented(vec![library(&built.nccl)?], "doorbell-nccl", "bindings/nccl")?,
            name: "doorbell-nccl",
            debian: Debian {
                package: "doorbell-nccl",
                section: "libs",
                depends: Some("doorbell"),
                suggests: None,
                description: "\
NCCL's C API over Doorbell's collectives on GPU memory
 A libnccl.so.2 for PyTorch, CuPy, JAX and other programs that link NCCL,
 which doorbell run --nccl puts in the place of theirs.",
            },
        },
        Installation {
            files: documented(c_library(built)?, "libdoorbell-dev", "bindings/c")?,
            name: "libdoorbell",
            debian: Debian {
                package: "libdoorbell-dev",
                section: "libdevel",
                depends: None,
                suggests: Some("pkg-config"),
                description: "\
C library for RDMA connections, userspace devices and collectives
 The library libdoorbell, shared and static, with doorbell.h and doorbell.pc:
 userspace RoCEv2 devices that need no adapter, connections by one call, and
 collectives on host memory that name the rank which failed.",
            },
        },
    ])
}

fn command(built: &Built) -> Result<Vec<File>> {
    let mut files = vec![File {
        kind: Kind::Executable,
        ..File::new("bin/doorbell", read(&built.program)?)
    }];
    for file in &built.libraries {
        files.push(library(file)?);
    }
    for (shell, path) in COMPLETIONS {
        files.push(File::new(path, output(built, &["completions", shell])?));
    }
    files.extend(manual(built)?);
    Ok(files)
}

/// A library that `doorbell run` finds from the place of its program.
pub(super) fn library(file: &Path) -> Result<File> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    Ok(File::new(format!("lib/doorbell/{name}"), read(file)?))
}

/// What its own script installs.
fn c_library(built: &Built) -> Result<Vec<File>> {
    let prefix = target_folder()?.join("dist-libdoorbell");
    if prefix.exists() {
        fs::remove_dir_all(&prefix)?;
    }
    let mut install = Command::new(workspace().join("bindings/c/install.sh"));
    succeed(install.args([&prefix, &built.folder]))?;
    let mut files = Vec::new();
    let mut folders = vec![prefix.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(&prefix)?.to_string_lossy().into_owned();
            files.push(match fs::read_link(&path) {
                Ok(target) => File {
                    kind: Kind::Link(target),
                    ..File::new(name, [])
                },
                Err(_) => File::new(name, read(&path)?),
            });
        }
    }
    Ok(files)
}

fn manual(built: &Built) -> Result<Vec<File>> {
    let folder = built.program.with_file_name("doorbell-man");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    output(built, &["man", &folder.to_string_lossy()])?;
    let pages = fs::read_dir(&folder)?.map(|page| {
        let path = page?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Ok(File::new(format!("share/man/man1/{name}"), read(&path)?))
    });
    pages.collect()
}

fn output(built: &Built, arguments: &[&str]) -> Result<Vec<u8>> {
    stdout(Command::new(&built.program).args(arguments).stdin(Stdio::null()))
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}
