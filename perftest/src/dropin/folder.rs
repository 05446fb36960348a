//! The folder that stands before the system's libraries: a temporary one for `doorbell run`, a lasting one of the user's for `doorbell env`.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::{env, process};

use nix::unistd::Uid;
use tempfile::TempDir;

use super::{Variable, before, library};

/// Others may read: the command may become another user, who needs the libraries too.
const MODE: u32 = 0o755;

/// A folder for one command, gone when it is dropped. Nobody else can write to it: a library that another user put there would run as us.
pub(crate) fn temporary() -> Result<TempDir, String> {
    tempfile::Builder::new().prefix("doorbell-run-").tempdir().map_err(|e| {
        format!(
            "cannot make a folder in {}: {e}; set TMPDIR to one that can be written",
            env::temp_dir().display()
        )
    })
}

/// The user's own folder, the same one every time: in `XDG_RUNTIME_DIR`, or else where temporary files are.
pub(crate) fn lasting() -> Result<PathBuf, String> {
    let user = Uid::current();
    let runtime = env::var_os("XDG_RUNTIME_DIR")
        .map(PathBuf::from)
        .filter(|folder| folder.is_dir());
    let folder = runtime.map_or_else(
        || env::temp_dir().join(format!("doorbell-{user}")),
        |runtime| runtime.join("doorbell"),
    );
    let cannot = |e: io::Error| {
        format!(
            "cannot make {}: {e}; set TMPDIR to a folder that can be written",
            folder.display()
        )
    };
    match DirBuilder::new().mode(MODE).create(&folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(cannot(e)),
        _ => {}
    }
    let there = fs::symlink_metadata(&folder).map_err(cannot)?;
    if !there.is_dir() || there.uid() != user.as_raw() || there.mode() & 0o022 != 0 {
        return Err(format!(
            "{} is another's, or others can write to it: remove it, or set TMPDIR to another folder",
            folder.display()
        ));
    }
    Ok(folder)
}

/// Puts the links into the folder and gives the variables that make programs look there. What is there already stays right while it is replaced.
pub(crate) fn fill(folder: &Path, libraries: &Path) -> io::Result<Vec<Variable>> {
    let folder = folder.canonicalize()?;
    let links = folder.join("lib");
    match fs::create_dir(&links) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    for name in library::NAMES {
        let new = links.join(format!(".{name}-{}", process::id()));
        symlink(libraries.join(library::FILE), &new)?;
        fs::rename(&new, links.join(name))?;
    }
    Ok(vec![("LD_LIBRARY_PATH", before(&links, "LD_LIBRARY_PATH"))])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_can_be_filled_twice() {
        let folder = temporary().unwrap();
        let path = folder.path().canonicalize().unwrap();
        for libraries in ["/first", "/second"] {
            let variables = fill(folder.path(), Path::new(libraries)).unwrap();
            assert_eq!(variables[0].0, "LD_LIBRARY_PATH");
            let link = fs::read_link(path.join("lib/libibverbs.so.1")).unwrap();
            assert_eq!(link, Path::new(libraries).join(library::FILE));
        }
        assert_eq!(fs::read_dir(path.join("lib")).unwrap().count(), library::NAMES.len());
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o022, 0);
    }
}
