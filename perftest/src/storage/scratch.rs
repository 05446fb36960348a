//! The file that the command makes, and removes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process;

use doorbell_gpudirect::storage::{File, Storage};

use crate::failure::{Failure, one_line, refused};

/// A file of this process in a folder; removed when dropped.
pub(super) struct Scratch {
    path: PathBuf,
    pub(super) file: File,
}

impl Scratch {
    /// Makes one of `len` bytes of noise, which no disk compresses, on the disk.
    pub(super) fn new(folder: &Path, len: usize, storage: &mut Storage) -> Result<Scratch, Failure> {
        const PART: usize = 8 << 20;
        let path = folder.join(format!(".doorbell-bw-file-{}", process::id()));
        let file = File::create_new(&path).map_err(|error| {
            Failure::test(format!(
                "{}; --no-write measures reads alone",
                one_line(&error.to_string())
            ))
        })?;
        let scratch = Scratch { path, file };
        scratch.file.allocate(len as u64).map_err(refused)?;
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut bytes = Vec::with_capacity(PART.min(len));
        for at in (0..len).step_by(PART) {
            let part = PART.min(len - at);
            bytes.clear();
            while bytes.len() < part {
                // xorshift64
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                bytes.extend_from_slice(&state.to_ne_bytes());
            }
            storage
                .write_at(&scratch.file, at as u64, &bytes[..part])
                .map_err(refused)?;
        }
        scratch.file.sync().map_err(refused)?;
        Ok(scratch)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            eprintln!("doorbell: warning: {} is left: {error}", self.path.display());
        }
    }
}
