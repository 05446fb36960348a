//! How far results of floats may be from the exact ones, and numbers as `f64`.
//!
//! n operands are summed in the type that accumulates with n − 1 roundings of relative error u each: off by at most (n − 1) u Σ|x| / (1 − n u). The product of n has n − 1 roundings too: (n − 1) u |Π x|. An average adds one
//! rounding, a result that is stored as an element one of the element's own unit, and each operand that was multiplied another one. Below the least normal number a rounding is off by half of the least number there is.
//! Here n is at most 8, so that 1 − n u is nothing beside the 1.01 that everything is multiplied with; as are the errors of the exact ones, which are themselves computed in `f64`, where elements are not `f64`.

use doorbell_collectives::kernel::{F8E4M3, F8E5M2, bf16, f16};
use doorbell_cuda::reduce::{DataType, Form, Operator};

/// An operand or a result, as `f64`; none of an integer.
#[must_use]
pub fn value(data: DataType, form: Form, bytes: &[u8], index: usize) -> Option<f64> {
    let at = |size: usize| &bytes[index * size..][..size];
    let of_u16 = || u16::from_ne_bytes([at(2)[0], at(2)[1]]);
    let of_f32 = || f32::from_ne_bytes(at(4).try_into().unwrap_or_default());
    Some(match (data, form) {
        (DataType::F16, Form::Element) => f16::from_bits(of_u16()).to_f64(),
        (DataType::Bf16, Form::Element) => bf16::from_bits(of_u16()).to_f64(),
        (DataType::F8E4M3, Form::Element) => F8E4M3::from_bits(at(1)[0]).to_f32().into(),
        (DataType::F8E5M2, Form::Element) => F8E5M2::from_bits(at(1)[0]).to_f32().into(),
        (DataType::F64, _) => f64::from_ne_bytes(at(8).try_into().unwrap_or_default()),
        _ if data.accumulator() == DataType::F32 => of_f32().into(),
        _ => return None,
    })
}

/// Half of the distance of neighbouring numbers in a form, relative to them, and half of the least number.
fn rounding(data: DataType, form: Form) -> (f64, f64) {
    let half = |bits: i32| 2f64.powi(-bits);
    match (data, form) {
        (DataType::F16, Form::Element) => (half(11), half(25)),
        (DataType::Bf16, Form::Element) => (half(8), half(134)),
        (DataType::F8E4M3, Form::Element) => (half(4), half(10)),
        (DataType::F8E5M2, Form::Element) => (half(3), half(17)),
        (DataType::F64, _) => (half(53), 0.0),
        _ => (half(24), half(150)),
    }
}

/// Whether `result` is as near to the exact reduction of `operands`, numbers of at most 1 before they were multiplied with their factors, as it must be; with `into` the form of the result.
#[must_use]
pub fn holds(data: DataType, operator: Operator, operands: &[(f64, Option<f64>)], into: Form, result: f64) -> bool {
    let exact_of = |&(value, factor): &(f64, Option<f64>)| value * factor.unwrap_or(1.0);
    let (wide, least) = rounding(data, Form::Partial);
    let (unit, least_stored) = rounding(data, into);
    let (own, least_own) = rounding(data, Form::Element);
    let sum: f64 = operands.iter().map(exact_of).sum();
    let scale: f64 = operands.iter().map(|operand| exact_of(operand).abs()).sum();
    // What multiplied operands are off by when the sum begins.
    let multiplied: f64 = operands
        .iter()
        .filter(|operand| operand.1.is_some())
        .map(|operand| exact_of(operand).abs() * (own + wide) + least_own + least)
        .sum();
    let roundings = operands.len() as f64 - 1.0;
    let (exact, off) = match operator {
        Operator::Sum => (sum, roundings * wide * (scale + multiplied) + multiplied),
        Operator::Avg { ranks } if into == Form::Element => {
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
    // In f64 the exact one is off as well, by as much.
    let own_error = if data == DataType::F64 { 2.0 } else { 1.0 };
    let stored = (exact.abs() + off) * unit + least_stored;
    (result - exact).abs() <= 1.01 * (own_error * off + stored)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_off_by_more_than_a_rounding_is_found() {
        let third = f64::from(bf16::from_f32(1.0 / 3.0));
        let two = [(third, None), (third, None)];
        assert!(holds(DataType::Bf16, Operator::Sum, &two, Form::Element, 2.0 * third));
        assert!(!holds(
            DataType::Bf16,
            Operator::Sum,
            &two,
            Form::Element,
            2.0 * third * 1.01
        ));
        assert!(!holds(
            DataType::F32,
            Operator::Sum,
            &two,
            Form::Element,
            2.0 * third * 1.000_001
        ));
        assert!(!holds(DataType::F64, Operator::Max, &two, Form::Element, 2.0 * third));
        assert!(holds(
            DataType::F16,
            Operator::Avg { ranks: 2 },
            &two,
            Form::Partial,
            2.0 * third
        ));
        assert!(!holds(
            DataType::F16,
            Operator::Avg { ranks: 2 },
            &two,
            Form::Element,
            2.0 * third
        ));
    }
}
