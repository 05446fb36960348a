//! An output file that is written atomically: into a temporary file beside it, which is renamed
//! when it is complete.
//!
//! Symbolic links are followed: their target is replaced. Pipes, terminals and `/dev/null` are
//! written directly.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;

use crate::failure::{Failure, one_line};

/// Unless it is [finished](Output::finish), nothing is left of it.
#[derive(Debug)]
pub(crate) struct Output {
    path: PathBuf,
    destination: Destination,
}

#[derive(Debug)]
enum Destination {
    /// A temporary file, and the path to rename it to.
    TempFile { file: TempFile, destination: PathBuf },
    /// Not a regular file.
    Direct(File),
}

impl Output {
    /// Creates the temporary file: before the measurement, so that a missing folder is reported at
    /// once.
    pub(crate) fn begin(path: &Path) -> Result<Output, Failure> {
        match destination(path) {
            Ok(destination) => Ok(Output {
                path: path.to_owned(),
                destination,
            }),
            Err(e) => Err(cannot(path, &e)),
        }
    }

    pub(crate) fn finish(self, bytes: &[u8]) -> Result<(), Failure> {
        finish(self.destination, bytes).map_err(|e| cannot(&self.path, &e))
    }

    pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
        Output::begin(path)?.finish(bytes)
    }
}

fn destination(path: &Path) -> io::Result<Destination> {
    let destination = match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
        Ok(metadata) if !metadata.is_file() => {
            return OpenOptions::new().write(true).open(path).map(Destination::Direct);
        }
        // A rename replaces a symbolic link, not its target.
        Ok(_) => fs::canonicalize(path)?,
        Err(_) => path.to_owned(),
    };
    let folder = match destination.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let file = TempFile::create_in(folder)?;
    Ok(Destination::TempFile { file, destination })
}

/// A file that is removed when dropped, unless it was renamed.
#[derive(Debug)]
struct TempFile {
    file: File,
    /// Empty once it was renamed.
    path: PathBuf,
}

impl TempFile {
    /// With the mode of any new file, less the umask: a collector of metrics runs as another user.
    fn create_in(folder: &Path) -> io::Result<TempFile> {
        for number in 0..1000 {
            let path = folder.join(format!(".doorbell-{}-{number}", process::id()));
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                opened => return opened.map(|file| TempFile { file, path }),
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn finish(destination: Destination, bytes: &[u8]) -> io::Result<()> {
    match destination {
        Destination::TempFile { mut file, destination } => {
            file.file.write_all(bytes)?;
            file.file.sync_all()?;
            fs::rename(&file.path, destination)?;
            file.path = PathBuf::new();
            Ok(())
        }
        Destination::Direct(mut file) => file.write_all(bytes).and_then(|()| file.flush()),
    }
}

fn cannot(path: &Path, error: &io::Error) -> Failure {
    Failure::test(one_line(&format!("cannot write {}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.json");
        fs::write(&path, "old").unwrap();
        drop(Output::begin(&path).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        Output::write(&path, b"new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn symbolic_links_are_followed_and_the_mode_is_default() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("a.prom"), folder.path().join("link.prom"));
        Output::write(&file, b"old\n").unwrap();
        symlink(&file, &link).unwrap();
        Output::write(&link, b"new\n").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "new\n");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            2,
            "nothing is left behind"
        );
        // By the umask.
        let plain = folder.path().join("plain");
        fs::write(&plain, "").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&file), mode(&plain));
    }

    #[test]
    fn a_file_that_cannot_be_written_is_named() {
        for path in ["/dev/full", "/nonexistent/a.prom", "/proc/a.prom", "/tmp"] {
            let failure = Output::write(Path::new(path), b"x\n").unwrap_err();
            assert!(failure.status() == 1 && failure.to_string().contains(path), "{failure}");
        }
        assert!(!fs::metadata("/dev/full").unwrap().is_file());
        Output::write(Path::new("/dev/null"), b"x\n").unwrap();
    }
}
