//! Arguments from C, checked.

use core::ffi::{CStr, c_char};
use core::mem::MaybeUninit;
use core::time::Duration;

use crate::status::{DOORBELL_FOREVER, Failure};

type Checked<T> = Result<T, Failure>;

/// The object of a handle.
///
/// # Safety
/// Null, or a handle that is not ended during `'a`.
pub(crate) unsafe fn object<'a, T>(handle: *const T, name: &str) -> Checked<&'a T> {
    // SAFETY: null, or a handle that `store` has made and that is not ended during `'a`.
    unsafe { handle.as_ref() }.ok_or_else(|| is_null(name))
}

/// # Safety
/// Null, or a string that ends with a NUL and does not change during `'a`.
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &str) -> Checked<&'a str> {
    // SAFETY: null, or a string that ends with a NUL and does not change during `'a`.
    unsafe { optional_text(text, name) }?.ok_or_else(|| is_null(name))
}

/// # Safety
/// As of [`text`].
pub(crate) unsafe fn optional_text<'a>(text: *const c_char, name: &str) -> Checked<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, so a string that ends with a NUL and does not change during `'a`.
    let text = unsafe { CStr::from_ptr(text) }.to_str();
    text.map(Some)
        .map_err(|error| Failure::invalid(format!("{name} is not UTF-8: {error}")))
}

/// A place for a result.
///
/// # Safety
/// Null, or memory for a `T` that nothing else uses during `'a`.
pub(crate) unsafe fn result<'a, T>(place: *mut T, name: &str) -> Checked<&'a mut MaybeUninit<T>> {
    // SAFETY: null, or memory for a `T`, written or not, that nothing else uses during `'a`.
    unsafe { place.cast::<MaybeUninit<T>>().as_mut() }.ok_or_else(|| is_null(name))
}

/// Makes an object and stores its handle; a null one if it cannot be made.
///
/// # Safety
/// As of [`result`].
pub(crate) unsafe fn store<T>(place: *mut *mut T, name: &str, make: impl FnOnce() -> Checked<T>) -> Checked<()> {
    // SAFETY: null, or memory for a handle that nothing else uses during this call.
    let place = unsafe { result(place, name) }?;
    let handle = place.write(core::ptr::null_mut());
    *handle = Box::into_raw(Box::new(make()?));
    Ok(())
}

/// The object of a handle that ends here; none of a null one.
///
/// # Safety
/// Null, or a handle of [`store`] that is not used after this.
pub(crate) unsafe fn end<T>(handle: *mut T) -> Option<Box<T>> {
    // SAFETY: not null, so the pointer of `store`'s box, which nothing uses any more.
    (!handle.is_null()).then(|| unsafe { Box::from_raw(handle) })
}

/// The number of an enum of C, which may be one that the enum does not have.
pub(crate) fn number<E>(value: MaybeUninit<E>) -> u32 {
    const { assert!(size_of::<E>() == size_of::<u32>()) };
    // SAFETY: of the same size, and C has passed a number, whatever it is: all bytes are written.
    unsafe { core::mem::transmute_copy(&value) }
}

/// `None` is without end.
pub(crate) fn timeout(ms: u32) -> Option<Duration> {
    (ms != DOORBELL_FOREVER).then(|| Duration::from_millis(ms.into()))
}

fn is_null(name: &str) -> Failure {
    Failure::invalid(format!("{name} is NULL"))
}
