//! What the packages of a Python command bring: copies of the drop-in's libraries under names of
//! their own, and NCCL (docs/decisions/080-libraries-of-wheels.md).

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::{Variable, python};

/// What was found.
#[derive(Debug, Default)]
pub(super) struct Brought {
    /// The names of the copies, such as `libibverbs-1de1263b.so.1.14.48.0`.
    pub(super) copies: Vec<String>,
    /// An NCCL that crashes on devices that are not mlx5.
    crashing: Option<PathBuf>,
}

pub(super) fn by(name: &OsStr, arguments: &[OsString]) -> Brought {
    let packages = python::import_folders(name, arguments);
    let mut copies: Vec<String> = packages.iter().flat_map(|folder| copies_in(folder)).collect();
    copies.sort();
    copies.dedup();
    let loaded = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let loaded = env::split_paths(&loaded).map(|folder| folder.join(NCCL));
    let of_packages = packages.iter().map(|folder| folder.join("nvidia/nccl/lib").join(NCCL));
    let crashing = loaded.chain(of_packages).find(|file| crashes(file).unwrap_or(false));
    Brought { copies, crashing }
}

impl Brought {
    /// The variables against what crashes, each with a line on stderr.
    pub(super) fn variables(&self) -> Vec<Variable> {
        const GIN: &str = "NCCL_GIN_TYPE";
        let Some(file) = self.crashing.as_ref().filter(|_| env::var_os(GIN).is_none()) else {
            return Vec::new();
        };
        eprintln!(
            "doorbell: NCCL {CRASHING} crashes on devices that are not mlx5: {GIN}=0 is set, for {}",
            file.display()
        );
        vec![(GIN, "0".into())]
    }
}

/// The copies in `PACKAGE.libs` of an import folder, where auditwheel puts them: their names have a
/// part of their hash.
fn copies_in(packages: &Path) -> Vec<String> {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries(packages).filter(|entry| entry.path().extension() == Some(OsStr::new("libs")));
    let files = folders.flat_map(|folder| entries(&folder.path()).collect::<Vec<_>>());
    let names = files.filter_map(|file| file.file_name().into_string().ok());
    names.filter(|name| is_copy(name)).collect()
}

fn is_copy(name: &str) -> bool {
    ["libibverbs-", "librdmacm-", "libmlx5-"].iter().any(|library| {
        let rest = name.strip_prefix(library).and_then(|rest| rest.split_once(".so"));
        rest.is_some_and(|(hash, _)| hash.bytes().all(|byte| byte.is_ascii_alphanumeric()))
    })
}

const NCCL: &str = "libnccl.so.2";

/// The version whose network plugin keeps an invalid pointer for an IB device that is not mlx5.
const CRASHING: &str = "2.28.9";

/// Whether a library is this NCCL, which its text of the version shows. Reads up to that text: most
/// of the library, its kernels, lies after it.
fn crashes(file: &Path) -> io::Result<bool> {
    const BEFORE: &[u8] = b"NCCL version ";
    let longest = BEFORE.len() + CRASHING.len() + 1;
    let mut file = File::open(file)?;
    let mut window = Vec::new();
    loop {
        let read = file.by_ref().take(1 << 20).read_to_end(&mut window)?;
        let mut found = window.windows(longest).filter_map(|text| text.strip_prefix(BEFORE));
        if let Some(version) = found.find(|version| version[0].is_ascii_digit()) {
            let rest = version.strip_prefix(CRASHING.as_bytes());
            return Ok(rest.is_some_and(|rest| !rest[0].is_ascii_digit()));
        }
        if read == 0 {
            return Ok(false);
        }
        window.drain(..window.len().saturating_sub(longest - 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_have_names_with_a_hash() {
        for copy in [
            "libibverbs-1de1263b.so.1.14.48.0",
            "librdmacm-0a.so.1",
            "libmlx5-6b6ea1b7.so",
        ] {
            assert!(is_copy(copy), "{copy}");
        }
        for other in [
            "libibverbs.so.1",
            "libibverbs-1de1263b.a",
            "libibverbs-a:b.so.1",
            "libmlx4-1de1263b.so.1",
        ] {
            assert!(!is_copy(other), "{other}");
        }
    }

    #[test]
    fn the_version_is_found_anywhere_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(NCCL);
        let of = |at: usize, text: &str| {
            let mut bytes = b"NCCL version %s".repeat(at / 15);
            bytes.resize(at, 0);
            bytes.extend(text.bytes());
            bytes.extend([0; 100]);
            fs::write(&file, bytes).unwrap();
            crashes(&file).unwrap()
        };
        for at in [0, (1 << 20) - 20, (1 << 20) - 8, 3 << 20] {
            assert!(of(at, "NCCL version 2.28.9+cuda13.0"), "{at}");
        }
        for other in [
            "NCCL version 2.28.91+cuda13.0",
            "NCCL version 2.28.7+cuda12.8",
            "2.28.9",
        ] {
            assert!(!of(5, other), "{other}");
        }
        assert!(crashes(&folder.path().join("none")).is_err());
    }
}
