//! The reference result of a reduction, one element at a time.

use core::cmp::Ordering;
use std::sync::LazyLock;

use half::{bf16, f16};

use crate::plan::BlockForm;
use crate::{DataType, ReduceOp};

/// `2^power`, exactly: Miri's `powi` is inexact at times, as it may be.
fn power_of_two(power: i32) -> f64 {
    f64::from_bits(((1023 + power) as u64) << 52)
}

/// A code's value, by definition; not for infinities and NaNs.
pub(super) fn f8_value(code: u8, fraction: u32, bias: i32) -> f64 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from((code & 0x7f) >> fraction);
    let part = f64::from(code & ((1 << fraction) - 1)) / f64::from(1 << fraction);
    if exponent == 0 {
        sign * part * power_of_two(1 - bias)
    } else {
        sign * (1.0 + part) * power_of_two(exponent - bias)
    }
}

static F8_VALUES: LazyLock<[[f64; 128]; 2]> = LazyLock::new(|| {
    [(3, 7), (2, 15)].map(|(fraction, bias)| core::array::from_fn(|code| f8_value(code as u8, fraction, bias)))
});

/// The code of the nearest number, by searching all codes; ties to the even code; saturating.
pub(super) fn f8_code(data: DataType, value: f32) -> u8 {
    let (values, largest) = if data == DataType::F8E4M3 {
        (&F8_VALUES[0], 0x7e)
    } else {
        (&F8_VALUES[1], 0x7b)
    };
    let magnitude = f64::from(value.abs()).min(values[largest]);
    if value.is_nan() {
        return 0x7f;
    }
    let above = values[..=largest].partition_point(|&value| value < magnitude);
    let below = above.saturating_sub(1);
    let nearest = match (magnitude - values[below]).total_cmp(&(values[above] - magnitude)) {
        Ordering::Less => below,
        Ordering::Greater => above,
        Ordering::Equal => below + below % 2,
    };
    nearest as u8 | if value.is_sign_negative() { 0x80 } else { 0 }
}

fn f8_decode(data: DataType, code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    match (data, code & 0x7f) {
        (DataType::F8E4M3, 0x7f) => f32::NAN,
        (DataType::F8E4M3, magnitude) => (F8_VALUES[0][usize::from(magnitude)] as f32).copysign(sign),
        (_, 0x7c) => f32::INFINITY.copysign(sign),
        (_, 0x7d..) => f32::NAN,
        (_, magnitude) => (F8_VALUES[1][usize::from(magnitude)] as f32).copysign(sign),
    }
}

pub(super) fn decode_f32(data: DataType, form: BlockForm, bytes: &[u8], index: usize) -> f32 {
    let at = |size: usize| &bytes[index * size..][..size];
    let word = || u16::from_ne_bytes(at(2).try_into().expect("two bytes"));
    match (form, data) {
        (BlockForm::Element, DataType::F16) => f16::from_bits(word()).to_f32(),
        (BlockForm::Element, DataType::Bf16) => bf16::from_bits(word()).to_f32(),
        (BlockForm::Element, DataType::F8E4M3 | DataType::F8E5M2) => f8_decode(data, at(1)[0]),
        _ => f32::from_ne_bytes(at(4).try_into().expect("four bytes")),
    }
}

/// The bytes of a number in a form; an element's NaN is the one without a payload.
pub(super) fn encode_f32(data: DataType, form: BlockForm, value: f32) -> Vec<u8> {
    match (form, data) {
        (BlockForm::Element, DataType::F16) => if value.is_nan() { f16::NAN } else { f16::from_f32(value) }
            .to_ne_bytes()
            .to_vec(),
        (BlockForm::Element, DataType::Bf16) => if value.is_nan() {
            bf16::NAN
        } else {
            bf16::from_f32(value)
        }
        .to_ne_bytes()
        .to_vec(),
        (BlockForm::Element, DataType::F8E4M3 | DataType::F8E5M2) => vec![f8_code(data, value)],
        _ => if value.is_nan() { f32::NAN } else { value }.to_ne_bytes().to_vec(),
    }
}

macro_rules! float {
    ($name:ident, $type:ty) => {
        fn $name(op: ReduceOp, ranks: u32, finish: bool, values: impl Iterator<Item = $type>) -> $type {
            // Of two zeros the one with the sign is less.
            let less = |a: $type, b: $type| a < b || (a == b && a.is_sign_negative());
            let reduced = values.reduce(|a, b| match op {
                ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum => a + b,
                ReduceOp::Prod => a * b,
                _ if a.is_nan() || b.is_nan() => <$type>::NAN,
                ReduceOp::Min => {
                    if less(a, b) {
                        a
                    } else {
                        b
                    }
                }
                ReduceOp::Max => {
                    if less(a, b) {
                        b
                    } else {
                        a
                    }
                }
            });
            let reduced = reduced.expect("there is a source");
            if finish && op == ReduceOp::Avg {
                reduced / ranks as $type
            } else {
                reduced
            }
        }
    };
}

float!(float32, f32);
float!(float64, f64);

/// The bytes of `elements` of the result. NaNs among partial results have no payload.
pub(super) fn reduce(
    data: DataType,
    op: ReduceOp,
    ranks: u32,
    sources: &[(BlockForm, Vec<u8>)],
    form: BlockForm,
    elements: usize,
) -> Vec<u8> {
    let finish = form == BlockForm::Element;
    macro_rules! integer {
        ($type:ty) => {{
            let size = size_of::<$type>();
            (0..elements)
                .flat_map(|index| {
                    let values = sources.iter().map(|(_, bytes)| {
                        <$type>::from_ne_bytes(bytes[index * size..][..size].try_into().expect("that many"))
                    });
                    let reduced = values
                        .map(i128::from)
                        .reduce(|a, b| {
                            i128::from(match op {
                                ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum => (a + b) as $type,
                                ReduceOp::Prod => a.wrapping_mul(b) as $type,
                                ReduceOp::Min => a.min(b) as $type,
                                ReduceOp::Max => a.max(b) as $type,
                            })
                        })
                        .expect("there is a source");
                    let reduced = if finish && op == ReduceOp::Avg {
                        reduced / i128::from(ranks)
                    } else {
                        reduced
                    };
                    (reduced as $type).to_ne_bytes()
                })
                .collect()
        }};
    }
    match data.accumulator() {
        DataType::I8 => integer!(i8),
        DataType::U8 => integer!(u8),
        DataType::I32 => integer!(i32),
        DataType::U32 => integer!(u32),
        DataType::I64 => integer!(i64),
        DataType::U64 => integer!(u64),
        DataType::F64 => (0..elements)
            .flat_map(|index| {
                let value = float64(
                    op,
                    ranks,
                    finish,
                    sources
                        .iter()
                        .map(|(_, bytes)| f64::from_ne_bytes(bytes[index * 8..][..8].try_into().expect("eight bytes"))),
                );
                if value.is_nan() { f64::NAN } else { value }.to_ne_bytes()
            })
            .collect(),
        _ => (0..elements)
            .flat_map(|index| {
                encode_f32(
                    data,
                    form,
                    float32(
                        op,
                        ranks,
                        finish,
                        sources
                            .iter()
                            .map(|(form, bytes)| decode_f32(data, *form, bytes, index)),
                    ),
                )
            })
            .collect(),
    }
}

pub(super) fn without_payloads(data: DataType, form: BlockForm, bytes: &[u8]) -> Vec<u8> {
    match (data.accumulator(), form) {
        (DataType::F32, BlockForm::Partial) => {
            let values = bytes.as_chunks::<4>().0.iter().map(|&chunk| f32::from_ne_bytes(chunk));
            values
                .flat_map(|value| if value.is_nan() { f32::NAN } else { value }.to_ne_bytes())
                .collect()
        }
        (DataType::F64, BlockForm::Partial) => {
            let values = bytes.as_chunks::<8>().0.iter().map(|&chunk| f64::from_ne_bytes(chunk));
            values
                .flat_map(|value| if value.is_nan() { f64::NAN } else { value }.to_ne_bytes())
                .collect()
        }
        _ => bytes.to_vec(),
    }
}
