//! Every routine at every length, and at every page that faults.

use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

use super::*;
use crate::memory::copy::{between, from, to_peer_visible};

const PAGE: usize = 4096;
const PAGES: usize = 4;

/// Pages, of which some permit no access.
struct Pages(NonNull<u8>);

impl Pages {
    fn new(none: &[usize]) -> Self {
        install();
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let len = NonZeroUsize::new(PAGES * PAGE).unwrap();
        // SAFETY: a new mapping, at an address of the kernel's choosing.
        let start = unsafe { mmap_anonymous(None, len, rights, MapFlags::MAP_PRIVATE) }.unwrap();
        for page in none {
            // SAFETY: a page of the mapping, to which there is no reference.
            unsafe { mprotect(start.byte_add(page * PAGE), PAGE, ProtFlags::PROT_NONE) }.unwrap();
        }
        Self(start.cast())
    }

    fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < PAGES * PAGE);
        // SAFETY: inside the mapping.
        unsafe { self.0.as_ptr().add(offset) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, made in `new`.
        unsafe { munmap(self.0.cast(), PAGES * PAGE) }.unwrap();
    }
}

fn lengths() -> impl Iterator<Item = usize> {
    (0..=300).chain([1024, 3071, 3072, 3073, 4095, 4096, 5000, 8192])
}

#[test]
fn every_length_is_copied_or_faults() {
    install();
    copies_are_exact();
    copies_fault();
}

/// Also without what the processor has.
#[test]
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn every_loop_copies_or_faults() {
    install();
    for string_from in [usize::MAX, 33] {
        arch::select(usize::MAX, string_from);
        copies_are_exact();
        copies_fault();
    }
}

fn copies_are_exact() {
    let source: Vec<u8> = (0..9000_u32).map(|n| (n * 7 + (n >> 8)) as u8).collect();
    let pages = Pages::new(&[]);
    for len in lengths() {
        for shift in [0, 1, 7, 8, 15] {
            let dst = pages.at(100 + shift);
            // SAFETY: within the pages, which nothing else uses.
            unsafe { pages.at(0).write_bytes(0xee, 9000) };
            // SAFETY: as above; `source` is longer.
            unsafe { copy(source.as_ptr().add(shift / 2), dst, len) }.unwrap();
            let mut found = vec![0; len + 2];
            // SAFETY: as above.
            unsafe { from(dst.sub(1), &mut found) }.unwrap();
            assert_eq!(
                (found[0], found[len + 1]),
                (0xee, 0xee),
                "{len} bytes, shifted by {shift}"
            );
            assert_eq!(
                found[1..=len],
                source[shift / 2..][..len],
                "{len} bytes, shifted by {shift}"
            );
        }
    }
}

/// The page that cannot be accessed begins, ends or is within the range.
fn copies_fault() {
    let (none, all) = (Pages::new(&[2]), Pages::new(&[]));
    let bytes = vec![3; 2 * PAGE];
    for len in lengths().filter(|len| *len > 0) {
        for start in [2 * PAGE - len + 1, 2 * PAGE, 3 * PAGE - 1] {
            let (at, mut out) = (none.at(start), vec![0; len]);
            // SAFETY: the pages have no other user; some permit no access.
            unsafe {
                assert_eq!(from(at, &mut out), Err(Fault), "{len} bytes from {start}");
                assert_eq!(to_peer_visible(&bytes[..len], at), Err(Fault), "{len} bytes to {start}");
                assert_eq!(between(at, all.at(0), len), Err(Fault));
                assert_eq!(between(all.at(0), at, len), Err(Fault));
                assert_eq!(probe(at, len), Err(Fault));
            }
        }
        // SAFETY: as above.
        unsafe {
            assert_eq!(
                to_peer_visible(&bytes[..len.min(PAGE)], none.at(2 * PAGE - len.min(PAGE))),
                Ok(())
            );
            assert_eq!(probe(none.at(2 * PAGE - len.min(PAGE)), len.min(PAGE)), Ok(()));
        }
    }
}

#[test]
fn an_atomic_is_performed_or_faults() {
    install();
    let pages = Pages::new(&[1]);
    let swap = |compare, swap| AtomicOp::CompareSwap { compare, swap };
    // SAFETY: aligned words of the pages, without another user.
    unsafe {
        assert_eq!(atomic(pages.at(8), AtomicOp::FetchAdd { add: 5 }), Ok(0));
        assert_eq!(atomic(pages.at(8), swap(4, 9)), Ok(5));
        assert_eq!(atomic(pages.at(8), swap(5, 9)), Ok(5));
        assert_eq!(atomic(pages.at(8), AtomicOp::FetchAdd { add: u64::MAX }), Ok(9));
        assert_eq!(pages.at(8).cast::<u64>().read(), 8);
        assert_eq!(atomic(pages.at(PAGE), AtomicOp::FetchAdd { add: 5 }), Err(Fault));
        assert_eq!(atomic(pages.at(PAGE), swap(0, 1)), Err(Fault));
    }
}
