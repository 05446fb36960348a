//! DLPack: <https://dmlc.github.io/dlpack/latest/>, with and without versions.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::slice;

use doorbell::collectives::DataType;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use super::{Description, Owner};

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut u8,
    device: Device,
    dimensions: i32,
    element: Element,
    shape: *const i64,
    /// Null: contiguous. In elements.
    strides: *const i64,
    byte_offset: u64,
}

/// `DLDevice`.
#[repr(C)]
struct Device {
    kind: i32,
    _index: i32,
}

/// `DLDataType`.
#[repr(C)]
struct Element {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    major: u32,
    _minor: u32,
    _context: *mut c_void,
    _deleter: *mut c_void,
    flags: u64,
    tensor: Tensor,
}

const MAJOR: u32 = 1;
const READ_ONLY: u64 = 1;
/// `kDLCPU`.
const CPU: i32 = 1;

/// None: the object does not have the protocol.
pub(super) fn describe<'py>(object: &Bound<'py, PyAny>) -> PyResult<Option<Description<'py>>> {
    let py = object.py();
    let Some(export) = object.getattr_opt("__dlpack__")? else {
        return Ok(None);
    };
    let (kind, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    if kind != CPU {
        return Err(PyTypeError::new_err(
            "the array is not in the memory of the host: copy it there",
        ));
    }
    let version = PyDict::new(py);
    version.set_item("max_version", (MAJOR, 0))?;
    let exported = match export.call((), Some(&version)) {
        // An exporter of before there were versions.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => export.call0(),
        exported => exported,
    }?;
    // It frees the tensor when it is dropped, as it is not consumed.
    let capsule = exported.cast_into::<PyCapsule>()?;
    let (tensor, is_readonly): (NonNull<Tensor>, _) = match capsule.pointer_checked(Some(c"dltensor_versioned")) {
        Ok(pointer) => {
            // SAFETY: a capsule of this name points to this structure, and lives as long as it.
            let versioned: &Versioned = unsafe { pointer.cast().as_ref() };
            if versioned.major != MAJOR {
                return Err(PyValueError::new_err(format!(
                    "the array is of version {} of DLPack: expected {MAJOR}",
                    versioned.major
                )));
            }
            ((&versioned.tensor).into(), versioned.flags & READ_ONLY != 0)
        }
        Err(_) => (capsule.pointer_checked(Some(c"dltensor"))?.cast(), false),
    };
    // SAFETY: a managed tensor begins with its tensor, and lives as long as its capsule.
    let tensor = unsafe { tensor.as_ref() };
    let (shape, strides) = sizes(tensor);
    let Element { code, bits, lanes } = tensor.element;
    let offset = usize::try_from(tensor.byte_offset)?;
    Ok(Some(Description {
        start: tensor.data.wrapping_add(offset),
        data: data_type(&tensor.element).ok_or_else(|| format!("DLPack's type {code} with {bits} bits × {lanes}")),
        len: shape.iter().product::<i64>().unsigned_abs() as usize,
        is_contiguous: strides.is_none_or(|strides| super::strides_are_contiguous(shape, strides, 1)),
        is_readonly,
        owner: Owner::Capsule(capsule.into_any()),
    }))
}

/// The shape, and the strides where there are any.
fn sizes(tensor: &Tensor) -> (&[i64], Option<&[i64]>) {
    let dimensions = tensor.dimensions.unsigned_abs() as usize;
    if dimensions == 0 {
        return (&[], None);
    }
    // SAFETY: both have as many entries as there are dimensions; strides may be null.
    unsafe {
        let strides = (!tensor.strides.is_null()).then(|| slice::from_raw_parts(tensor.strides, dimensions));
        (slice::from_raw_parts(tensor.shape, dimensions), strides)
    }
}

fn data_type(element: &Element) -> Option<DataType> {
    // `DLDataTypeCode`.
    Some(match (element.lanes, element.code, element.bits) {
        (1, 0, 8) => DataType::I8,
        (1, 0, 32) => DataType::I32,
        (1, 0, 64) => DataType::I64,
        (1, 1, 8) => DataType::U8,
        (1, 1, 32) => DataType::U32,
        (1, 1, 64) => DataType::U64,
        (1, 2, 16) => DataType::F16,
        (1, 2, 32) => DataType::F32,
        (1, 2, 64) => DataType::F64,
        (1, 4, 16) => DataType::Bf16,
        (1, 10, 8) => DataType::F8E4M3,
        (1, 12, 8) => DataType::F8E5M2,
        _ => return None,
    })
}
