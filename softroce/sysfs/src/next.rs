//! The function that a call would have reached without this library.

use core::ffi::{CStr, c_char, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};
use core::{ptr, slice};

use crate::path::{self, LONGEST};

/// A function of the libraries behind this one, looked up when it is first called.
pub(crate) struct Next {
    /// With a zero at its end.
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

    /// Its address; null when there is none, as with those of a newer libc.
    pub(crate) fn find(&self) -> *mut c_void {
        let known = self.function.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: dlsym(3) takes a string, which ends with a zero. Threads that come here together find the same.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr().cast()) };
        self.function.store(found, Ordering::Relaxed);
        found
    }
}

/// The folder that stands for `/` where something is shown.
fn root() -> Option<&'static [u8]> {
    // SAFETY: getenv(3) takes a string and gives one, or null. Programs that change their environment while other threads read it are in error themselves.
    let root = unsafe {
        let value = libc::getenv(c"DOORBELL_VIEW".as_ptr());
        if value.is_null() {
            return None;
        }
        CStr::from_ptr(value).to_bytes()
    };
    root.starts_with(b"/").then_some(root)
}

/// Calls `next` with the path that stands for this one: in the folder if it is ours, else as it came.
///
/// # Safety
/// `path` is null or a string.
#[inline]
pub(crate) unsafe fn with_path<R>(path: *const c_char, next: impl FnOnce(*const c_char) -> R) -> R {
    if path.is_null() {
        return next(path);
    }
    let mut first = [0; 5];
    for (at, byte) in first.iter_mut().enumerate() {
        // SAFETY: within the string: the loop ends behind the zero at its end.
        *byte = unsafe { *path.add(at) } as u8;
        if *byte == 0 {
            break;
        }
    }
    if !path::may_be_shown(first) {
        return next(path);
    }
    // SAFETY: not null, so a string.
    match path::shown(unsafe { CStr::from_ptr(path) }) {
        None => next(path),
        Some(shown) => in_folder(path, shown, next),
    }
}

/// Apart, so that only those who need the room have it on their stack.
#[cold]
#[inline(never)]
fn in_folder<R>(path: *const c_char, (folder, rest): (&[u8], &[u8]), next: impl FnOnce(*const c_char) -> R) -> R {
    let mut room = [0; LONGEST];
    let placed = root().and_then(|root| path::place(root, folder, rest, &mut room));
    next(placed.map_or(path, CStr::as_ptr))
}

/// Gives the resolved path in a buffer the name that it has outside, which is shorter, and tells how long it is; any zero at its end is not moved.
///
/// # Safety
/// The first `len` bytes of `buffer` are initialised, and no other thread uses them.
pub(crate) unsafe fn name_outside(buffer: *mut c_char, len: usize) -> usize {
    // SAFETY: by contract; not used after.
    let outside = root().and_then(|root| path::outside(root, unsafe { slice::from_raw_parts(buffer.cast(), len) }));
    let Some(outside) = outside else { return len };
    // SAFETY: the path's last bytes go to its beginning, all within the `len` bytes.
    unsafe { buffer.copy_from(buffer.add(len - outside), outside) };
    outside
}
