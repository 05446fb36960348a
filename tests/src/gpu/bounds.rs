//! Error bounds of float results against the exact ones, and conversion of numbers to `f64`.
//!
//! n operands are summed in the accumulator type with n − 1 roundings of relative error u each: the
//! error is at most (n − 1) u Σ|x| / (1 − n u). The product of n has n − 1 roundings too: (n − 1) u
//! |Π x|. An average adds one rounding, a result stored as an element one with the element's own
//! unit, and each scaled operand another one. Below the least normal number a rounding error is
//! half of the least number. Here n is at most 8, so that 1 − n u is covered by the factor 1.01
//! applied to everything; so are the errors of the exact results, which are computed in `f64`,
//! unless elements are `f64`.

use doorbell_collectives::kernel::{F8E4M3, F8E5M2, bf16, f16};
use doorbell_cuda::reduce::{DataType, OperandKind, Operator};

/// An operand or a result as `f64`; `None` for integers.
#[must_use]
pub fn value(data: DataType, kind: OperandKind, bytes: &[u8], index: usize) -> Option<f64> {
    let at = |size: usize| &bytes[index * size..][..size];
    let of_u16 = || u16::from_ne_bytes([at(2)[0], at(2)[1]]);
    let of_f32 = || f32::from_ne_bytes(at(4).try_into().unwrap_or_default());
    Some(match (data, kind) {
        (DataType::F16, OperandKind::Element) => f16::from_bits(of_u16()).to_f64(),
        (DataType::Bf16, OperandKind::Element) => bf16::from_bits(of_u16()).to_f64(),
        (DataType::F8E4M3, OperandKind::Element) => F8E4M3::from_bits(at(1)[0]).to_f32().into(),
        (DataType::F8E5M2, OperandKind::Element) => F8E5M2::from_bits(at(1)[0]).to_f32().into(),
        (DataType::F64, _) => f64::from_ne_bytes(at(8).try_into().unwrap_or_default()),
        _ if data.accumulator() == DataType::F32 => of_f32().into(),
        _ => return None,
    })
}

/// Half of the relative distance of adjacent numbers, and half of the least number.
fn rounding(data: DataType, kind: OperandKind) -> (f64, f64) {
    let half = |bits: i32| 2f64.powi(-bits);
    match (data, kind) {
        (DataType::F16, OperandKind::Element) => (half(11), half(25)),
        (DataType::Bf16, OperandKind::Element) => (half(8), half(134)),
        (DataType::F8E4M3, OperandKind::Element) => (half(4), half(10)),
        (DataType::F8E5M2, OperandKind::Element) => (half(3), half(17)),
        (DataType::F64, _) => (half(53), 0.0),
        _ => (half(24), half(150)),
    }
}

/// Whether `result` is within the bound of the exact reduction of `operands`, numbers of at most 1
/// before scaling; `into` is the kind of the result.
#[must_use]
pub fn holds(
    data: DataType,
    operator: Operator,
    operands: &[(f64, Option<f64>)],
    into: OperandKind,
    result: f64,
) -> bool {
    let exact_of = |&(value, factor): &(f64, Option<f64>)| value * factor.unwrap_or(1.0);
    let (wide, least) = rounding(data, OperandKind::Partial);
    let (unit, least_stored) = rounding(data, into);
    let (own, least_own) = rounding(data, OperandKind::Element);
    let sum: f64 = operands.iter().map(exact_of).sum();
    let scale: f64 = operands.iter().map(|operand| exact_of(operand).abs()).sum();
    // The errors of scaled operands before the sum.
    let multiplied: f64 = operands
        .iter()
        .filter(|operand| operand.1.is_some())
        .map(|operand| exact_of(operand).abs() * (own + wide) + least_own + least)
        .sum();
    let roundings = operands.len() as f64 - 1.0;
    let (exact, off) = match operator {
        Operator::Sum => (sum, roundings * wide * (scale + multiplied) + multiplied),
        Operator::Avg { ranks } if into == OperandKind::Element => {
            let (exact, scale) = (sum / f64::from(ranks), scale / f64::from(ranks));
            (exact, (roundings + 1.0) * wide * scale + least)
        }
        Operator::Avg { .. } => (sum, roundings * wide * scale),
        Operator::Prod => {
            let exact: f64 = operands.iter().map(exact_of).product();
            (exact, roundings * (wide * exact.abs() + least))
        }
        Operator::Min => (operands.iter().map(exact_of).fold(f64::INFINITY, f64::min), 0.0),
        Operator::Max => (operands.iter().map(exact_of).fold(f64::NEG_INFINITY, f64::max), 0.0),
    };
    // For f64 the exact result has an error of the same size.
    let own_error = if data == DataType::F64 { 2.0 } else { 1.0 };
    let stored = (exact.abs() + off) * unit + least_stored;
    (result - exact).abs() <= 1.01 * (own_error * off + stored)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_beyond_rounding_are_detected() {
        let third = f64::from(bf16::from_f32(1.0 / 3.0));
        let two = [(third, None), (third, None)];
        assert!(holds(
            DataType::Bf16,
            Operator::Sum,
            &two,
            OperandKind::Element,
            2.0 * third
        ));
        assert!(!holds(
            DataType::Bf16,
            Operator::Sum,
            &two,
            OperandKind::Element,
            2.0 * third * 1.01
        ));
        assert!(!holds(
            DataType::F32,
            Operator::Sum,
            &two,
            OperandKind::Element,
            2.0 * third * 1.000_001
        ));
        assert!(!holds(
            DataType::F64,
            Operator::Max,
            &two,
            OperandKind::Element,
            2.0 * third
        ));
        assert!(holds(
            DataType::F16,
            Operator::Avg { ranks: 2 },
            &two,
            OperandKind::Partial,
            2.0 * third
        ));
        assert!(!holds(
            DataType::F16,
            Operator::Avg { ranks: 2 },
            &two,
            OperandKind::Element,
            2.0 * third
        ));
    }
}
