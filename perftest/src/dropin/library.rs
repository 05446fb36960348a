//! Finds the drop-in library: beside this program after a build, in `../lib/doorbell` after an
//! installation, or in `DOORBELL_LIBRARY_DIR`; else in this program.

use std::env;
use std::path::{Path, PathBuf};

use crate::dropin::{embedded, own};
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

/// # Errors
/// [`Failure::NotRun`] when there is none.
pub(crate) fn find(with_sysfs: bool) -> Result<PathBuf, Failure> {
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
        return Ok(folder);
    }
    if !is_chosen && let Some(unpacked) = embedded::find() {
        return unpacked.map_err(own);
    }
    let folders: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
    Err(own(format!(
        "no {} in {}: build the libraries with cargo build --release, or set DOORBELL_LIBRARY_DIR to where they are",
        wanted.join(" and "),
        folders.join(" or ")
    )))
}
