//! User-defined operators, and type mismatches.

use super::reduce::content;
use super::reference;
use super::{Memory, Random};
use crate::kernel::{Function, Op, Scalar, UserOperator};
use crate::plan::BlockForm::{self, Element, Partial};
use crate::{DataType, ReduceOp};

fn sum() -> UserOperator {
    UserOperator::new("sum of mine", |into: &mut [f32], from: &[f32]| {
        into.iter_mut().zip(from).for_each(|(a, b)| *a += b)
    })
}

#[test]
fn an_operator_over_f32_serves_all_types_with_that_accumulator() {
    let mut random = Random::new(11);
    for data in [
        DataType::F32,
        DataType::F16,
        DataType::Bf16,
        DataType::F8E4M3,
        DataType::F8E5M2,
    ] {
        let function = Function::new(data, sum(), 4).expect("it is over f32");
        for count in 1..=4 {
            for elements in if cfg!(miri) {
                [0, 1, 7, 8, 9]
            } else {
                [0, 1, 7, 100, 1030]
            } {
                for into in [Element, Partial] {
                    let sources: Vec<(BlockForm, Vec<u8>)> = (0..count)
                        .map(|index| {
                            let form = if index % 2 == 0 { Element } else { Partial };
                            (form, content(&mut random, data, form, elements, false))
                        })
                        .collect();
                    let expected = reference::reduce(data, ReduceOp::Sum, 4, &sources, into, elements);
                    let mut memories: Vec<Memory> = sources.iter().map(|(_, bytes)| Memory::new(bytes, 1)).collect();
                    let pointers: Vec<_> = memories
                        .iter_mut()
                        .zip(&sources)
                        .map(|(memory, (form, _))| (*form, memory.at().cast_const()))
                        .collect();
                    let mut own = Memory::new(&vec![0; expected.len()], 1);
                    // SAFETY: all memories have that many elements of their form, and are disjoint.
                    unsafe { function.reduce(&pointers, (into, own.at()), elements) };
                    assert_eq!(
                        own.content(expected.len()),
                        expected,
                        "{data}, {count} sources, {elements} elements into {into:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_result_may_be_one_of_the_sources() {
    let function = Function::new(
        DataType::U64,
        UserOperator::new("or", |a: &mut [u64], b: &[u64]| {
            a.iter_mut().zip(b).for_each(|(a, b)| *a |= b)
        }),
        3,
    )
    .expect("it is over u64");
    let mut inputs = [[1u64; 2000], [2; 2000], [4; 2000]];
    let pointers = inputs
        .each_mut()
        .map(|input| (Element, input.as_mut_ptr().cast::<u8>().cast_const()));
    // SAFETY: arrays of that many; the result is exactly the second.
    unsafe { function.reduce(&pointers, (Element, pointers[1].1.cast_mut()), 2000) };
    assert_eq!((inputs[0], inputs[1], inputs[2]), ([1; 2000], [7; 2000], [4; 2000]));
}

#[test]
fn an_operator_over_another_type_is_refused() {
    let refused = Function::new(DataType::F64, sum(), 2).expect_err("f64 does not accumulate in f32");
    assert_eq!(
        refused.to_string(),
        "the operator \"sum of mine\" is over f32, but f64 accumulates in f64: make it over that type"
    );
    assert_eq!((refused.over, refused.data), (DataType::F32, DataType::F64));
}

#[test]
fn a_scalar_of_another_type_is_refused_and_nothing_written() {
    let function = Function::new(DataType::Bf16, ReduceOp::PreMulSum, 2).expect("built-in operators fit");
    let (from, mut into) = ([1u16; 4], [2u16; 4]);
    // SAFETY: arrays of that many.
    let refused = unsafe { function.scale(Scalar::of(2.0f64), from.as_ptr().cast(), into.as_mut_ptr().cast(), 4) };
    assert_eq!(
        refused.expect_err("bf16 accumulates in f32").to_string(),
        "the scalar is over f64, but bf16 accumulates in f32: make it over that type"
    );
    assert_eq!(into, [2; 4]);
}

#[test]
fn names_are_those_of_the_operators() {
    assert_eq!(Op::from(sum()).name(), "sum of mine");
    assert_eq!(Op::from(ReduceOp::Avg).name(), "avg");
    assert_eq!(
        format!("{:?}", sum()),
        "UserOperator { name: \"sum of mine\", over: F32, .. }"
    );
}
