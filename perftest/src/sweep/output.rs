//! A file that is there whole or not at all.

use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::{Builder, NamedTempFile};

use crate::failure::{Failure, one_line};

/// A file to be, beside its final place. Unless it is [finished](Output::finish) nothing is left of it.
#[derive(Debug)]
pub(crate) struct Output {
    file: NamedTempFile,
    path: PathBuf,
}

impl Output {
    /// Begins one: early, so that nobody measures for an hour to learn that there is no such folder.
    ///
    /// # Errors
    /// [`Failure::Test`] that names the file.
    pub(crate) fn begin(path: &Path) -> Result<Output, Failure> {
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let file = if fs::metadata(path).is_ok_and(|there| there.is_dir()) {
            Err(io::Error::from(io::ErrorKind::IsADirectory))
        } else {
            Builder::new()
                .prefix(".doorbell-")
                // As of any new file: less what the umask takes.
                .permissions(Permissions::from_mode(0o666))
                .tempfile_in(folder)
        };
        Ok(Output {
            file: file.map_err(|e| cannot(path, &e))?,
            path: path.to_owned(),
        })
    }

    /// Writes it, and puts it in its place.
    ///
    /// # Errors
    /// [`Failure::Test`] that names the file.
    pub(crate) fn finish(mut self, bytes: &[u8]) -> Result<(), Failure> {
        let path = self.path;
        let written = self.file.write_all(bytes).and_then(|()| self.file.flush());
        written.map_err(|e| cannot(&path, &e))?;
        self.file.persist(&path).map_err(|e| cannot(&path, &e.error)).map(drop)
    }
}

fn cannot(path: &Path, error: &io::Error) -> Failure {
    Failure::test(one_line(&format!("cannot write {}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.json");
        fs::write(&path, "old").unwrap();
        drop(Output::begin(&path).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        Output::begin(&path).unwrap().finish(b"new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        for wrong in [folder.path().to_owned(), folder.path().join("no/x.json")] {
            assert_eq!(Output::begin(&wrong).unwrap_err().status(), 1);
        }
    }
}
