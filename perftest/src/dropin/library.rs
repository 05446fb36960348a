//! Finds the drop-in library: beside this program after a build, in `../lib/doorbell` after an
//! installation, or in `DOORBELL_LIBRARY_DIR`; else in this program.

use std::path::{Path, PathBuf};
use std::{env, io};

use crate::dropin::embedded::{self, EmbeddedLibrary};
use crate::dropin::own;
use crate::failure::Failure;

pub(crate) const FILE: &str = "libdoorbell_dropin.so";
/// The library that presents the devices in sysfs.
pub(crate) const SYSFS: &str = "libdoorbell_sysfs.so";
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
    Embedded(&'static [EmbeddedLibrary]),
}

impl Libraries {
    /// Returns the folder that has them; where they are in this program, that is `folder`.
    pub(super) fn provide(&self, folder: &Path) -> io::Result<PathBuf> {
        match self {
            Self::Installed(installed) => Ok(installed.clone()),
            Self::Embedded(libraries) => embedded::unpack(folder, libraries).map(|()| folder.to_owned()),
        }
    }
}

/// # Errors
/// [`Failure::NotRun`] when there is none.
pub(crate) fn find(with_sysfs: bool) -> Result<Libraries, Failure> {
    let wanted: &[&str] = if with_sysfs { &[FILE, SYSFS] } else { &[FILE] };
    let missing = |folder: &Path| wanted.iter().find(|file| !folder.join(file).is_file());
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
    let found = folders.iter().find(|folder| missing(folder).is_none());
    if let Some(folder) = found.and_then(|folder| folder.canonicalize().ok()) {
        return Ok(Libraries::Installed(folder));
    }
    if !is_chosen && let Some(libraries) = embedded::get() {
        return Ok(Libraries::Embedded(libraries));
    }
    let folders: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
    Err(own(format!(
        "no {} in {}: build the libraries with cargo build --release, or set DOORBELL_LIBRARY_DIR to where they are",
        wanted.join(" and "),
        folders.join(" or ")
    )))
}
