//! A report of how a file can be read and written here: every path tried by itself.

use std::path::Path;

use doorbell_cuda::Stream;

use super::error::StorageError;
use super::file::File;
use super::path::StoragePath;
use super::{Storage, StorageOptions};

/// How a file can be read.
#[derive(Debug)]
pub struct StorageSurvey {
    /// Its length in bytes.
    pub len: u64,
    /// The alignment of O_DIRECT in bytes, or why the page cache is used.
    pub direct: Result<usize, String>,
    /// Every path, best first, with the reason if it is refused.
    pub paths: Vec<(StoragePath, Result<(), String>)>,
}

impl StorageSurvey {
    /// The best path that works.
    #[must_use]
    pub fn best(&self) -> Option<StoragePath> {
        let works = self.paths.iter().find(|(_, outcome)| outcome.is_ok());
        works.map(|(path, _)| *path)
    }
}

/// Reads the first byte of `path` by every path, into memory of the GPU of `stream` if there is
/// one, ignoring the environment.
///
/// # Errors
/// [`StorageError::File`] where the file cannot be opened.
pub fn survey(path: impl AsRef<Path>, stream: Option<&Stream>) -> Result<StorageSurvey, StorageError> {
    let file = File::open(path)?;
    let paths = StoragePath::ALL.map(|path| (path, try_path(path, &file, stream).map_err(reason)));
    Ok(StorageSurvey {
        len: file.len()?,
        direct: match file.buffered() {
            Some(why) => Err(why.to_owned()),
            None => Ok(file.alignment()),
        },
        paths: paths.into(),
    })
}

fn try_path(path: StoragePath, file: &File, stream: Option<&Stream>) -> Result<(), StorageError> {
    let options = StorageOptions::new().block(64 << 10).depth(1).only(path);
    let Some(stream) = stream else {
        return options.host()?.read_at(file, 0, &mut vec![0]).map(drop);
    };
    let memory = crate::GpuMemory::alloc(stream.context(), 1)?;
    let mut storage: Storage = options.on_stream(stream)?;
    storage.read_at(file, 0, memory.all()).map(drop)
}

/// The reason alone where a path is refused, which this module has forced.
fn reason(error: StorageError) -> String {
    match error {
        StorageError::Refused { why, .. } => why,
        other => other.to_string(),
    }
}
