//! The buffer protocol: <https://docs.python.org/3/c-api/buffer.html>.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::{ptr, slice};

use doorbell::collectives::DataType;
use pyo3::ffi::{PyErr_Clear, PyObject};
use pyo3::prelude::*;

use super::{Description, Owner};

/// `Py_buffer`. It belongs to the stable ABI since Python 3.11, and has been the same since 3.3.
#[repr(C)]
struct RawBuffer {
    start: *mut c_void,
    object: *mut PyObject,
    bytes: isize,
    element_bytes: isize,
    is_readonly: c_int,
    dimensions: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    indirections: *mut isize,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut PyObject, buffer: *mut RawBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(buffer: *mut RawBuffer);
}

/// `PyBUF_FULL_RO`: the exporter describes whatever it has.
const ANY: c_int = 0x11c;

impl RawBuffer {
    const NONE: Self = Self {
        start: ptr::null_mut(),
        object: ptr::null_mut(),
        bytes: 0,
        element_bytes: 0,
        is_readonly: 0,
        dimensions: 0,
        format: ptr::null_mut(),
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        indirections: ptr::null_mut(),
        internal: ptr::null_mut(),
    };
}

/// A place for a buffer, which must not move: exporters keep addresses of its own fields in it. On
/// the caller's stack, as a call for eight bytes is shorter than an allocation for it.
pub(crate) struct BufferPlace(RawBuffer);

impl BufferPlace {
    pub(crate) const fn new() -> Self {
        Self(RawBuffer::NONE)
    }
}

/// A buffer that is released when dropped. It borrows the interpreter, so that this thread is
/// attached then, and its place.
pub(super) struct Buffer<'a>(&'a mut RawBuffer, PhantomData<Python<'a>>);

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        // SAFETY: the buffer was filled by `PyObject_GetBuffer`, has not moved, and is released
        // once; the thread is attached, as `'a` lives.
        unsafe { PyBuffer_Release(self.0) }
    }
}

/// None: the object does not have the protocol, or not for its elements.
#[inline]
pub(super) fn describe<'a>(object: &Bound<'a, PyAny>, place: &'a mut BufferPlace) -> Option<Description<'a>> {
    let buffer = &mut place.0;
    // SAFETY: the object is alive, the thread is attached, and the buffer has C's layout.
    if unsafe { PyObject_GetBuffer(object.as_ptr(), buffer, ANY) } != 0 {
        // SAFETY: the thread is attached.
        unsafe { PyErr_Clear() };
        return None;
    }
    let owner = Buffer(buffer, PhantomData);
    let buffer = &*owner.0;
    let element_bytes = buffer.element_bytes.unsigned_abs();
    // SAFETY: the exporter gives null or text.
    let format = (!buffer.format.is_null()).then(|| unsafe { CStr::from_ptr(buffer.format) });
    let format = format.map_or(&b"B"[..], CStr::to_bytes);
    Some(Description {
        start: buffer.start.cast(),
        data: data_type(format, element_bytes).ok_or_else(|| format!("format {:?}", String::from_utf8_lossy(format))),
        len: buffer.bytes.unsigned_abs().checked_div(element_bytes).unwrap_or(0),
        is_contiguous: is_contiguous(buffer),
        is_readonly: buffer.is_readonly != 0,
        owner: Owner::Buffer(owner),
    })
}

fn is_contiguous(buffer: &RawBuffer) -> bool {
    if !buffer.indirections.is_null() {
        return false;
    }
    if buffer.strides.is_null() || buffer.shape.is_null() {
        return true;
    }
    let dimensions = buffer.dimensions.unsigned_abs() as usize;
    // SAFETY: both have as many entries as there are dimensions, while the buffer is held.
    let (shape, strides) = unsafe {
        (
            slice::from_raw_parts(buffer.shape, dimensions),
            slice::from_raw_parts(buffer.strides, dimensions),
        )
    };
    super::strides_are_contiguous(shape, strides, buffer.element_bytes)
}

/// Of the format of the module `struct`, where the bytes of `l` and others depend on the prefix.
fn data_type(format: &[u8], bytes: usize) -> Option<DataType> {
    let kind = match *format {
        [kind] | [b'@' | b'=' | b'<', kind] => kind,
        _ => return None,
    };
    Some(match (kind, bytes) {
        (b'b', 1) => DataType::I8,
        (b'B', 1) => DataType::U8,
        (b'i' | b'l' | b'q' | b'n', 4) => DataType::I32,
        (b'I' | b'L' | b'Q' | b'N', 4) => DataType::U32,
        (b'i' | b'l' | b'q' | b'n', 8) => DataType::I64,
        (b'I' | b'L' | b'Q' | b'N', 8) => DataType::U64,
        (b'e', 2) => DataType::F16,
        (b'f', 4) => DataType::F32,
        (b'd', 8) => DataType::F64,
        _ => return None,
    })
}
