//! Where the drop-in library is: beside this program after a build, in `../lib/doorbell` after an installation, or where `DOORBELL_LIBRARY_DIR` says.

use std::env;
use std::path::PathBuf;

use crate::dropin::own;
use crate::failure::Failure;

/// The library's file.
pub(crate) const FILE: &str = "libdoorbell_dropin.so";
/// The names under which programs ask for it.
pub(crate) const NAMES: [&str; 4] = ["libibverbs.so.1", "libibverbs.so", "librdmacm.so.1", "librdmacm.so"];

/// The folder that has the library.
///
/// # Errors
/// [`Failure::NotRun`] when there is none.
pub(crate) fn find() -> Result<PathBuf, Failure> {
    if let Some(folder) = env::var_os("DOORBELL_LIBRARY_DIR").filter(|folder| !folder.is_empty()) {
        let folder = PathBuf::from(folder);
        return match folder.join(FILE).canonicalize() {
            Ok(_) => folder
                .canonicalize()
                .map_err(|e| own(format!("{}: {e}", folder.display()))),
            Err(e) => Err(own(format!(
                "DOORBELL_LIBRARY_DIR: {}: {e}",
                folder.join(FILE).display()
            ))),
        };
    }
    let program = env::current_exe().map_err(|e| own(format!("cannot tell where this program is: {e}")))?;
    let beside = program.parent().map(PathBuf::from).unwrap_or_default();
    [beside.clone(), beside.join("../lib/doorbell")]
        .into_iter()
        .find(|folder| folder.join(FILE).is_file())
        .and_then(|folder| folder.canonicalize().ok())
        .ok_or_else(|| {
            own(format!(
                "{FILE} is neither in {0} nor in {0}/../lib/doorbell: build it with cargo build --release, or set DOORBELL_LIBRARY_DIR",
                beside.display()
            ))
        })
}
