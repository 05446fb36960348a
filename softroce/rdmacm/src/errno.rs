//! librdmacm error conventions: −1 or a null pointer, with the reason in `errno`.

use core::ffi::c_int;
use std::{io, ptr};

pub(crate) type Errno = c_int;

pub(crate) fn set(value: Errno) {
    // SAFETY: returns the calling thread's own errno, always valid to write.
    unsafe { *libc::__errno_location() = value };
}

pub(crate) fn result(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(value) => {
            set(value);
            -1
        }
    }
}

pub(crate) fn null<T>(value: Errno) -> *mut T {
    set(value);
    ptr::null_mut()
}

/// For verbs that return an `errno` value; some set `errno` and return −1.
pub(crate) fn of_verb(returned: c_int) -> Result<(), Errno> {
    match returned {
        0 => Ok(()),
        value if value > 0 => Err(value),
        _ => Err(last()),
    }
}

pub(crate) fn last() -> Errno {
    of(&io::Error::last_os_error())
}

pub(crate) fn of(error: &io::Error) -> Errno {
    error.raw_os_error().unwrap_or(libc::EIO)
}
