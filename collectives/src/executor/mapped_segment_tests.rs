//! Which segments are mapped: each refused offer differs from an accepted one in one property.

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::*;

const LEN: usize = 4096;

/// A memfd of this name with a secret at its beginning, and its offer by this process. It stays
/// open as long as the returned file.
fn offered(name: &str, seals: SealFlag) -> (File, Offer) {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let mut file = File::from(memfd_create(CString::new(name).unwrap().as_c_str(), flags).unwrap());
    file.set_len(LEN as u64).unwrap();
    let secret = *Nonce::random().unwrap().bytes();
    file.write_all(&secret).unwrap();
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    let offer = Offer {
        boot: boot_id().unwrap(),
        process: process::id(),
        descriptor: file.as_raw_fd().cast_unsigned(),
        start: 1 << 20,
        len: LEN as u64,
        secret,
    };
    (file, offer)
}

#[test]
fn a_mapping_is_the_very_memory() {
    let (file, offer) = offered("doorbell", SealFlag::F_SEAL_SHRINK);
    let mapped = MappedSegment::open(offer).unwrap();
    let at = mapped.translate((1 << 20) + 128, 64).unwrap();
    // SAFETY: within the mapping, aligned, and not accessed by others.
    unsafe { at.cast::<u64>().write_volatile(0x1234_5678) };
    let mut bytes = [0; 8];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 128).unwrap();
    assert_eq!(u64::from_ne_bytes(bytes), 0x1234_5678);
}

#[test]
fn only_what_is_wholly_inside_and_aligned_is_given() {
    let (_file, offer) = offered("doorbell", SealFlag::F_SEAL_SHRINK);
    let mapped = MappedSegment::open(offer).unwrap();
    let start = 1 << 20;
    assert!(mapped.translate(start, LEN).is_some() && mapped.translate(start + 64, LEN - 64).is_some());
    for (addr, len) in [
        (start - 64, 64),
        (start + 8, 8),
        (start + 64, LEN),
        (start + LEN as u64, 64),
        (start, usize::MAX),
        (u64::MAX, 1),
    ] {
        assert!(mapped.translate(addr, len).is_none(), "{addr:#x}, {len}");
    }
}

#[test]
fn what_is_not_what_was_offered_is_not_mapped() {
    let (_file, good) = offered("doorbell", SealFlag::F_SEAL_SHRINK);
    let flipped = |bytes: [u8; 16]| bytes.map(|byte| byte ^ 1);
    let wrong = [
        (
            "another kernel",
            Offer {
                boot: flipped(good.boot),
                ..good
            },
        ),
        (
            "another secret",
            Offer {
                secret: flipped(good.secret),
                ..good
            },
        ),
        (
            "no such process",
            Offer {
                process: u32::MAX,
                ..good
            },
        ),
        (
            "no such descriptor",
            Offer {
                descriptor: u32::MAX,
                ..good
            },
        ),
        (
            "longer than the file",
            Offer {
                len: good.len + 1,
                ..good
            },
        ),
        (
            "no longer than the secret",
            Offer {
                len: SECRET as u64,
                ..good
            },
        ),
        ("longer than there can be", Offer { len: u64::MAX, ..good }),
    ];
    assert!(MappedSegment::open(good).is_some());
    for (what, offer) in wrong {
        assert!(MappedSegment::open(offer).is_none(), "{what}");
    }
    let (_file, could_shrink) = offered("doorbell", SealFlag::F_SEAL_GROW);
    assert!(MappedSegment::open(could_shrink).is_none());
    let (_file, another_name) = offered("something", SealFlag::F_SEAL_SHRINK);
    assert!(MappedSegment::open(another_name).is_none());
    let plain = tempfile();
    let file = Offer {
        descriptor: plain.as_raw_fd().cast_unsigned(),
        ..good
    };
    assert!(MappedSegment::open(file).is_none(), "a file with a name");
}

/// An unlinked file in a folder.
fn tempfile() -> File {
    let path = std::env::temp_dir().join(format!("doorbell-mapped-{}", process::id()));
    let file = File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    fs::remove_file(path).unwrap();
    file.set_len(LEN as u64).unwrap();
    file
}

#[test]
fn an_offer_travels_and_none_is_zeros() {
    let (_file, offer) = offered("doorbell", SealFlag::F_SEAL_SHRINK);
    assert_eq!(Offer::from_bytes(&offer.to_bytes()), Some(offer));
    assert_eq!(Offer::from_bytes(&[0; OFFER]), None);
}
