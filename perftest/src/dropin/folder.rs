//! The folder that precedes the system's libraries: a temporary one for `doorbell run`, a permanent
//! one per user for `doorbell env`.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, Permissions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::{env, mem, process};

use nix::unistd::{Uid, mkdtemp};

use super::sysfs::{Content, File};
use super::{Variable, after, before, library, owner};

/// World-readable: the command may become another user, who needs the libraries too.
const MODE: u32 = 0o755;

/// A folder that is removed with its content when dropped.
#[derive(Debug)]
pub(crate) struct TempDir(PathBuf);

impl TempDir {
    /// mkdtemp(3), with [`MODE`].
    fn create(parent: &Path, prefix: &str) -> io::Result<TempDir> {
        let template = parent.join([prefix, "XXXXXX"].concat()); // mkdtemp(3) replaces the six Xs
        let folder = TempDir(mkdtemp(&template)?);
        fs::set_permissions(folder.path(), Permissions::from_mode(MODE))?;
        Ok(folder)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Removes it now.
    pub(crate) fn close(mut self) -> io::Result<()> {
        fs::remove_dir_all(mem::take(&mut self.0))
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A folder for one command, removed when dropped. Only this user can write to it: a library placed
/// there by another user would run as this one.
pub(crate) fn temporary() -> Result<TempDir, String> {
    let first = env::temp_dir();
    let create = |parent: &Path| {
        owner::sweep(parent);
        let folder = TempDir::create(parent, owner::PREFIX)?;
        owner::add_self(folder.path()).map(|()| folder)
    };
    create(&first).or_else(|error| {
        // Of a read-only system these are often the only folders that can be written.
        let others = runtime().into_iter().chain([PathBuf::from("/dev/shm")]);
        let reason = format!(
            "cannot make a folder in {}: {error}; set TMPDIR to one that can be written",
            first.display()
        );
        others.into_iter().find_map(|parent| create(&parent).ok()).ok_or(reason)
    })
}

fn runtime() -> Option<PathBuf> {
    let folder = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    folder.filter(|folder| folder.is_dir())
}

/// The user's permanent folder: in `XDG_RUNTIME_DIR`, or else where temporary files are.
pub(crate) fn permanent() -> Result<PathBuf, String> {
    let user = Uid::current();
    let folder = runtime().map_or_else(
        || env::temp_dir().join(format!("doorbell-{user}")),
        |runtime| runtime.join("doorbell"),
    );
    let cannot = |e: io::Error| {
        format!(
            "cannot make {}: {e}; set TMPDIR to a folder that can be written",
            folder.display()
        )
    };
    if !is_own(&folder, MODE).map_err(cannot)? {
        return Err(format!(
            "{} is another's, or others can write to it: remove it, or set TMPDIR to another folder",
            folder.display()
        ));
    }
    Ok(folder)
}

/// Creates the folder, unless it exists. Returns whether it is this user's, and gives others no
/// more than `mode`.
pub(super) fn is_own(folder: &Path, mode: u32) -> io::Result<bool> {
    match DirBuilder::new().mode(mode).create(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let there = fs::symlink_metadata(folder)?;
    Ok(there.is_dir() && doorbell_trust::is_own_user(there.uid()) && there.mode() & 0o077 & !mode == 0)
}

/// Creates the links and the sysfs files in the folder, and returns the variables that make
/// programs use it. Existing entries stay valid while they are replaced.
pub(crate) fn fill(
    folder: &Path,
    libraries: &Path,
    files: Option<&[File]>,
    copies: &[String],
) -> io::Result<Vec<Variable>> {
    let folder = folder.canonicalize()?;
    let links = folder.join("lib");
    match fs::create_dir(&links) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let link = |name: &str, file: &str| {
        let new = links.join(format!(".{name}-{}", process::id()));
        symlink(libraries.join(file), &new)?;
        fs::rename(&new, links.join(name))
    };
    for name in library::NAMES.into_iter().chain(copies.iter().map(String::as_str)) {
        link(name, library::FILE)?;
    }
    let mut variables = vec![("LD_LIBRARY_PATH", before(&links, "LD_LIBRARY_PATH"))];
    if let Some(files) = files {
        link(library::SYSFS, library::SYSFS)?;
        // The library's own folder outlives the temporary one, but LD_PRELOAD is split at spaces
        // and colons.
        let itself = libraries.join(library::SYSFS);
        let splits = itself.as_os_str().as_bytes().iter().any(|byte| b" :".contains(byte));
        let preload = if splits { links.join(library::SYSFS) } else { itself };
        // A library with an RPATH finds its copy before this folder. Loaded at the start, by its
        // bare name, the drop-in has that name already: then the loader does not search.
        let preloads: Vec<&OsStr> = [preload.as_os_str()]
            .into_iter()
            .chain(copies.iter().map(OsStr::new))
            .collect();
        variables.push(("LD_PRELOAD", after("LD_PRELOAD", &preloads)));
        variables.push(("DOORBELL_VIEW", write(&folder, files)?.into()));
    }
    Ok(variables)
}

/// The folder is named by the files' hash, so it never changes while it is read.
fn write(folder: &Path, files: &[File]) -> io::Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    files.hash(&mut hasher);
    let place = folder.join(format!("view-{:016x}", hasher.finish()));
    if place.is_dir() {
        return Ok(place);
    }
    let new = TempDir::create(folder, ".view-")?;
    for (path, content) in files {
        let file = new.path().join(path);
        if let Some(parent) = file.parent() {
            fs::create_dir_all(parent)?;
        }
        match content {
            Content::Line(line) => fs::write(file, line)?,
            Content::Link(to) => symlink(to, file)?,
        }
    }
    // Another process may have created it first: then ours is removed.
    match fs::rename(new.path(), &place) {
        Err(_) if place.is_dir() => {}
        renamed => renamed?,
    }
    Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_can_be_filled_twice() {
        let folder = temporary().unwrap();
        let path = folder.path().canonicalize().unwrap();
        let line = "1: CA\n".to_owned();
        let files = [
            (
                "sys/class/infiniband/soft0/node_type".to_owned(),
                Content::Line(line.clone()),
            ),
            ("dev/infiniband/uverbs0".to_owned(), Content::Link("/dev/null".into())),
        ];
        for libraries in ["/first", "/second one"] {
            let variables = fill(folder.path(), Path::new(libraries), Some(&files), &[]).unwrap();
            let value = |name| &variables.iter().find(|(is, _)| *is == name).unwrap().1;
            assert!(
                value("LD_LIBRARY_PATH")
                    .to_str()
                    .unwrap()
                    .starts_with(path.join("lib").to_str().unwrap())
            );
            assert!(!value("LD_PRELOAD").to_str().unwrap().contains(' '));
            let file = Path::new(value("DOORBELL_VIEW")).join(&files[0].0);
            assert_eq!(fs::read_to_string(file).unwrap(), line);
            let link = fs::read_link(path.join("lib/libibverbs.so.1")).unwrap();
            assert_eq!(link, Path::new(libraries).join(library::FILE));
        }
        assert_eq!(
            fs::read_dir(path.join("lib")).unwrap().count(),
            library::NAMES.len() + 1
        );
        // The links, the files, and the owners.
        assert_eq!(fs::read_dir(&path).unwrap().count(), 3);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o022, 0);
    }
}
