//! What is a segment and what is not; and parsing of /proc/self/maps.

use std::num::NonZeroUsize;

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mprotect, munmap};

use super::*;

const PAGE: usize = 4096;

struct Mapping {
    start: std::ptr::NonNull<std::ffi::c_void>,
    len: usize,
}

impl Mapping {
    fn new(file: &File, flags: MapFlags) -> Self {
        let len = file.metadata().unwrap().len() as usize;
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, wherever the kernel has space.
        let start = unsafe { mmap(None, NonZeroUsize::new(len).unwrap(), rights, flags, file, 0) }.unwrap();
        Self { start, len }
    }

    fn addr(&self) -> usize {
        self.start.as_ptr().addr()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and unmapped once.
        unsafe { munmap(self.start, self.len) }.unwrap();
    }
}

fn memfd(flags: MFdFlags, pages: usize) -> File {
    let file = File::from(memfd_create(c"test", flags | MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len((pages * PAGE) as u64).unwrap();
    file
}

#[test]
fn a_shared_memfd_is_a_segment() {
    let file = memfd(MFdFlags::MFD_ALLOW_SEALING, 8);
    let mapping = Mapping::new(&file, MapFlags::MAP_SHARED);
    let place = find(mapping.addr() + 100, 3 * PAGE).unwrap();
    assert_eq!(place.offset, 100);
    // The same file is the same segment, and cannot shrink any more.
    let again = find(mapping.addr() + 5 * PAGE, 3 * PAGE).unwrap();
    assert_eq!(
        (again.segment.id(), again.offset),
        (place.segment.id(), 5 * PAGE as u64)
    );
    assert!(file.set_len(PAGE as u64).is_err());
    // The shared descriptor is read-only.
    let given = File::from(place.segment.fd().try_clone_to_owned().unwrap());
    assert!(std::os::unix::fs::FileExt::write_at(&given, b"x", 0).is_err());
    assert!(find(mapping.addr() + 6 * PAGE, 3 * PAGE).is_none());
}

#[test]
fn pieces_of_one_mapping_are_joined() {
    let file = memfd(MFdFlags::MFD_ALLOW_SEALING, 8);
    let mapping = Mapping::new(&file, MapFlags::MAP_SHARED);
    // SAFETY: pages of the mapping, to whose bytes there is no reference.
    unsafe { mprotect(mapping.start.byte_add(2 * PAGE), PAGE, ProtFlags::PROT_READ) }.unwrap();
    assert_eq!(find(mapping.addr() + PAGE, 6 * PAGE).unwrap().offset, PAGE as u64);
}

#[test]
fn a_file_that_has_grown_is_another_segment() {
    let file = memfd(MFdFlags::MFD_ALLOW_SEALING, 2);
    let before = Mapping::new(&file, MapFlags::MAP_SHARED);
    let small = find(before.addr(), 2 * PAGE).unwrap();
    file.set_len(8 * PAGE as u64).unwrap();
    let after = Mapping::new(&file, MapFlags::MAP_SHARED);
    let large = find(after.addr(), 8 * PAGE).unwrap();
    assert_ne!(small.segment.id(), large.segment.id());
}

#[test]
fn other_memory_is_no_segment() {
    let heap = Box::new([0_u8; 64]);
    assert!(find(heap.as_ptr().addr(), heap.len()).is_none());
    let sealable = memfd(MFdFlags::MFD_ALLOW_SEALING, 4);
    let private = Mapping::new(&sealable, MapFlags::MAP_PRIVATE);
    assert!(find(private.addr(), PAGE).is_none());
    // A file that can never be sealed.
    let file = memfd(MFdFlags::empty(), 4);
    let unsealed = Mapping::new(&file, MapFlags::MAP_SHARED);
    assert!(find(unsealed.addr(), PAGE).is_none());
    // A file whose descriptor is closed.
    let closed = memfd(MFdFlags::MFD_ALLOW_SEALING, 4);
    let mapping = Mapping::new(&closed, MapFlags::MAP_SHARED);
    drop(closed);
    assert!(find(mapping.addr(), PAGE).is_none());
    assert!(find(usize::MAX - 10, 20).is_none());
}

#[test]
fn maps_are_parsed() {
    let maps = b"55d0c8000000-55d0c8021000 rw-p 00000000 00:00 0                          [heap]
nonsense
7f0000000000-7f0000002000 rw-s 00001000 00:01 77                         /memfd:a b (deleted)
7f0000002000-7f0000004000 r--s 00003000 00:01 77                         /memfd:a b (deleted)
7f0000004000-7f0000006000 rw-s 00000000 00:01 78                         /memfd:c (deleted)
7f0000008000-7f000000a000 rw-s 00000000 00:01 79                         /dev/shm/d
7f000000a000-7f00";
    let at = |start, end| mapped_file(maps, start, end).map(|range| (range.inode.number, range.offset));
    assert_eq!(at(0x7f00_0000_0000, 0x7f00_0000_2000), Some((77, 0x1000)));
    assert_eq!(at(0x7f00_0000_0010, 0x7f00_0000_4000), Some((77, 0x1010)));
    assert_eq!(
        at(0x7f00_0000_3000, 0x7f00_0000_4001),
        None,
        "it continues in another file"
    );
    assert_eq!(at(0x7f00_0000_5000, 0x7f00_0000_9000), None, "a hole");
    assert_eq!(at(0x7f00_0000_8000, 0x7f00_0000_9000), None, "no memfd");
    assert_eq!(at(0x55d0_c800_0000, 0x55d0_c800_1000), None, "private");
    assert_eq!(at(0x7f00_0000_a000, 0x7f00_0000_b000), None, "a line cut off");
}
