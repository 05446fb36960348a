//! By which path a file is read, and why not by better ones.

use std::fmt::Write;
use std::path::Path;

use doorbell_cuda::Stream;
use doorbell_gpudirect::storage::{File, Storage, StoragePath, survey};
use serde::Serialize;

use crate::failure::one_line;

/// The path of a file, and what was refused.
#[derive(Debug, Serialize)]
pub(crate) struct StorageStatus {
    /// The path that is used; none where all are refused.
    path: Option<&'static str>,
    /// Why cuFile is in its compatibility mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    compatibility: Option<String>,
    /// The alignment of O_DIRECT in bytes; none where the page cache is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    direct_alignment: Option<usize>,
    /// Why the page cache is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    buffered: Option<String>,
    /// Why io_uring has no registered buffers.
    #[serde(skip_serializing_if = "Option::is_none")]
    unregistered: Option<String>,
    refused: Vec<Refused>,
}

#[derive(Debug, Serialize)]
struct Refused {
    path: &'static str,
    why: String,
}

/// Of a storage and a file that it has read.
pub(crate) fn status(storage: &Storage, file: &File) -> StorageStatus {
    let path = storage.path_of(file);
    let compatibility = storage.compatibility().filter(|_| path == StoragePath::CuFile);
    StorageStatus {
        path: Some(path.name()),
        compatibility: compatibility.map(one_line),
        direct_alignment: file.buffered().is_none().then(|| file.alignment()),
        buffered: file.buffered().map(one_line),
        unregistered: storage.unregistered().map(one_line),
        refused: storage
            .refused_of(file)
            .iter()
            .map(|refused| Refused {
                path: refused.path.name(),
                why: one_line(&refused.why),
            })
            .collect(),
    }
}

/// Of a file, by trying every path.
///
/// # Errors
/// In one line why the file cannot be read.
pub(crate) fn tried(file: &Path, stream: Option<&Stream>) -> Result<StorageStatus, String> {
    let survey = survey(file, stream).map_err(|error| one_line(&error.to_string()))?;
    let best = survey.best();
    let refused = survey.paths.into_iter().filter_map(|(path, outcome)| {
        let why = one_line(&outcome.err()?);
        Some(Refused { path: path.name(), why })
    });
    Ok(StorageStatus {
        path: best.map(|path| path.name()),
        compatibility: None,
        direct_alignment: survey.direct.as_ref().ok().copied(),
        unregistered: None,
        buffered: survey.direct.err().map(|why| one_line(&why)),
        refused: refused.collect(),
    })
}

impl StorageStatus {
    /// As lines of text, each after `head`.
    pub(crate) fn lines(&self, head: &str) -> String {
        let mut text = format!("{head}path: {}", self.path.unwrap_or("none"));
        if let Some(why) = &self.compatibility {
            text += &format!(" in its compatibility mode, POSIX calls and copies through host memory: {why}");
        }
        // Writing into a String cannot fail.
        let _ = match (&self.buffered, self.direct_alignment) {
            (Some(why), _) => write!(text, ", through the page cache: {why}"),
            (None, Some(alignment)) => write!(text, ", O_DIRECT with an alignment of {alignment} bytes"),
            (None, None) => Ok(()),
        };
        if let Some(why) = &self.unregistered {
            let _ = write!(
                text,
                "\n{head}io_uring pins the memory of each request, not once: {why}"
            );
        }
        for refused in &self.refused {
            let _ = write!(text, "\n{head}{}: no: {}", refused.path, refused.why);
        }
        text
    }
}
