//! Saving a file so that its name is always of a whole one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::{Action, StorageError};
use super::file::File;

/// A file that is written under a temporary name beside its own, and gets its own when it is
/// complete ([`Save::commit`]); dropped before, it is removed. Its blocks are allocated at once, so
/// that a disk without space says so before anything is written.
///
/// Whatever happens, the name is of the file from before or of the whole new one; a process that is
/// killed leaves a file `.NAME.PID-N.tmp`, which no program reads.
#[derive(Debug)]
pub struct Save {
    file: File,
    target: PathBuf,
    temporary: Option<PathBuf>,
}

impl Save {
    /// Begins a file of `len` bytes for `target`, of this user alone.
    ///
    /// # Errors
    /// [`StorageError::File`], as with `ENOSPC`; nothing is left then.
    pub fn new(target: impl AsRef<Path>, len: u64) -> Result<Self, StorageError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let target = target.as_ref();
        let Some(name) = target.file_name() else {
            let error = io::Error::from(io::ErrorKind::InvalidInput);
            return Err(StorageError::file(Action::Open, target, error));
        };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let temporary = target.with_file_name(format!(".{}.{}-{number}.tmp", name.display(), process::id()));
        let save = Self {
            file: File::create_new(&temporary)?,
            target: target.to_owned(),
            temporary: Some(temporary),
        };
        save.file.allocate(len)?;
        Ok(save)
    }

    /// The file to write.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Waits until the file is on the disk, gives it its name, in place of another's, and waits
    /// until the name is on the disk.
    ///
    /// # Errors
    /// [`StorageError::File`]. The name is then of the file from before, or, where syncing its
    /// folder failed, of either.
    #[doc(alias("fsync", "rename"))]
    pub fn commit(mut self) -> Result<(), StorageError> {
        self.file.sync()?;
        let temporary = self.temporary.take().unwrap_or_default();
        let renamed = fs::rename(&temporary, &self.target);
        if let Err(error) = renamed {
            self.temporary = Some(temporary);
            return Err(StorageError::file(Action::Rename, &self.target, error));
        }
        let folder = match self.target.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let synced = fs::File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(|error| StorageError::file(Action::Sync, folder, error))
    }
}

impl Drop for Save {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary
            && let Err(error) = fs::remove_file(temporary)
        {
            tracing::debug!("{}: cannot be removed: {error}", temporary.display());
        }
    }
}
