//! `cargo xtask dist`: the packages of a release.

mod archive;
mod build;
mod check;
mod content;
mod deb;
mod notices;
mod sbom;
mod symbols;
mod wheel;

pub(crate) use check::check;

use crate::target_folder;
use anyhow::{Context, Result, ensure};
use content::Installation;
use sha2::{Digest, Sha256};
use std::{fs, path::PathBuf};

const HELP: &str = "\
Make the packages of a release

Usage: cargo xtask dist [OPTIONS]

Options:
      --out FOLDER  where to [default: the folder dist of the target folder]
  -h, --help        show this

Files, of which the same sources give the same bytes, wherever they are built:
  doorbell-VERSION-TARGET.tar.gz   the command, the drop-in libraries, completions, manual pages, licences
  doorbell_VERSION_ARCH.deb        the same for Debian and Ubuntu
  doorbell-nccl…                   the same two: NCCL's C API, for doorbell run --nccl
  libdoorbell…                     the same two: the C library, with its header and doorbell.pc
  doorbell_rdma-VERSION-….whl      for Python: the command, all drop-in libraries and NCCL's API, an extension
                                   module, a plugin for pytest
  doorbell-VERSION.cdx.json        SBOM in CycloneDX 1.5: what they are built from, with versions,
                                   licences, SHA-256 and dependencies
  SHA256SUMS                       for sha256sum --check

The programs need glibc 2.28 or newer. Building them takes pip, which brings the linker, and binutils.

Exit status: 0, or 2 for an error.
";

/// The file with the digests of the others.
const SUMS: &str = "SHA256SUMS";

/// What one may wait for on a slow line.
const TARBALL_BYTES: usize = 8_000_000;

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
    let mut packages = packages()?;
    packages.push((SUMS.to_owned(), sums(&packages).into_bytes()));
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    for (name, bytes) in packages {
        let file = out.join(name);
        fs::write(&file, &bytes).with_context(|| format!("cannot write {}", file.display()))?;
        println!("{:>9} {}", bytes.len(), file.display());
    }
    Ok(0)
}

/// By name.
fn packages() -> Result<Vec<(String, Vec<u8>)>> {
    let (version, bill) = sbom::make()?;
    let built = build::build()?;
    let installations = content::all(&built)?;
    let mut packages = Vec::new();
    for installation in &installations {
        packages.push(tarball(&version, &built.target, installation)?);
        packages.push(deb::make(&version, &built, installation)?);
    }
    packages.push(wheel::make(&version, &built, &installations[0].files)?);
    packages.push((format!("doorbell-{version}.cdx.json"), bill.into_bytes()));
    packages.sort();
    Ok(packages)
}

/// All in one folder, so that what is unpacked beside the command's is found by it.
fn tarball(version: &str, target: &str, of: &Installation) -> Result<(String, Vec<u8>)> {
    let name = format!("{}-{version}-{target}.tar.gz", of.name);
    let bytes = archive::tar_gz(&format!("doorbell-{version}-{target}/"), &of.files)?;
    ensure!(
        bytes.len() <= TARBALL_BYTES,
        "{name} has {} bytes, more than {TARBALL_BYTES}",
        bytes.len()
    );
    Ok((name, bytes))
}

/// In the form of sha256sum(1).
fn sums(packages: &[(String, Vec<u8>)]) -> String {
    let line = |(name, bytes): &(String, Vec<u8>)| {
        let digest: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{digest}  {name}\n")
    };
    packages.iter().map(line).collect()
}
