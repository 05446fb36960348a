//! Conversions from the types of collectives to those of the reduction kernels.

use doorbell_cuda::reduce::{self, Operator};

use crate::kernel::Element;
use crate::plan::BlockForm;
use crate::types::{DataType, ReduceOp};

pub(super) const fn data(data: DataType) -> reduce::DataType {
    match data {
        DataType::I8 => reduce::DataType::I8,
        DataType::U8 => reduce::DataType::U8,
        DataType::I32 => reduce::DataType::I32,
        DataType::U32 => reduce::DataType::U32,
        DataType::I64 => reduce::DataType::I64,
        DataType::U64 => reduce::DataType::U64,
        DataType::F16 => reduce::DataType::F16,
        DataType::Bf16 => reduce::DataType::Bf16,
        DataType::F32 => reduce::DataType::F32,
        DataType::F64 => reduce::DataType::F64,
        DataType::F8E4M3 => reduce::DataType::F8E4M3,
        DataType::F8E5M2 => reduce::DataType::F8E5M2,
    }
}

pub(super) const fn form(form: BlockForm) -> reduce::OperandKind {
    match form {
        BlockForm::Element => reduce::OperandKind::Element,
        BlockForm::Partial => reduce::OperandKind::Partial,
    }
}

/// The operator for sources that have already been scaled.
pub(super) const fn operator(op: ReduceOp, ranks: u32) -> Operator {
    match op {
        ReduceOp::Sum | ReduceOp::PreMulSum => Operator::Sum,
        ReduceOp::Prod => Operator::Prod,
        ReduceOp::Min => Operator::Min,
        ReduceOp::Max => Operator::Max,
        ReduceOp::Avg => Operator::Avg { ranks },
    }
}

/// The bytes of elements, for copies to GPUs.
#[must_use]
pub fn as_bytes<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: elements have no padding.
    unsafe { core::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// The same, mutable.
#[must_use]
pub fn as_bytes_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and every bit pattern is an element.
    unsafe { core::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}
