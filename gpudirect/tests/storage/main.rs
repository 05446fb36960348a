//! Files and memory, on the file system of the temporary folder and on tmpfs, by every path that
//! works here.

mod forbidden;
mod gpu;
mod hostile;
mod random;
mod served;

use std::fs;
use std::path::Path;

use doorbell_gpudirect::storage::{File, Storage, StorageOptions, StoragePath};
use tempfile::TempDir;

/// A folder on the disk, or what the temporary folder is on.
fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

/// Small blocks and few requests, so that short files have several of both.
fn options() -> StorageOptions {
    StorageOptions::new().block(64 << 10).depth(3)
}

/// By every path of host memory that works here.
fn storages() -> Vec<Storage> {
    let paths = [StoragePath::IoUring, StoragePath::Pread];
    let opened = paths.map(|path| options().path(path).host());
    opened
        .into_iter()
        .filter_map(|storage| match storage {
            Ok(storage) => Some(storage),
            Err(refused) => {
                eprintln!("left out: {refused}");
                None
            }
        })
        .collect()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 255) as u8).collect()
}

/// A new file with these bytes.
fn file_with(folder: &Path, bytes: &[u8]) -> File {
    let path = folder.join("data");
    fs::write(&path, bytes).expect("a file");
    File::open_for_writing(path).expect("opened")
}
