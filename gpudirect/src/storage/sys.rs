//! Calls without a safe wrapper: statx(2)'s alignments, and reads and writes of memory by address.

use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};

/// The alignments of memory and of offsets and lengths that O_DIRECT needs; 0 where the file
/// system has no O_DIRECT for the file, and `None` where the kernel does not say.
#[expect(unsafe_code, reason = "no wrapper has these fields")]
pub(super) fn direct_alignment(file: &fs::File) -> Option<(usize, usize)> {
    let mut stat = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the name is an empty C string, and the pointer is to a local statx.
    let status = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            stat.as_mut_ptr(),
        )
    };
    if status != 0 {
        return None;
    }
    // SAFETY: zeroed, and filled in by the kernel: all its fields are numbers.
    let stat = unsafe { stat.assume_init() };
    (stat.stx_mask & libc::STATX_DIOALIGN != 0)
        .then_some((stat.stx_dio_mem_align as usize, stat.stx_dio_offset_align as usize))
}

#[expect(unsafe_code, reason = "no wrapper in the crates that are here")]
pub(super) fn page_size() -> usize {
    // SAFETY: sysconf(3) takes a number.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// pread(2) or pwrite(2), again after EINTR: the bytes read or written.
///
/// # Safety
/// `memory` must have `len` bytes that nothing else accesses meanwhile.
#[expect(unsafe_code, reason = "memory by address")]
pub(super) unsafe fn transfer(fd: RawFd, write: bool, memory: *mut u8, len: usize, offset: u64) -> io::Result<usize> {
    let Ok(offset) = libc::off_t::try_from(offset) else {
        return Err(io::Error::from_raw_os_error(libc::EOVERFLOW));
    };
    loop {
        // SAFETY: the caller's promise.
        let done = unsafe {
            if write {
                libc::pwrite(fd, memory.cast_const().cast(), len, offset)
            } else {
                libc::pread(fd, memory.cast(), len, offset)
            }
        };
        match usize::try_from(done) {
            Ok(done) => return Ok(done),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}
