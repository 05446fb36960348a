//! Errors as C takes them: an errno value returned, or in `errno` beside a null pointer or −1.

use core::ffi::c_int;
use std::ptr;

/// Sets `errno`.
pub(crate) fn set(value: c_int) {
    // SAFETY: it gives the calling thread's own errno, always valid to write.
    unsafe { *libc::__errno_location() = value };
}

/// Sets `errno` and gives the null pointer that goes with it.
pub(crate) fn null<T>(value: c_int) -> *mut T {
    set(value);
    ptr::null_mut()
}

/// Sets `errno` and gives the −1 that goes with it.
pub(crate) fn minus_one(value: c_int) -> c_int {
    set(value);
    -1
}

/// What `errno` value an I/O error stands for.
pub(crate) fn of(error: &std::io::Error) -> c_int {
    error.raw_os_error().unwrap_or(libc::EIO)
}
