//! Random requests against plain reads and writes of the same bytes.

use std::fs;
use std::path::{Path, PathBuf};

use doorbell_gpudirect::storage::{File, Read, Storage, StorageOptions, Write};
use proptest::prelude::*;
use tempfile::TempDir;

use super::{file_with, folder, pattern, storages};

/// Where files are tested: the temporary folder, and tmpfs if it is not on one.
fn folders() -> Vec<TempDir> {
    let shm = Path::new("/dev/shm");
    let mut all = vec![folder()];
    all.extend(tempfile::tempdir_in(shm).ok());
    all
}

/// A file with O_DIRECT if its file system has it, and one through the page cache.
fn both(path: PathBuf) -> [File; 2] {
    let open = || File::open_for_writing(&path).expect("opened");
    [open(), open().through_page_cache()]
}

fn check_reads(storage: &mut Storage, file: &File, bytes: &[u8], parts: &[(usize, usize, usize)]) {
    // Memory of the test's own alignment, around which nothing may change.
    let mut memory: Vec<Vec<u8>> = parts
        .iter()
        .map(|(_, len, shift)| vec![0xa5; shift + len + 64])
        .collect();
    let mut reads: Vec<Read<'_>> = parts
        .iter()
        .zip(&mut memory)
        .map(|((offset, len, shift), memory)| Read {
            file,
            offset: *offset as u64,
            into: (&mut memory[*shift..shift + len]).into(),
        })
        .collect();
    let counts = storage.read_batch(&mut reads).expect("read");
    drop(reads);
    for (((offset, len, shift), memory), count) in parts.iter().zip(&memory).zip(counts) {
        let expected = &bytes[(*offset).min(bytes.len())..(offset + len).min(bytes.len())];
        assert_eq!(count, expected.len(), "{storage:?}: {len} bytes at {offset}");
        assert!(
            memory[*shift..shift + count] == *expected,
            "{storage:?}: {len} bytes at {offset}"
        );
        let around = memory[..*shift].iter().chain(&memory[shift + len..]);
        assert!(around.copied().all(|byte| byte == 0xa5));
    }
}

fn parts(len: usize) -> impl Strategy<Value = Vec<(usize, usize, usize)>> {
    let offset = prop_oneof![0..len + 9000, (0..len / 4096 + 1).prop_map(|page| page * 4096)];
    let size = prop_oneof![0..len, Just(4096), Just(128 << 10), 0..100usize];
    prop::collection::vec((offset, size, 0..64usize), 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn reads_equal_a_plain_read((len, parts) in (1usize..400_000).prop_flat_map(|len| (Just(len), parts(len)))) {
        let bytes = pattern(len);
        for folder in folders() {
            let path = file_with(folder.path(), &bytes).path().to_owned();
            for mut storage in storages() {
                for file in both(path.clone()) {
                    check_reads(&mut storage, &file, &bytes, &parts);
                }
            }
        }
    }

    #[test]
    fn writes_change_their_bytes_alone((len, parts) in (1usize..400_000).prop_flat_map(|len| (Just(len), parts(len)))) {
        for folder in folders() {
            for mut storage in storages() {
                let mut expected = pattern(len);
                let path = file_with(folder.path(), &expected).path().to_owned();
                for file in both(path.clone()) {
                    for (at, (offset, size, shift)) in parts.iter().enumerate() {
                        let memory: Vec<u8> = (0..shift + size).map(|byte| (byte * 7 + at) as u8).collect();
                        let from = &memory[*shift..];
                        storage.write_batch(&[Write { file: &file, offset: *offset as u64, from: from.into() }]).expect("written");
                        if *size > 0 {
                            expected.resize(expected.len().max(offset + size), 0);
                            expected[*offset..offset + size].copy_from_slice(from);
                        }
                    }
                    file.sync().expect("synced");
                    prop_assert!(fs::read(&path).expect("read") == expected, "{:?}", storage);
                }
            }
        }
    }
}

#[test]
fn aligned_memory_is_read_into_at_once_by_many_requests() {
    const LEN: usize = 8 << 20;
    let folder = folder();
    let bytes = pattern(LEN + 4097);
    let file = file_with(folder.path(), &bytes);
    for depth in [1, 2, 64] {
        let mut storage = StorageOptions::new()
            .block(64 << 10)
            .depth(depth)
            .host()
            .expect("opened");
        let mut memory = vec![0; LEN + 4096];
        let aligned = memory.as_ptr().align_offset(4096);
        storage
            .read_exact_at(&file, 4097, &mut memory[aligned..][..LEN])
            .expect("read");
        assert!(memory[aligned..][..LEN] == bytes[4097..]);
        storage
            .read_exact_at(&file, 4096, &mut memory[aligned..][..LEN])
            .expect("read");
        assert!(memory[aligned..][..LEN] == bytes[4096..][..LEN]);
    }
}
