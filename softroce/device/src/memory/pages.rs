//! Populates pages and checks mappings before the device relies on them.

use std::sync::OnceLock;

use nix::errno::Errno;

use super::RegisterError;

/// Populates the pages of a range: what is not mapped or permitted is an error here, not a signal
/// later. Kernels before 5.14 cannot populate; there only the mapping is checked.
pub(super) fn populate(addr: usize, len: usize, write: bool) -> Result<(), RegisterError> {
    let page = page_size();
    let start = addr & !(page - 1);
    let Some(end) = addr.checked_add(len).and_then(|end| end.checked_next_multiple_of(page)) else {
        return Err(RegisterError::Range);
    };
    if !can_populate() {
        return all_mapped(start, end, page);
    }
    let advice = if write {
        libc::MADV_POPULATE_WRITE
    } else {
        libc::MADV_POPULATE_READ
    };
    loop {
        return match advise(start, end - start, advice) {
            Ok(()) => Ok(()),
            Err(Errno::EINTR | Errno::EAGAIN) => continue,
            // For a mapped range it means that the machine is out of memory; otherwise a hole.
            Err(Errno::ENOMEM) => all_mapped(start, end, page).and(Err(RegisterError::OutOfMemory)),
            Err(_) => Err(RegisterError::Fault),
        };
    }
}

/// Whether the kernel has MADV_POPULATE_READ, tried on a mapped page.
fn can_populate() -> bool {
    static CAN: OnceLock<bool> = OnceLock::new();
    *CAN.get_or_init(|| {
        let here = 0_u8;
        let page = page_size();
        advise((&raw const here).addr() & !(page - 1), page, libc::MADV_POPULATE_READ).is_ok()
    })
}

fn advise(start: usize, len: usize, advice: libc::c_int) -> Result<(), Errno> {
    // SAFETY: populating changes no content and no mapping; the kernel refuses what is not mapped.
    Errno::result(unsafe { libc::madvise(std::ptr::without_provenance_mut(start), len, advice) }).map(drop)
}

/// Whether every page of `start..end` is mapped: mincore(2) fails on a hole.
fn all_mapped(start: usize, end: usize, page: usize) -> Result<(), RegisterError> {
    const PAGES: usize = 4096;
    let mut resident = [0_u8; PAGES];
    for chunk in (start..end).step_by(PAGES * page) {
        let len = (end - chunk).min(PAGES * page);
        // SAFETY: it writes one byte per page into `resident`, which has room for PAGES.
        let result = unsafe { libc::mincore(std::ptr::without_provenance_mut(chunk), len, resident.as_mut_ptr()) };
        if Errno::result(result).is_err() {
            return Err(RegisterError::Fault);
        }
    }
    Ok(())
}

fn page_size() -> usize {
    static SIZE: OnceLock<usize> = OnceLock::new();
    *SIZE.get_or_init(|| {
        // SAFETY: sysconf(3) has no preconditions.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(size).unwrap_or(4096)
    })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    use super::*;

    /// Three pages of which the middle one has the protection `middle`, or is unmapped for `None`.
    fn with_middle(middle: Option<ProtFlags>, test: impl FnOnce(usize, usize)) {
        let page = page_size();
        let len = NonZeroUsize::new(3 * page).unwrap();
        let rw = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new private mapping, at an address of the kernel's choosing.
        let base = unsafe { mmap_anonymous(None, len, rw, MapFlags::MAP_PRIVATE) }.unwrap();
        // SAFETY: the middle page lies in the mapping just made, which nothing refers to.
        let second = unsafe { base.byte_add(page) };
        if let Some(protection) = middle {
            // SAFETY: as above.
            unsafe { nix::sys::mman::mprotect(second, page, protection) }.unwrap();
        } else {
            // SAFETY: as above.
            unsafe { munmap(second, page) }.unwrap();
        }
        test(base.addr().get(), page);
        // SAFETY: the whole of it is ours and nothing refers to it; a hole in the range is allowed.
        unsafe { munmap(base, 3 * page) }.unwrap();
    }

    #[test]
    fn a_hole_is_found() {
        with_middle(None, |base, page| {
            assert_eq!(populate(base, 3 * page, false), Err(RegisterError::Fault));
            assert_eq!(all_mapped(base, base + 3 * page, page), Err(RegisterError::Fault));
            assert_eq!(populate(base + 1, page - 1, true), Ok(()));
            assert_eq!(all_mapped(base, base + page, page), Ok(()));
        });
    }

    #[test]
    fn read_only_memory_can_be_read_only() {
        with_middle(Some(ProtFlags::PROT_READ), |base, page| {
            assert_eq!(populate(base, 3 * page, false), Ok(()));
            assert_eq!(populate(base, 3 * page, true), Err(RegisterError::Fault));
            assert_eq!(populate(base + page - 1, 2, true), Err(RegisterError::Fault));
        });
        with_middle(Some(ProtFlags::PROT_NONE), |base, page| {
            assert_eq!(populate(base, 3 * page, false), Err(RegisterError::Fault));
        });
    }

    #[test]
    fn the_end_of_the_address_space_is_no_overflow() {
        assert_eq!(populate(usize::MAX - 10, 10, false), Err(RegisterError::Range));
    }
}
