//! C error conventions: an errno value returned, or `errno` set with a null pointer or −1 returned.

use core::ffi::c_int;
use std::ptr;

pub(crate) fn set(value: c_int) {
    // SAFETY: returns the calling thread's own errno, always valid to write.
    unsafe { *libc::__errno_location() = value };
}

pub(crate) fn null<T>(value: c_int) -> *mut T {
    set(value);
    ptr::null_mut()
}

pub(crate) fn minus_one(value: c_int) -> c_int {
    set(value);
    -1
}

pub(crate) fn of(error: &std::io::Error) -> c_int {
    error.raw_os_error().unwrap_or(libc::EIO)
}
