//! The folder that precedes the system's libraries: a temporary one for `doorbell run`, a permanent
//! one per user for `doorbell env`.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, Permissions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::{env, mem};

use nix::sys::stat::{Mode, umask};
use nix::unistd::{Uid, mkdtemp};

use super::library::Libraries;
use super::sysfs::{Content, File};
use super::{Variable, after, before, library, owner};

/// World-readable: the command may become another user, who needs the libraries too.
const MODE: u32 = 0o755;
/// That of the umask with which folders and files get such modes.
const WITHHELD: Mode = Mode::S_IWGRP.union(Mode::S_IWOTH);

/// While it exists, what this process creates has such modes, whatever the user's umask is.
struct Umask(Mode);

impl Umask {
    fn set() -> Self {
        Self(umask(WITHHELD))
    }
}

impl Drop for Umask {
    fn drop(&mut self) {
        umask(self.0);
    }
}

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

/// A folder for one command, removed when dropped, and the one that has the libraries. Only this
/// user can write to it: a library placed there by another user would run as this one.
pub(crate) fn temporary(libraries: &Libraries) -> Result<(TempDir, PathBuf), String> {
    // Of a read-only system the others are often the only folders that can be written.
    let parents = [env::temp_dir()].into_iter().chain(runtime());
    first(parents.chain([PathBuf::from("/dev/shm")]), |parent| {
        owner::sweep(parent);
        let folder = TempDir::create(parent, owner::PREFIX)?;
        owner::add_self(folder.path())?;
        let libraries = libraries.provide(folder.path())?;
        Ok((folder, libraries))
    })
}

fn runtime() -> Option<PathBuf> {
    let folder = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    folder.filter(|folder| folder.is_dir())
}

/// The user's permanent folder, in `XDG_RUNTIME_DIR` or else where temporary files are, and the one
/// that has the libraries.
pub(crate) fn permanent(libraries: &Libraries) -> Result<(PathBuf, PathBuf), String> {
    let name = format!("doorbell-{}", Uid::current());
    first(runtime().into_iter().chain([env::temp_dir()]), |parent| {
        let folder = parent.join(&name);
        own(&folder)?;
        let libraries = libraries.provide(&folder)?;
        Ok((folder, libraries))
    })
}

/// What can be created in the first of the folders in which it can.
fn first<T>(parents: impl IntoIterator<Item = PathBuf>, create: impl Fn(&Path) -> io::Result<T>) -> Result<T, String> {
    let _umask = Umask::set();
    let mut reasons = Vec::new();
    for parent in parents {
        // Without symbolic links, so that the folders above are those that are checked.
        let created = parent.canonicalize().and_then(|parent| {
            unchangeable_by_others(&parent)?;
            create(&parent)
        });
        match created {
            Ok(created) => return Ok(created),
            Err(e) => reasons.push(format!("{}: {e}", parent.display())),
        }
    }
    Err(format!(
        "there is no place for the drop-in libraries ({}): set TMPDIR to another folder",
        reasons.join("; ")
    ))
}

/// Refuses a folder whose path another user can replace. In one with the sticky bit, as /tmp, only
/// the owner of a folder can. In a user namespace root may have no mapping.
fn unchangeable_by_others(folder: &Path) -> io::Result<()> {
    const STICKY: u32 = 0o1000;
    for folder in folder.ancestors() {
        let there = fs::symlink_metadata(folder)?;
        let uid = there.uid();
        let of_others = uid != 0 && !doorbell_trust::is_own_user(uid) && doorbell_trust::is_definite(uid);
        if of_others || (there.mode() & 0o022 != 0 && there.mode() & STICKY == 0) {
            return Err(refused(folder, "is another's, or others can write to it"));
        }
    }
    Ok(())
}

/// Creates the folder, unless this user has it already.
fn own(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(MODE).create(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let there = fs::symlink_metadata(folder)?;
    if there.is_dir() && doorbell_trust::is_own_user(there.uid()) && there.mode() & 0o022 == 0 {
        Ok(())
    } else {
        Err(refused(folder, "is another's, or others can write to it: remove it"))
    }
}

fn refused(folder: &Path, why: &str) -> io::Error {
    io::Error::other(format!("{} {why}", folder.display()))
}

/// Creates the links and the sysfs files in the folder, and returns the variables that make
/// programs use it. Existing entries stay valid while they are replaced. With sysfs files, programs
/// load the `preloaded` libraries and the `copies` at their start.
pub(crate) fn fill(
    folder: &Path,
    libraries: &Path,
    files: Option<&[File]>,
    (preloaded, copies): (&[&str], &[String]),
) -> io::Result<Vec<Variable>> {
    let _umask = Umask::set();
    let links = folder.join("lib");
    match fs::create_dir(&links) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let link = |name: &str, file: &str| library::link(&links, name, &libraries.join(file));
    for name in library::NAMES.into_iter().chain(copies.iter().map(String::as_str)) {
        link(name, library::FILE)?;
    }
    let mut variables = vec![("LD_LIBRARY_PATH", before(&links, "LD_LIBRARY_PATH"))];
    if let Some(files) = files {
        preloaded.iter().try_for_each(|file| link(file, file))?;
        // An installed library outlives the temporary folder, but LD_PRELOAD is split at spaces and
        // colons.
        let splits = libraries.as_os_str().as_bytes().iter().any(|byte| b" :".contains(byte));
        let place = if splits { &links } else { libraries };
        let preloaded: Vec<PathBuf> = preloaded.iter().map(|file| place.join(file)).collect();
        // A library with an RPATH finds its copy before this folder. Loaded at the start, by its
        // bare name, the drop-in has that name already: then the loader does not search.
        let preloads: Vec<&OsStr> = preloaded
            .iter()
            .map(|file| file.as_os_str())
            .chain(copies.iter().map(OsStr::new))
            .collect();
        variables.push(("LD_PRELOAD", after("LD_PRELOAD", &preloads)));
        variables.push(("DOORBELL_VIEW", write(folder, files)?.into()));
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
        let (folder, libraries) = temporary(&Libraries::Installed("/first".into())).unwrap();
        assert_eq!(libraries, Path::new("/first"));
        let path = folder.path();
        let line = "1: CA\n".to_owned();
        let files = [
            (
                "sys/class/infiniband/soft0/node_type".to_owned(),
                Content::Line(line.clone()),
            ),
            ("dev/infiniband/uverbs0".to_owned(), Content::Link("/dev/null".into())),
        ];
        for libraries in ["/first", "/second one"] {
            let preloaded = (&[library::SYSFS, library::NCCL][..], &[][..]);
            let variables = fill(path, Path::new(libraries), Some(&files), preloaded).unwrap();
            let value = |name| &variables.iter().find(|(is, _)| *is == name).unwrap().1;
            assert!(
                value("LD_LIBRARY_PATH")
                    .to_str()
                    .unwrap()
                    .starts_with(path.join("lib").to_str().unwrap())
            );
            let preload = value("LD_PRELOAD").to_str().unwrap();
            assert!(
                !preload.contains(' ') && preload.contains("/libdoorbell_nccl.so"),
                "{preload}"
            );
            let file = Path::new(value("DOORBELL_VIEW")).join(&files[0].0);
            assert_eq!(fs::read_to_string(file).unwrap(), line);
            let link = fs::read_link(path.join("lib/libibverbs.so.1")).unwrap();
            assert_eq!(link, Path::new(libraries).join(library::FILE));
        }
        assert_eq!(
            fs::read_dir(path.join("lib")).unwrap().count(),
            library::NAMES.len() + 2
        );
        // The links, the files, and the owners.
        assert_eq!(fs::read_dir(path).unwrap().count(), 3);
        assert_eq!(fs::metadata(path).unwrap().mode() & 0o022, 0);
    }

    #[test]
    fn a_folder_that_others_can_replace_is_passed_over() {
        let home = tempfile::tempdir().unwrap();
        let [shared, own] = ["shared", "own"].map(|name| {
            let folder = home.path().join(name);
            fs::create_dir(&folder).unwrap();
            folder
        });
        let shared_below = shared.join("below");
        fs::create_dir(&shared_below).unwrap();
        let mode = |mode| fs::set_permissions(&shared, Permissions::from_mode(mode)).unwrap();
        let link = home.path().join("link");
        symlink(&shared_below, &link).unwrap();
        let chosen = || first([link.clone(), own.clone()], |parent| Ok(parent.to_owned())).unwrap();
        let canonical = |folder: &Path| folder.canonicalize().unwrap();
        assert_eq!(chosen(), canonical(&shared_below));
        mode(0o777);
        assert_eq!(chosen(), canonical(&own));
        // As /tmp has it.
        mode(0o1777);
        assert_eq!(chosen(), canonical(&shared_below));
        let reasons = first([shared, own], |_| Err::<(), _>(io::Error::other("full"))).unwrap_err();
        assert_eq!(reasons.matches(": full").count(), 2, "{reasons}");
    }
}
