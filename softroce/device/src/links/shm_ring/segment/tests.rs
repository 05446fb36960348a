//! What is a segment and what is not, and how long.

use std::os::unix::fs::FileExt;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::*;

const LEN: u64 = 3 * PAGE;

fn memfd(flags: MFdFlags, seals: SealFlag) -> File {
    let file = File::from(memfd_create(c"test", flags | MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len(LEN).unwrap();
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    file
}

fn shared() -> File {
    memfd(MFdFlags::MFD_ALLOW_SEALING, SealFlag::F_SEAL_SHRINK)
}

#[test]
fn a_file_is_one_segment_until_its_last_registration_ends() {
    let (file, other) = (shared(), shared());
    let [first, again] = [0, 1].map(|_| of(file.as_fd()).unwrap());
    assert_eq!(first.id(), again.id());
    assert_ne!(first.id(), of(other.as_fd()).unwrap().id());
    let inode = first.inode;
    drop(first);
    assert_eq!(of(file.as_fd()).unwrap().id(), again.id());
    let id = again.id();
    drop(again);
    assert!(!SEGMENTS.lock().contains_key(&inode));
    assert_ne!(of(file.as_fd()).unwrap().id(), id, "a number is not used again");
}

#[test]
fn a_peer_gets_a_descriptor_to_read_or_one_to_write() {
    let file = shared();
    let segment = of(file.as_fd()).unwrap();
    let given = File::from(segment.fd().try_clone_to_owned().unwrap());
    assert!(given.write_at(b"x", 0).is_err());
    File::from(segment.writable().unwrap()).write_at(b"x", 0).unwrap();
    let mut byte = [0];
    given.read_at(&mut byte, 0).unwrap();
    assert_eq!(byte, *b"x");
}

#[test]
fn only_a_whole_sealed_memfd_is_shared() {
    let file = shared();
    assert!(is_segment(file.as_fd(), LEN) && is_segment(file.as_fd(), LEN - PAGE + 1));
    for other in [LEN - PAGE, LEN + 1, 0, u64::MAX - PAGE] {
        assert!(!is_segment(file.as_fd(), other), "{other} bytes");
    }
    let unsealed = memfd(MFdFlags::MFD_ALLOW_SEALING, SealFlag::empty());
    assert!(!is_segment(unsealed.as_fd(), LEN));
    let unsealable = File::from(memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap());
    unsealable.set_len(LEN).unwrap();
    assert!(!is_segment(unsealable.as_fd(), LEN));
    let (pipe, _end) = io::pipe().unwrap();
    assert!(!is_segment(pipe.as_fd(), 0), "no memfd");
}
