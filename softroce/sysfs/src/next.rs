//! The next function of the same name, which this library overrides.
//!
//! No model: a pointer that guards no written data; all threads resolve the same function.

use core::ffi::{CStr, c_char, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};
use core::{ptr, slice};

use crate::path::{self, LONGEST};

/// A function of the libraries behind this one, resolved when first called.
pub(crate) struct Next {
    /// NUL-terminated.
    name: &'static str,
    function: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self {
            name,
            function: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Its address; null if there is none, such as one of a newer libc.
    pub(crate) fn find(&self) -> *mut c_void {
        let known = self.function.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: dlsym(3) takes a NUL-terminated string. Concurrent calls find the same address.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr().cast()) };
        self.function.store(found, Ordering::Relaxed);
        found
    }
}

fn root() -> Option<&'static [u8]> {
    if doorbell_trust::has_elevated_rights() {
        return None;
    }
    // SAFETY: getenv(3) takes a string and returns one, or null. Programs that modify their
    // environment while other threads read it are in error themselves.
    let root = unsafe {
        let value = libc::getenv(c"DOORBELL_VIEW".as_ptr());
        if value.is_null() {
            return None;
        }
        CStr::from_ptr(value).to_bytes()
    };
    root.starts_with(b"/").then_some(root)
}

/// # Safety
/// `path` is null or a string.
#[inline]
pub(crate) unsafe fn with_path<R>(path: *const c_char, next: impl FnOnce(*const c_char) -> R) -> R {
    if path.is_null() {
        return next(path);
    }
    let mut first = [0; 5];
    for (at, byte) in first.iter_mut().enumerate() {
        // SAFETY: within the string: the loop ends at the terminating NUL.
        *byte = unsafe { *path.add(at) } as u8;
        if *byte == 0 {
            break;
        }
    }
    if !path::may_be_redirected(first) {
        return next(path);
    }
    // SAFETY: not null, so a string.
    match path::redirected(unsafe { CStr::from_ptr(path) }) {
        None => next(path),
        Some(redirected) => call_in_folder(path, redirected, next),
    }
}

/// A separate function, so that only redirected calls have the buffer on their stack.
#[cold]
#[inline(never)]
fn call_in_folder<R>(path: *const c_char, (folder, rest): (&[u8], &[u8]), next: impl FnOnce(*const c_char) -> R) -> R {
    let mut buffer = [0; LONGEST];
    let built = root().and_then(|root| path::build_path(root, folder, rest, &mut buffer));
    next(built.map_or(path, CStr::as_ptr))
}

/// Restores the original name of a resolved path in a buffer, which is shorter, and returns its
/// length; a NUL at its end is not moved.
///
/// # Safety
/// The first `len` bytes of `buffer` are initialised, and no other thread uses them.
pub(crate) unsafe fn restore_name(buffer: *mut c_char, len: usize) -> usize {
    // SAFETY: by contract; not used after.
    let original_len =
        root().and_then(|root| path::original_len(root, unsafe { slice::from_raw_parts(buffer.cast(), len) }));
    let Some(original_len) = original_len else { return len };
    // SAFETY: the path's last bytes move to its beginning, all within the `len` bytes.
    unsafe { buffer.copy_from(buffer.add(len - original_len), original_len) };
    original_len
}
