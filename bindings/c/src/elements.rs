//! Elements of the types of C, checked.

use core::ffi::c_void;

use doorbell::collectives::{Communicator, Element};

use crate::status::Failure;

/// Evaluates an expression, a [`Result`], with a name for the Rust type of a `doorbell_type`.
macro_rules! typed {
    ($number:expr, $name:ident => $body:expr) => {
        $crate::elements::typed!(@ $number, $name, $body,
            DOORBELL_INT8: i8, DOORBELL_UINT8: u8, DOORBELL_INT32: i32, DOORBELL_UINT32: u32,
            DOORBELL_INT64: i64, DOORBELL_UINT64: u64, DOORBELL_FLOAT32: f32, DOORBELL_FLOAT64: f64,
            DOORBELL_FLOAT16: doorbell::collectives::kernel::f16,
            DOORBELL_BFLOAT16: doorbell::collectives::kernel::bf16,
            DOORBELL_FLOAT8_E4M3: doorbell::collectives::kernel::F8E4M3,
            DOORBELL_FLOAT8_E5M2: doorbell::collectives::kernel::F8E5M2)
    };
    (@ $number:expr, $name:ident, $body:expr, $($value:ident: $type:ty),*) => {
        match $number {
            $(number if number == $crate::communicator::doorbell_type::$value as u32 => {
                type $name = $type;
                $body
            })*
            number => Err($crate::status::Failure::invalid(format!("type {number} is no doorbell_type"))),
        }
    };
}
pub(crate) use typed;

/// The bytes of so many elements. Operations that only move them do not need their type.
pub(crate) fn bytes(count: usize, type_number: u32) -> Result<usize, Failure> {
    let each = typed!(type_number, T => Ok(size_of::<T>()))?;
    count.checked_mul(each).ok_or_else(|| too_many(count))
}

pub(crate) fn of_all(part: usize, comm: &Communicator) -> Result<usize, Failure> {
    part.checked_mul(comm.size() as usize).ok_or_else(|| too_many(part))
}

fn too_many(count: usize) -> Failure {
    Failure::invalid(format!(
        "{count} elements for each are more than there can be in memory"
    ))
}

/// # Safety
/// `data` is that many elements if it is aligned, and nothing writes them during `'a`.
pub(crate) unsafe fn elements<'a, T: Element>(
    data: *const c_void,
    count: usize,
    name: &str,
) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    check::<T>(data, count, name)?;
    // SAFETY: not null, aligned and not too long; that many elements, which nothing writes during
    // `'a`, and of which all bits are values.
    Ok(unsafe { core::slice::from_raw_parts(data.cast(), count) })
}

/// # Safety
/// As of [`elements`], and nothing else uses them during `'a`.
pub(crate) unsafe fn elements_mut<'a, T: Element>(
    data: *mut c_void,
    count: usize,
    name: &str,
) -> Result<&'a mut [T], Failure> {
    if count == 0 {
        return Ok(&mut []);
    }
    check::<T>(data, count, name)?;
    // SAFETY: not null, aligned and not too long; that many elements, which nothing else uses
    // during `'a`, and of which all bits are values.
    Ok(unsafe { core::slice::from_raw_parts_mut(data.cast(), count) })
}

fn check<T>(data: *const c_void, count: usize, name: &str) -> Result<(), Failure> {
    let len = count.checked_mul(size_of::<T>());
    if len.is_none_or(|len| isize::try_from(len).is_err()) {
        return Err(too_many(count));
    }
    if data.is_null() {
        return Err(Failure::invalid(format!("{name} is NULL")));
    }
    if !data.cast::<T>().is_aligned() {
        let align = align_of::<T>();
        return Err(Failure::invalid(format!(
            "{name} is not aligned to {align} bytes, as its type is"
        )));
    }
    Ok(())
}

/// Whether input and output do not overlap.
pub(crate) fn apart(
    input: *const c_void,
    input_len: usize,
    output: *const c_void,
    output_len: usize,
) -> Result<(), Failure> {
    let (from, to) = (input.addr(), output.addr());
    if from.saturating_add(input_len) <= to || to.saturating_add(output_len) <= from {
        return Ok(());
    }
    Err(Failure::invalid("input and output overlap, and it is not in place"))
}
