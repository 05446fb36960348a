//! Finds the drop-in library: beside this program after a build, in `../lib/doorbell` after an
//! installation, or in `DOORBELL_LIBRARY_DIR`; else in this program.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::{env, fs, io, process};

use crate::cli::DropinArgs;
use crate::dropin::embedded::{self, EmbeddedLibrary};
use crate::dropin::own;
use crate::failure::Failure;

pub(crate) const FILE: &str = "libdoorbell_dropin.so";
/// The library that presents the devices in sysfs.
pub(crate) const SYSFS: &str = "libdoorbell_sysfs.so";
/// NCCL's C API. Its DT_SONAME is `libnccl.so.2`, so that once it is loaded no program loads
/// another.
pub(crate) const NCCL: &str = "libdoorbell_nccl.so";
/// The names under which programs load it.
pub(crate) const NAMES: [&str; 6] = [
    "libibverbs.so.1",
    "libibverbs.so",
    "librdmacm.so.1",
    "librdmacm.so",
    "libmlx5.so.1",
    "libmlx5.so",
];

pub(crate) enum Libraries {
    /// In this folder.
    Installed(PathBuf),
    /// In this program, but for the `others`, which are files anywhere.
    Embedded {
        libraries: &'static [EmbeddedLibrary],
        others: Vec<PathBuf>,
    },
}

impl Libraries {
    /// Returns the folder that has them; where they are in this program, that is `folder`.
    pub(super) fn provide(&self, folder: &Path) -> io::Result<PathBuf> {
        match self {
            Self::Installed(installed) => Ok(installed.clone()),
            Self::Embedded { libraries, others } => {
                embedded::unpack(folder, libraries)?;
                for other in others {
                    let name = other.file_name().unwrap_or_default();
                    link(folder, &name.to_string_lossy(), other)?;
                }
                Ok(folder.to_owned())
            }
        }
    }
}

/// In place of an earlier link in this folder, which programs may be using.
pub(super) fn link(folder: &Path, name: &str, file: &Path) -> io::Result<()> {
    let new = folder.join(format!(".{name}-{}", process::id()));
    symlink(file, &new)?;
    fs::rename(&new, folder.join(name))
}

/// The libraries that every process loads at its start.
pub(super) fn preloaded(args: &DropinArgs) -> Vec<&'static str> {
    let all = [(SYSFS, !args.no_sysfs), (NCCL, args.nccl)];
    all.into_iter()
        .filter(|(_, is_used)| *is_used)
        .map(|(file, _)| file)
        .collect()
}

/// # Errors
/// [`Failure::NotRun`] when there is none.
pub(crate) fn find(preloaded: &[&'static str]) -> Result<Libraries, Failure> {
    let wanted = [&[FILE][..], preloaded].concat();
    let missing = |folder: &PathBuf| {
        let files = wanted.iter().filter(|file| !folder.join(file).is_file());
        files.copied().collect::<Vec<_>>()
    };
    let chosen = doorbell_trust::variable("DOORBELL_LIBRARY_DIR").filter(|folder| !folder.is_empty());
    let is_chosen = chosen.is_some();
    let folders = match chosen {
        Some(folder) => vec![PathBuf::from(folder)],
        None => {
            let program =
                env::current_exe().map_err(|e| own(format!("cannot determine where this program is: {e}")))?;
            let beside = program.parent().map(PathBuf::from).unwrap_or_default();
            let installed = beside.join("../lib/doorbell");
            vec![beside, installed]
        }
    };
    let found = folders.iter().find(|folder| missing(folder).is_empty());
    if let Some(folder) = found.and_then(|folder| folder.canonicalize().ok()) {
        return Ok(Libraries::Installed(folder));
    }
    let mut missing = folders.iter().map(missing).min_by_key(Vec::len).unwrap_or_default();
    if !is_chosen && let Some(libraries) = embedded::get() {
        missing = wanted;
        missing.retain(|file| libraries.iter().all(|library| library.name != *file));
        let installed = |file: &&str| {
            let mut places = folders.iter().map(|folder| folder.join(file));
            places.find_map(|place| place.canonicalize().ok())
        };
        if let Some(others) = missing.iter().map(installed).collect() {
            return Ok(Libraries::Embedded { libraries, others });
        }
    }
    let remedy = match missing[..] {
        [NCCL] => "install the package doorbell-nccl, build it with",
        _ => "build the libraries with",
    };
    let folders: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
    Err(own(format!(
        "no {} in {}: {remedy} cargo build --release, or set DOORBELL_LIBRARY_DIR to where the libraries are",
        missing.join(" and "),
        folders.join(" or ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As after `cargo install`, whose program has no such library in it.
    #[test]
    fn an_installed_library_is_beside_those_in_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let libraries = Libraries::Embedded {
            libraries: &[],
            others: vec!["/installed/libdoorbell_nccl.so".into()],
        };
        for _ in 0..2 {
            assert_eq!(libraries.provide(folder.path()).unwrap(), folder.path());
            let link = fs::read_link(folder.path().join(NCCL)).unwrap();
            assert_eq!(link, Path::new("/installed/libdoorbell_nccl.so"));
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
