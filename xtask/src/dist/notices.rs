//! The licence texts of what the programs are built from, which most of them require to be passed
//! on.

use super::sbom;
use anyhow::{Context, Result};
use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path};

const NAMES: [&str; 4] = ["LICENSE", "LICENCE", "COPYING", "NOTICE"];

/// Each text once, below the packages that have it.
pub(super) fn make() -> Result<String> {
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut head = "The programs and libraries of Doorbell are built from these packages:\n\n".to_owned();
    for package in sbom::foreign()? {
        let _ = writeln!(head, "{}: {}", package.name, package.licence);
        for text in texts_in(&package.folder)? {
            texts.entry(text).or_default().push(package.name.clone());
        }
    }
    let mut texts: Vec<_> = texts.into_iter().map(|(text, packages)| (packages, text)).collect();
    texts.sort();
    for (packages, text) in texts {
        let _ = write!(head, "\n\n{:=<80}\n{}\n\n{text}\n", "", packages.join(", "));
    }
    Ok(head)
}

fn texts_in(folder: &Path) -> Result<Vec<String>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        if path.is_file() && NAMES.iter().any(|start| name.starts_with(start)) {
            paths.push(path);
        }
    }
    paths.sort();
    let text = |path: &std::path::PathBuf| {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(String::from_utf8_lossy(&bytes).trim().replace("\r\n", "\n"))
    };
    paths.iter().map(text).collect()
}
