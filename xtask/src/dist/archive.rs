//! Archives whose bytes depend on the files alone: by path, of one time and one owner.

use super::content::{File, Kind};
use anyhow::Result;
use flate2::{Compression, GzBuilder, write::GzEncoder};
use std::collections::BTreeSet;
use tar::{Builder, EntryType, Header};

/// The modification time of every file, in seconds of Unix time: the earliest that ZIP has.
pub(super) const TIME: u64 = 315_532_800;

/// A tar file, compressed by gzip, with the files and their folders below `prefix`.
pub(super) fn tar_gz(prefix: &str, files: &[File]) -> Result<Vec<u8>> {
    let mut tar = Builder::new(gzip());
    let mut folders = BTreeSet::new();
    for file in files {
        let path = format!("{prefix}{}", file.path);
        for (at, _) in path.match_indices('/') {
            let folder = &path[..=at];
            if folders.insert(folder.to_owned()) {
                tar.append_data(&mut header(EntryType::Directory, 0o755, 0), folder, &[][..])?;
            }
        }
        if let Kind::Link(target) = &file.kind {
            tar.append_link(&mut header(EntryType::Symlink, file.mode(), 0), &path, target)?;
        } else {
            let mut header = header(EntryType::Regular, file.mode(), file.bytes.len());
            tar.append_data(&mut header, &path, &file.bytes[..])?;
        }
    }
    Ok(tar.into_inner()?.finish()?)
}

fn gzip() -> GzEncoder<Vec<u8>> {
    GzBuilder::new().mtime(0).write(Vec::new(), Compression::best())
}

fn header(kind: EntryType, mode: u32, bytes: usize) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(bytes as u64);
    header.set_mtime(TIME);
    header.set_uid(0);
    header.set_gid(0);
    header
}
