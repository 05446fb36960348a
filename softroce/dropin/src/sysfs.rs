//! sysfs access for programs, by open(2), so that `doorbell run` redirects it to the soft devices.

use core::ffi::{CStr, c_char, c_int};
use std::ffi::CString;

use doorbell_verbs_sys::ibv_device;

const MOUNTED: &CStr = c"/sys";

pub(crate) unsafe extern "C" fn get_sysfs_path() -> *const c_char {
    MOUNTED.as_ptr()
}

/// Reads `dir`/`file` into `buf`, with a NUL in place of the newline; returns the length, or −1 and
/// `errno`, also if there is no space for the NUL.
pub(crate) unsafe extern "C" fn read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> c_int {
    // SAFETY: both are strings by contract.
    let (dir, file) = unsafe { (CStr::from_ptr(dir), CStr::from_ptr(file)) };
    let path = [dir.to_bytes(), b"/", file.to_bytes()].concat();
    // SAFETY: `buf` has space for `size` bytes by contract.
    unsafe { read(path, buf, size) }
}

/// As `ibv_read_sysfs_file`, of a device. Only rdma-core's own tools and drivers call it. A
/// printf(3) format with arguments is refused: they would be variadic.
pub(crate) unsafe extern "C" fn read_ibdev_sysfs_file(
    buf: *mut c_char,
    size: usize,
    device: *mut ibv_device,
    file: *const c_char,
) -> c_int {
    // SAFETY: `file` is a string by contract.
    let file = unsafe { CStr::from_ptr(file) }.to_bytes();
    if file.contains(&b'%') {
        return failed(libc::EINVAL);
    }
    // SAFETY: `device` is live by contract, and its name is NUL-terminated.
    let name = unsafe { CStr::from_ptr((*device).name.as_ptr()) }.to_bytes();
    let path = [MOUNTED.to_bytes(), b"/class/infiniband/", name, b"/", file].concat();
    // SAFETY: `buf` has space for `size` bytes by contract.
    unsafe { read(path, buf, size) }
}

fn failed(errno: c_int) -> c_int {
    // SAFETY: the calling thread's own errno, always valid to write.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// # Safety
/// `buf` has space for `size` bytes.
unsafe fn read(path: Vec<u8>, buf: *mut c_char, size: usize) -> c_int {
    let Ok(path) = CString::new(path) else {
        return failed(libc::EINVAL);
    };
    // SAFETY: `path` is a string; the descriptor is closed below, and no other thread knows it.
    let (got, error) = unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if fd < 0 {
            return -1;
        }
        let got = libc::read(fd, buf.cast(), size);
        let error = *libc::__errno_location();
        libc::close(fd);
        (got, error)
    };
    if got < 0 {
        return failed(error);
    }
    let mut len = got as usize;
    // SAFETY: `len` bytes were written; the NUL goes among them, or behind if there is space.
    unsafe {
        if len > 0 && *buf.add(len - 1) == b'\n' as c_char {
            len -= 1;
        }
        if len == size {
            return failed(libc::ENOSPC);
        }
        *buf.add(len) = 0;
    }
    len as c_int
}
