//! Drop-in libraries that are in the program itself, unpacked on use into a folder of the user's.
//!
//! What another user could have written is never loaded: only this user can change the folder and
//! the files, and each file has the digest that the build computed. They are checked on each use,
//! and written anew where they differ.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::OnceLock;

use miniz_oxide::inflate::decompress_to_vec_with_limit;
use nix::fcntl::OFlag;
use sha2::{Digest, Sha256};

use super::folder;

/// A library in a program.
#[derive(Debug)]
pub struct EmbeddedLibrary {
    /// Of the file.
    pub name: &'static str,
    /// Its content in the format of RFC 1951.
    pub deflated: &'static [u8],
    /// The length of the content.
    pub bytes: usize,
    /// Of the content.
    pub sha256: [u8; 32],
}

/// Only this user may enter the folder.
const FOLDER_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o500;

static EMBEDDED: OnceLock<&[EmbeddedLibrary]> = OnceLock::new();

/// What this program has; once, at its start.
pub(crate) fn set(libraries: &'static [EmbeddedLibrary]) {
    EMBEDDED.get_or_init(|| libraries);
}

/// The folder with the libraries, if the program has any.
pub(super) fn find() -> Option<Result<PathBuf, String>> {
    let libraries = EMBEDDED.get().filter(|libraries| !libraries.is_empty())?;
    Some(cache().and_then(|cache| unpack(&cache, libraries)))
}

/// `$XDG_CACHE_HOME/doorbell` or `~/.cache/doorbell`; without a home, what `doorbell env` has.
fn cache() -> Result<PathBuf, String> {
    let folder = |name| {
        let value = doorbell_trust::variable(name).map(PathBuf::from);
        value.filter(|folder| folder.is_absolute())
    };
    let home = || folder("HOME").map(|home| home.join(".cache"));
    match folder("XDG_CACHE_HOME").or_else(home) {
        Some(cache) if fs::create_dir_all(&cache).is_ok() => Ok(cache.join("doorbell")),
        _ => folder::permanent().map(|folder| folder.join("libraries")),
    }
}

fn unpack(cache: &Path, libraries: &[EmbeddedLibrary]) -> Result<PathBuf, String> {
    let cannot = |e: io::Error| {
        format!(
            "cannot unpack the drop-in libraries in {}: {e}; set XDG_CACHE_HOME or DOORBELL_LIBRARY_DIR to another folder",
            cache.display()
        )
    };
    own_folder(cache).map_err(cannot)?;
    // Without symbolic links, so that the folders above are those that are checked.
    let cache = cache.canonicalize().map_err(cannot)?;
    unchangeable_by_others(&cache).map_err(cannot)?;
    // A folder for each build, as another one's libraries may be in use.
    let build: String = libraries
        .iter()
        .flat_map(|library| &library.sha256[..4])
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let folder = cache.join(build);
    own_folder(&folder).map_err(cannot)?;
    for library in libraries {
        let path = folder.join(library.name);
        if check(&path, library).is_err() {
            write(&path, library)
                .and_then(|()| check(&path, library))
                .map_err(cannot)?;
        }
    }
    Ok(folder)
}

/// Creates it, or refuses one that others can enter.
fn own_folder(folder: &Path) -> io::Result<()> {
    match folder::is_own(folder, FOLDER_MODE)? {
        true => Ok(()),
        false => Err(refused(folder, "is another's, or others can enter it: remove it")),
    }
}

/// Refuses a path of which another user can replace a folder. In one with the sticky bit, as /tmp,
/// only the owner of a folder can.
fn unchangeable_by_others(folder: &Path) -> io::Result<()> {
    const STICKY: u32 = 0o1000;
    for folder in folder.ancestors().skip(1) {
        let there = fs::symlink_metadata(folder)?;
        let of_others = there.uid() != 0 && !doorbell_trust::is_own_user(there.uid());
        if of_others || (there.mode() & 0o022 != 0 && there.mode() & STICKY == 0) {
            return Err(refused(folder, "can be changed by others"));
        }
    }
    Ok(())
}

fn refused(path: &Path, why: &str) -> io::Error {
    io::Error::other(format!("{} {why}", path.display()))
}

fn check(path: &Path, library: &EmbeddedLibrary) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
        .open(path)?;
    let there = file.metadata()?;
    let is_own = there.is_file() && doorbell_trust::is_own_user(there.uid());
    if !is_own || there.mode() & 0o7777 != FILE_MODE || there.len() != library.bytes as u64 {
        return Err(refused(path, "is not the file that was unpacked"));
    }
    let mut content = Vec::with_capacity(library.bytes);
    file.read_to_end(&mut content)?;
    if Sha256::digest(&content)[..] != library.sha256 {
        return Err(refused(path, "has another content than what was unpacked"));
    }
    Ok(())
}

/// By a rename, as the file may be in use.
fn write(path: &Path, library: &EmbeddedLibrary) -> io::Result<()> {
    let content = decompress_to_vec_with_limit(library.deflated, library.bytes)
        .map_err(|e| io::Error::other(format!("{} in this program: {e:?}", library.name)))?;
    let new = path.with_file_name(format!(".{}-{}", library.name, process::id()));
    // Left by an earlier process of this number.
    let _ = fs::remove_file(&new);
    let mut file = doorbell_trust::create_file(&new)?;
    let written = file
        .write_all(&content)
        .and_then(|()| file.set_permissions(Permissions::from_mode(FILE_MODE)))
        .and_then(|()| fs::rename(&new, path));
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use miniz_oxide::deflate::compress_to_vec;

    use super::*;

    const CONTENT: &[u8] = b"a library";

    fn library() -> EmbeddedLibrary {
        EmbeddedLibrary {
            name: "lib.so",
            deflated: compress_to_vec(CONTENT, 6).leak(),
            bytes: CONTENT.len(),
            sha256: Sha256::digest(CONTENT).into(),
        }
    }

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn a_library_is_unpacked_once_and_again_when_it_was_changed() {
        let home = tempfile::tempdir().unwrap();
        let cache = home.path().join("doorbell");
        let library = [library()];
        let folder = unpack(&cache, &library).unwrap();
        let file = folder.join("lib.so");
        assert_eq!((mode(&cache), mode(&folder), mode(&file)), (0o700, 0o700, 0o500));
        let inode = || fs::symlink_metadata(&file).unwrap().ino();
        let first = inode();
        assert_eq!(unpack(&cache, &library).unwrap(), folder);
        assert_eq!(inode(), first, "unpacked twice");
        let elsewhere = home.path().join("elsewhere");
        fs::write(&elsewhere, "b library").unwrap();
        let changes: [&dyn Fn(); 4] = [
            &|| fs::write(&file, "b library").unwrap(),
            &|| fs::set_permissions(&file, Permissions::from_mode(0o700)).unwrap(),
            &|| fs::remove_file(&file).unwrap(),
            &|| {
                fs::remove_file(&file).unwrap();
                symlink(&elsewhere, &file).unwrap();
            },
        ];
        for change in changes {
            fs::set_permissions(&file, Permissions::from_mode(0o700)).unwrap();
            change();
            unpack(&cache, &library).unwrap();
            assert_eq!(fs::read(&file).unwrap(), CONTENT);
            assert_eq!(mode(&file), 0o500);
        }
        assert_eq!(fs::read(&elsewhere).unwrap(), b"b library");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_that_others_can_change_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let library = [library()];
        let shared = home.path().join("shared");
        fs::create_dir(&shared).unwrap();
        fs::set_permissions(&shared, Permissions::from_mode(0o777)).unwrap();
        let why = unpack(&shared.join("doorbell"), &library).unwrap_err();
        assert!(why.contains("can be changed by others"), "{why}");
        // As in /tmp.
        fs::set_permissions(&shared, Permissions::from_mode(0o1777)).unwrap();
        let folder = unpack(&shared.join("doorbell"), &library).unwrap();
        fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
        let why = unpack(&shared.join("doorbell"), &library).unwrap_err();
        assert!(why.contains("others can enter it"), "{why}");
        symlink(home.path(), home.path().join("link")).unwrap();
        let why = unpack(&home.path().join("link"), &library).unwrap_err();
        assert!(why.contains("is another's"), "{why}");
    }
}
