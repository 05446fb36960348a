//! Drop-in libraries that are in the program itself, unpacked into the folder that each `doorbell
//! run` and `doorbell env` makes.

use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process;
use std::sync::OnceLock;

use miniz_oxide::inflate::decompress_to_vec_with_limit;
use nix::sys::statvfs::{FsFlags, statvfs};
use sha2::{Digest, Sha256};

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

const MODE: u32 = 0o644;

static EMBEDDED: OnceLock<&[EmbeddedLibrary]> = OnceLock::new();

/// What this program has; once, at its start.
pub(crate) fn set(libraries: &'static [EmbeddedLibrary]) {
    EMBEDDED.get_or_init(|| libraries);
}

/// What this program has, if anything.
pub(super) fn get() -> Option<&'static [EmbeddedLibrary]> {
    EMBEDDED.get().copied().filter(|libraries| !libraries.is_empty())
}

/// Writes them to a folder that only this user can change.
pub(super) fn unpack(folder: &Path, libraries: &[EmbeddedLibrary]) -> io::Result<()> {
    if statvfs(folder)?.flags().contains(FsFlags::ST_NOEXEC) {
        return Err(io::Error::other("mounted noexec: no library can be loaded from there"));
    }
    libraries.iter().try_for_each(|library| {
        let new = folder.join(format!(".{}-{}", library.name, process::id()));
        let written = write(&new, library).and_then(|()| fs::rename(&new, folder.join(library.name)));
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
        written
    })
}

/// Under a name of its own at first: programs may be using the file of an earlier `doorbell env`.
fn write(new: &Path, library: &EmbeddedLibrary) -> io::Result<()> {
    let wrong = |what: &str| io::Error::other(format!("{} {what}", library.name));
    let content = decompress_to_vec_with_limit(library.deflated, library.bytes)
        .map_err(|e| wrong(&format!("in this program: {e:?}")))?;
    // Left by an earlier process of this number.
    let _ = fs::remove_file(new);
    let mut file = doorbell_trust::create_file(new)?;
    file.write_all(&content)?;
    file.set_permissions(Permissions::from_mode(MODE))?;
    if Sha256::digest(fs::read(new)?)[..] == library.sha256 {
        Ok(())
    } else {
        Err(wrong("reads back with another content"))
    }
}

#[cfg(test)]
mod tests {
    use miniz_oxide::deflate::compress_to_vec;

    use super::*;

    const CONTENT: &[u8] = b"a library";

    fn library(sha256: [u8; 32]) -> EmbeddedLibrary {
        EmbeddedLibrary {
            name: "lib.so",
            deflated: compress_to_vec(CONTENT, 6).leak(),
            bytes: CONTENT.len(),
            sha256,
        }
    }

    #[test]
    fn libraries_are_written_anew_and_checked() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("lib.so");
        let right = [library(Sha256::digest(CONTENT).into())];
        unpack(folder.path(), &right).unwrap();
        let mode = fs::metadata(&file).unwrap().permissions().mode() & 0o7777;
        assert_eq!((fs::read(&file).unwrap().as_slice(), mode), (CONTENT, 0o644));
        // A program that has the old one keeps it.
        fs::write(&file, "an old one").unwrap();
        let used = fs::File::open(&file).unwrap();
        unpack(folder.path(), &right).unwrap();
        assert_eq!(fs::read(&file).unwrap(), CONTENT);
        assert_eq!(io::read_to_string(used).unwrap(), "an old one");

        let why = unpack(folder.path(), &[library([0; 32])]).unwrap_err().to_string();
        assert!(why.contains("another content"), "{why}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
