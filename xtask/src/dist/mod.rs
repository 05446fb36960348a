//! `cargo xtask dist`: what a release has beside the programs and libraries.

mod sbom;

use crate::target_folder;
use anyhow::{Context, Result};
use std::{fs, path::PathBuf};

const HELP: &str = "\
Make what accompanies a release: the SBOM, in CycloneDX 1.5 (JSON)

Usage: cargo xtask dist [OPTIONS]

Options:
      --out FOLDER  where to [default: the folder dist of the target folder]
  -h, --help        show this

Files: doorbell-VERSION.cdx.json, the packages that the programs and libraries are built from, with
versions, licences, SHA-256 and dependencies. The same sources give the same bytes.

Exit status: 0, or 2 for an error.
";

/// The command-line form. Returns the exit status.
pub(crate) fn main(mut arguments: lexopt::Parser) -> Result<u8> {
    use lexopt::prelude::*;
    let mut out = None;
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('h') | Long("help") => {
                print!("{HELP}");
                return Ok(0);
            }
            Long("out") => out = Some(PathBuf::from(arguments.value()?)),
            other => return Err(other.unexpected().into()),
        }
    }
    let out = match out {
        Some(out) => out,
        None => target_folder()?.join("dist"),
    };
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    let (version, text) = sbom::make()?;
    let file = out.join(format!("doorbell-{version}.cdx.json"));
    fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    println!("{}", file.display());
    Ok(0)
}
