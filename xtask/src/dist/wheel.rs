//! A wheel: <https://packaging.python.org/en/latest/specifications/binary-distribution-format/>.

use super::{
    build::Built,
    content::{File, library, read},
};
use crate::workspace;
use anyhow::{Result, ensure};
use sha2::{Digest, Sha256};
use std::io::{Cursor, Write};
use zip::{CompressionMethod, DateTime, ZipWriter, write::SimpleFileOptions};

const PACKAGE: &str = "doorbell_rdma";
const MODULES: [&str; 8] = [
    "__init__.py",
    "__init__.pyi",
    "__main__.py",
    "_c10d.py",
    "_run.py",
    "py.typed",
    "pytest_plugin.py",
    "torch.py",
];

/// By the name that Python imports: of the stable ABI of CPython.
const EXTENSION: &str = "_native.abi3.so";
/// The lowest version of that ABI, which the crate's feature `abi3-py39` selects.
const ABI: &str = "cp39-abi3";

const ENTRY_POINTS: &str = "\
[console_scripts]
doorbell = doorbell_rdma.__main__:main

[pytest11]
doorbell = doorbell_rdma.pytest_plugin

[torch.backends]
doorbell = doorbell_rdma.torch:register
";

/// The places of an installation's files in the package; the command finds the libraries beside it.
const PLACES: [(&str, &str); 4] = [
    ("bin/", "doorbell_rdma/bin/"),
    ("lib/doorbell/", "doorbell_rdma/lib/doorbell/"),
    ("share/doc/doorbell/LICENSE", "licenses/LICENSE"),
    ("share/doc/doorbell/THIRD-PARTY", "licenses/THIRD-PARTY"),
];

/// `installed` are the files of the command's installation.
pub(super) fn make(version: &str, built: &Built, installed: &[File]) -> Result<(String, Vec<u8>)> {
    let machine = built.target.split('-').next().unwrap_or_default();
    let tag = format!("{ABI}-manylinux_{}_{}_{machine}", built.glibc.0, built.glibc.1);
    let info = format!("{PACKAGE}-{version}.dist-info");
    let sources = workspace().join("bindings/python");
    let mut files = Vec::new();
    for module in MODULES {
        let path = format!("{PACKAGE}/{module}");
        let bytes = read(&sources.join(&path))?;
        files.push(File::new(path, bytes));
    }
    let extension = read(&built.extension)?;
    files.push(File::new(format!("{PACKAGE}/{EXTENSION}"), extension));
    for file in installed.iter().chain([&library(&built.nccl)?]) {
        let place = PLACES
            .iter()
            .find_map(|(from, to)| Some(format!("{to}{}", file.path.strip_prefix(from)?)));
        if let Some(place) = place {
            let path = if place.starts_with(PACKAGE) {
                place
            } else {
                format!("{info}/{place}")
            };
            files.push(File { path, ..file.clone() });
        }
    }
    let readme = String::from_utf8(read(&sources.join("README.md"))?)?;
    files.push(File::new(format!("{info}/METADATA"), metadata(version, &readme)));
    files.push(File::new(
        format!("{info}/WHEEL"),
        format!("Wheel-Version: 1.0\nGenerator: xtask\nRoot-Is-Purelib: false\nTag: {tag}\n"),
    ));
    files.push(File::new(format!("{info}/entry_points.txt"), ENTRY_POINTS));
    let record = record(&files, &info);
    files.push(File::new(format!("{info}/RECORD"), record));
    Ok((format!("{PACKAGE}-{version}-{tag}.whl"), zip(&files)?))
}

fn metadata(version: &str, readme: &str) -> String {
    format!(
        "Metadata-Version: 2.4\nName: doorbell-rdma\nVersion: {version}\n\
         Summary: RDMA without an adapter: collectives on arrays, the doorbell command, a pytest plugin, a backend of PyTorch\n\
         License-Expression: MIT OR Apache-2.0\nLicense-File: LICENSE-APACHE\nLicense-File: LICENSE-MIT\n\
         License-File: THIRD-PARTY\nKeywords: rdma,infiniband,roce,verbs,collectives,testing\n\
         Classifier: Framework :: Pytest\nClassifier: Programming Language :: Python :: 3 :: Only\nClassifier: Operating System :: POSIX :: Linux\n\
         Requires-Python: >=3.9\nDescription-Content-Type: text/markdown\n\n{readme}"
    )
}

/// The hash and size of each file, and at last the record's own line, without them.
fn record(files: &[File], info: &str) -> String {
    let mut record = String::new();
    for file in files {
        let hash = base64_url(&Sha256::digest(&file.bytes));
        record += &format!("{},sha256={hash},{}\n", file.path, file.bytes.len());
    }
    record + &format!("{info}/RECORD,,\n")
}

/// RFC 4648, section 5, without padding.
fn base64_url(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let mut word = [0; 4];
        word[1..=group.len()].copy_from_slice(group);
        let word = u32::from_be_bytes(word);
        for digit in 0..=group.len() {
            text.push(char::from(DIGITS[(word >> (18 - 6 * digit)) as usize & 63]));
        }
    }
    text
}

fn zip(files: &[File]) -> Result<Vec<u8>> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for file in files {
        ensure!(!file.path.starts_with('/'), "{} is absolute", file.path);
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Deflated)
            .compression_level(Some(9))
            .last_modified_time(DateTime::default())
            .unix_permissions(file.mode());
        zip.start_file(&file.path, options)?;
        zip.write_all(&file.bytes)?;
    }
    Ok(zip.finish()?.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors of RFC 4648, section 10, without their padding, and the two last digits.
    #[test]
    fn hashes_are_in_base64_for_urls() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg"),
            ("fo", "Zm8"),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg"),
        ] {
            assert_eq!(base64_url(bytes.as_bytes()), text);
        }
        assert_eq!(base64_url(&[0xfb, 0xff]), "-_8");
    }
}
