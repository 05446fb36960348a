//! The committed archives of PTX and machine code and their manifest; the format is in
//! doorbell-cuda's `kernels`.

use super::{CODE, VERSION, source, tools};
use crate::workspace;
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::{collections::BTreeMap, fs, path::PathBuf};

/// zlib's best compression.
const LEVEL: u8 = 10;

/// Members of an archive by name.
pub(super) type Members = BTreeMap<String, Vec<u8>>;

pub(super) fn pack(files: &Members) -> Vec<u8> {
    let mut archive = Vec::new();
    for (name, bytes) in files {
        let stream = miniz_oxide::deflate::compress_to_vec_zlib(bytes, LEVEL);
        archive.extend(format!("{name} {}\n", stream.len()).into_bytes());
        archive.extend(stream);
    }
    archive
}

/// The files of an archive by name, as far as it can be read.
pub(super) fn unpack(mut archive: &[u8]) -> Members {
    let mut files = BTreeMap::new();
    while let Some((name, bytes, rest)) = first(archive) {
        files.insert(name, bytes);
        archive = rest;
    }
    files
}

fn first(archive: &[u8]) -> Option<(String, Vec<u8>, &[u8])> {
    let end = archive.iter().position(|byte| *byte == b'\n')?;
    let (name, len) = str::from_utf8(&archive[..end]).ok()?.split_once(' ')?;
    let (stream, rest) = archive[end + 1..].split_at_checked(len.parse().ok()?)?;
    let bytes = miniz_oxide::inflate::decompress_to_vec_zlib(stream).ok()?;
    Some((name.to_owned(), bytes, rest))
}

/// What the archives were built from and with.
pub(super) fn manifest(ptx: &Members, code: &Members) -> Result<String> {
    let mut lines = vec![
        "# Written by `cargo xtask kernels`; compared by `cargo xtask kernels --check`.".to_owned(),
        format!("compiler {}", tools::COMPILER),
        format!(
            "ptx {}, target sm_90; machine code for {}; sources also assembled for sm_80",
            VERSION.trim_start_matches(".version "),
            CODE.join(" and ")
        ),
    ];
    let mut headers = fs::read_dir(workspace().join("gpudirect/cuda/kernels"))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>>>()?;
    headers.retain(|path| path.extension().is_some_and(|extension| extension == "cuh"));
    headers.sort();
    lines.push(format!("headers sha256:{}", digest(&headers)?));
    for (name, ptx) in ptx {
        lines.push(format!(
            "{name} source sha256:{} ptx sha256:{} bytes {} kernels {}",
            digest(&[workspace().join(source(name))])?,
            hex(Sha256::digest(ptx)),
            ptx.len(),
            String::from_utf8_lossy(ptx).matches(".visible .entry ").count()
        ));
    }
    for (name, code) in code {
        lines.push(format!(
            "{name} sha256:{} bytes {}",
            hex(Sha256::digest(code)),
            code.len()
        ));
    }
    Ok(lines.join("\n") + "\n")
}

fn digest(paths: &[PathBuf]) -> Result<String> {
    let mut hash = Sha256::new();
    for path in paths {
        hash.update(fs::read(path).with_context(|| format!("cannot read {}", path.display()))?);
    }
    Ok(hex(hash.finalize()))
}

fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_are_unpacked_as_far_as_they_are_whole() {
        let member = |name: &str| (name.to_owned(), format!("text of {name}").into_bytes());
        let files = Members::from(["a", "b"].map(member));
        let packed = pack(&files);
        assert_eq!(unpack(&packed), files);
        assert_eq!(unpack(&packed[..packed.len() - 1]).len(), 1);
        assert!(unpack(b"").is_empty());
    }
}
