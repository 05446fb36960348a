//! Operators: the five that have names, and those of `ncclRedOpCreatePreMulSum`.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};

use doorbell_collectives::communicator::Reduction;
use doorbell_collectives::kernel::{F8E4M3, F8E5M2, bf16, f16};
use doorbell_collectives::{DataType, PreMulSum, ReduceOp};
use doorbell_cuda::{DevicePtr, Foreign, HostMemory, Memory, Stream};

use crate::failure::Failure;

const NAMED: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Max,
    ReduceOp::Min,
    ReduceOp::Avg,
];
const IN_DEVICE: c_int = 0;
const HOST_IMMEDIATE: c_int = 1;

/// An operator of an operation.
#[derive(Debug, Clone)]
pub(crate) enum Operator {
    Known(Reduction),
    /// PreMulSum by a scalar of this type, in device memory when the operation is enqueued.
    ScaledBy(DevicePtr, DataType),
}

/// The operators that a communicator's program has created.
#[derive(Default)]
pub(crate) struct Operators(Mutex<Vec<Option<(DataType, Operator)>>>);

impl Operators {
    /// The operator of this number for elements of this type.
    pub(crate) fn get(&self, number: c_int, data: DataType) -> Result<Operator, Failure> {
        let none = || Failure::invalid_argument(format!("there is no operator {number}"));
        let number = usize::try_from(number).map_err(|_| none())?;
        let Some(created) = number.checked_sub(NAMED.len()) else {
            return Ok(Operator::Known(NAMED[number].into()));
        };
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (of, operator) = all.get(created).and_then(Option::as_ref).ok_or_else(none)?;
        match *of == data {
            true => Ok(operator.clone()),
            false => Err(Failure::invalid_argument(format!(
                "operator {number} was created for {of}, and the elements are {data}"
            ))),
        }
    }

    /// Creates an operator, and returns its number.
    ///
    /// # Safety
    /// If the scalar is in host memory, an element of the type can be read there.
    pub(crate) unsafe fn create(
        &self,
        scalar: *const c_void,
        data: DataType,
        residence: c_int,
    ) -> Result<c_int, Failure> {
        let operator = match residence {
            // SAFETY: the caller's promise.
            HOST_IMMEDIATE => Operator::Known(unsafe { scaled(scalar, data) }),
            IN_DEVICE => Operator::ScaledBy(DevicePtr(scalar.addr() as u64), data),
            other => {
                return Err(Failure::invalid_argument(format!(
                    "there is no scalar residence {other}"
                )));
            }
        };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = all.iter().position(Option::is_none).unwrap_or(all.len());
        let number =
            c_int::try_from(place + NAMED.len()).map_err(|_| Failure::invalid_usage("there are too many operators"))?;
        match all.get_mut(place) {
            Some(free) => *free = Some((data, operator)),
            None => all.push(Some((data, operator))),
        }
        Ok(number)
    }

    pub(crate) fn destroy(&self, number: c_int) -> Result<(), Failure> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let created = usize::try_from(number)
            .ok()
            .and_then(|number| number.checked_sub(NAMED.len()));
        let entry = created.and_then(|created| all.get_mut(created)).and_then(Option::take);
        match entry {
            Some(_) => Ok(()),
            None => Err(Failure::invalid_argument(format!("operator {number} was not created"))),
        }
    }
}

/// Bytes of the longest scalar.
pub(crate) const SCALAR: usize = 8;

impl Operator {
    /// The reduction of an operation in this stream, after the work before it. A scalar goes
    /// through `place`, as the driver may wait for all work of the device where it allocates such
    /// memory.
    ///
    /// # Safety
    /// A scalar in device memory is one of its type.
    pub(crate) unsafe fn read(&self, place: &Mutex<HostMemory>, stream: &Stream) -> Result<Reduction, Failure> {
        let (start, data) = match self {
            Self::Known(reduction) => return Ok(reduction.clone()),
            Self::ScaledBy(start, data) => (*start, *data),
        };
        if stream.is_capturing()? {
            return Err(Failure::invalid_usage(
                "an operator's scalar in device memory cannot be read in a stream that is being captured into a \
                 graph: create it with ncclScalarHostImmediate",
            ));
        }
        // SAFETY: the caller's promise.
        let scalar = unsafe { Foreign::name(stream.context(), start, data.bytes())? };
        let place = place.lock().unwrap_or_else(PoisonError::into_inner);
        stream.copy(place.span(..data.bytes())?, scalar.all())?;
        stream.synchronize()?;
        let mut bytes = [0; SCALAR];
        place.copy_out(0, &mut bytes[..data.bytes()])?;
        // SAFETY: the bytes of one.
        Ok(unsafe { scaled(bytes.as_ptr().cast(), data) })
    }
}

/// The sum of elements times a scalar, which has their type and is converted to the accumulator's.
///
/// # Safety
/// An element of the type can be read at `scalar`.
unsafe fn scaled(scalar: *const c_void, data: DataType) -> Reduction {
    macro_rules! read {
        ($type:ty) => {
            // SAFETY: the caller's promise; every bit pattern is a value of these types.
            unsafe { scalar.cast::<$type>().read_unaligned() }
        };
    }
    match data {
        DataType::I8 => PreMulSum(read!(i8)).into(),
        DataType::U8 => PreMulSum(read!(u8)).into(),
        DataType::I32 => PreMulSum(read!(i32)).into(),
        DataType::U32 => PreMulSum(read!(u32)).into(),
        DataType::I64 => PreMulSum(read!(i64)).into(),
        DataType::U64 => PreMulSum(read!(u64)).into(),
        DataType::F16 => PreMulSum(read!(f16).to_f32()).into(),
        DataType::Bf16 => PreMulSum(read!(bf16).to_f32()).into(),
        DataType::F32 => PreMulSum(read!(f32)).into(),
        DataType::F64 => PreMulSum(read!(f64)).into(),
        DataType::F8E4M3 => PreMulSum(read!(F8E4M3).to_f32()).into(),
        DataType::F8E5M2 => PreMulSum(read!(F8E5M2).to_f32()).into(),
    }
}
