//! Memory of arrays: of the buffer protocol (NumPy, `array.array`, `memoryview`) and of DLPack
//! (PyTorch and others).

mod buffer;
mod dlpack;

use std::slice;

use doorbell::collectives::DataType;
use doorbell::collectives::kernel::Element;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

/// Evaluates an expression with a name for the Rust type of a [`DataType`].
macro_rules! typed {
    ($data:expr, $name:ident => $body:expr) => {
        $crate::array::typed!(@ $data, $name, $body,
            I8: i8, U8: u8, I32: i32, U32: u32, I64: i64, U64: u64, F32: f32, F64: f64,
            F16: doorbell::collectives::kernel::f16, Bf16: doorbell::collectives::kernel::bf16,
            F8E4M3: doorbell::collectives::kernel::F8E4M3, F8E5M2: doorbell::collectives::kernel::F8E5M2)
    };
    (@ $data:expr, $name:ident, $body:expr, $($variant:ident: $type:ty),*) => {
        match $data {
            $(doorbell::collectives::DataType::$variant => {
                type $name = $type;
                $body
            })*
        }
    };
}
pub(crate) use buffer::BufferPlace;
pub(crate) use typed;

/// What keeps the memory: released when dropped, which happens with the interpreter.
#[expect(dead_code, reason = "the fields are there for their drop")]
enum Owner<'py> {
    Buffer(buffer::Buffer<'py>),
    Capsule(Bound<'py, PyAny>),
}

/// What a protocol says of an array.
struct Description<'py> {
    start: *mut u8,
    /// None: its elements are of a type that collectives do not have, which this names.
    data: Result<DataType, String>,
    len: usize,
    is_contiguous: bool,
    is_readonly: bool,
    owner: Owner<'py>,
}

/// An array: aligned elements one after the other.
pub(crate) struct Array<'py> {
    start: *mut u8,
    len: usize,
    data: DataType,
    _owner: Owner<'py>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

impl<'py> Array<'py> {
    pub(crate) fn new(object: &Bound<'py, PyAny>, access: Access, place: &'py mut BufferPlace) -> PyResult<Self> {
        let description = match buffer::describe(object, place) {
            Some(description) => description,
            None => dlpack::describe(object)?.ok_or_else(|| {
                let kind = object.get_type();
                PyTypeError::new_err(format!(
                    "{kind} is no array: expected one of NumPy, PyTorch, or another with the buffer protocol or DLPack"
                ))
            })?,
        };
        let Description {
            start,
            data,
            len,
            is_contiguous,
            is_readonly,
            owner,
        } = description;
        let data = data.map_err(|name| {
            let known: Vec<_> = DataType::ALL.iter().map(|data| data.name()).collect();
            PyTypeError::new_err(format!(
                "elements of {name} cannot be communicated: expected one of {}",
                known.join(", ")
            ))
        })?;
        if !is_contiguous {
            return Err(PyValueError::new_err(
                "the array is not contiguous in C's order: pass a contiguous copy",
            ));
        }
        if is_readonly && access == Access::Write {
            return Err(PyValueError::new_err(
                "the array is read-only, and the result would be written to it",
            ));
        }
        if len > 0 && !start.addr().is_multiple_of(data.bytes()) {
            return Err(PyValueError::new_err(
                "the array is not aligned to its elements: pass an aligned copy",
            ));
        }
        Ok(Self {
            start,
            len,
            data,
            _owner: owner,
        })
    }

    pub(crate) fn data_type(&self) -> DataType {
        self.data
    }

    /// # Panics
    /// When the elements are of another type.
    pub(crate) fn slice<T: Element>(&self) -> &[T] {
        assert_eq!(T::TYPE, self.data);
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the owner keeps the memory, which has so many elements, aligned; every bit
        // pattern is one of `T`. That nothing writes it meanwhile is up to the Python program, as
        // for every extension that releases the interpreter.
        unsafe { slice::from_raw_parts(self.start.cast(), self.len) }
    }

    /// # Panics
    /// When the elements are of another type.
    pub(crate) fn slice_mut<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(T::TYPE, self.data);
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as above; it was not read-only, and `Pair` has no other path to this memory.
        unsafe { slice::from_raw_parts_mut(self.start.cast(), self.len) }
    }

    /// The addresses; none of an empty array.
    fn bytes(&self) -> std::ops::Range<usize> {
        self.start.addr()..self.start.addr() + self.len * self.data.bytes()
    }
}

/// Whether elements follow each other in C's order; the strides are in units of `step` for one.
fn strides_are_contiguous<N>(shape: &[N], strides: &[N], step: N) -> bool
where
    N: Copy + PartialEq + From<u8> + std::ops::Mul<Output = N>,
{
    if shape.contains(&N::from(0)) {
        return true;
    }
    let mut expected = step;
    shape.iter().zip(strides).rev().all(|(&count, &stride)| {
        // The stride of a dimension of one element is never used.
        let fits = count == N::from(1) || stride == expected;
        expected = expected * count;
        fits
    })
}

/// The input and the output of an operation, or one array that is both.
pub(crate) struct Pair<'py> {
    input: Option<Array<'py>>,
    output: Array<'py>,
}

impl<'py> Pair<'py> {
    pub(crate) fn new(
        array: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        [first, second]: &'py mut [BufferPlace; 2],
    ) -> PyResult<Self> {
        let Some(out) = out.filter(|out| !out.is(array)) else {
            let output = Array::new(array, Access::Write, first)?;
            return Ok(Self { input: None, output });
        };
        let input = Array::new(array, Access::Read, first)?;
        let output = Array::new(out, Access::Write, second)?;
        if input.data != output.data {
            return Err(PyTypeError::new_err(format!(
                "the array has elements of {}, and out of {}: expected the same",
                input.data, output.data
            )));
        }
        let (given, got) = (input.bytes(), output.bytes());
        if given.start < got.end && got.start < given.end {
            return Err(PyValueError::new_err(
                "the array and out overlap: leave out away for an operation in place",
            ));
        }
        Ok(Self {
            input: Some(input),
            output,
        })
    }

    pub(crate) fn data_type(&self) -> DataType {
        self.output.data
    }

    /// The input, unless it is the output, too; and the output.
    pub(crate) fn slices<T: Element>(&mut self) -> (Option<&[T]>, &mut [T]) {
        (self.input.as_ref().map(Array::slice), self.output.slice_mut())
    }
}
