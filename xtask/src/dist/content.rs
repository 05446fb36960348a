//! What an installation consists of, by path below its prefix.

use super::{build::Built, notices};
use crate::workspace;
use anyhow::{Context, Result, ensure};
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

/// A file of a package.
#[derive(Debug, Clone)]
pub(super) struct File {
    /// Below the prefix, without a leading slash.
    pub(super) path: String,
    pub(super) executable: bool,
    pub(super) bytes: Vec<u8>,
}

impl File {
    pub(super) fn new(path: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Self {
        File {
            path: path.into(),
            executable: false,
            bytes: bytes.into(),
        }
    }

    pub(super) fn mode(&self) -> u32 {
        if self.executable { 0o755 } else { 0o644 }
    }
}

const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/doorbell"),
    ("zsh", "share/zsh/site-functions/_doorbell"),
    ("fish", "share/fish/vendor_completions.d/doorbell.fish"),
];

const TEXTS: [&str; 3] = ["LICENSE-APACHE", "LICENSE-MIT", "README.md"];

/// All files, in the order of their paths.
pub(super) fn all(built: &Built) -> Result<Vec<File>> {
    let mut files = vec![File {
        executable: true,
        ..File::new("bin/doorbell", read(&built.program)?)
    }];
    for library in &built.libraries {
        let name = library.file_name().unwrap_or_default().to_string_lossy();
        files.push(File::new(format!("lib/doorbell/{name}"), read(library)?));
    }
    for (shell, path) in COMPLETIONS {
        files.push(File::new(path, output(built, &["completions", shell])?));
    }
    files.extend(manual(built)?);
    for text in TEXTS {
        files.push(File::new(
            format!("share/doc/doorbell/{text}"),
            read(&workspace().join(text))?,
        ));
    }
    files.push(File::new("share/doc/doorbell/THIRD-PARTY", notices::make()?));
    files.sort_by(|a, b| a.path.cmp(&b.path));
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
    let output = Command::new(&built.program)
        .args(arguments)
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", built.program.display()))?;
    ensure!(
        output.status.success(),
        "doorbell {}: {}",
        arguments.join(" "),
        output.status
    );
    Ok(output.stdout)
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}
