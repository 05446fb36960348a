//! Every type, operator, number of sources, form, alias, alignment and instruction set.

use super::reference::{self, decode_f32};
use super::{Memory, Random};
use crate::kernel::versions::Version;
use crate::kernel::{Function, Scalar};
use crate::plan::BlockForm::{self, Element, Partial};
use crate::{DataType, ReduceOp};

const SHORT: &[usize] = if cfg!(miri) {
    &[17]
} else {
    &[0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 200]
};
const LONG: &[usize] = &[513, 1024, 1025, 4097];

/// Random bits, or every second time numbers in the middle of the type's range.
pub(super) fn content(random: &mut Random, data: DataType, form: BlockForm, elements: usize, any: bool) -> Vec<u8> {
    let size = if form == Element {
        data.bytes()
    } else {
        data.accumulator().bytes()
    };
    if any {
        return (0..elements * size).map(|_| random.next() as u8).collect();
    }
    let ordinary = |random: &mut Random| match data.accumulator() {
        DataType::F32 => reference::encode_f32(data, form, random.unit() as f32),
        DataType::F64 => random.unit().to_ne_bytes().to_vec(),
        _ => (random.next() as i64 % 100).to_ne_bytes()[..size].to_vec(),
    };
    (0..elements).flat_map(|_| ordinary(random)).collect()
}

#[expect(clippy::too_many_arguments, reason = "the dimensions of a sweep")]
fn compare(
    random: &mut Random,
    function: &Function,
    data: DataType,
    op: ReduceOp,
    count: usize,
    elements: usize,
    any: bool,
    what: &str,
) {
    let form = |random: &mut Random| if random.below(3) == 0 { Partial } else { Element };
    let sources: Vec<(BlockForm, Vec<u8>)> = (0..count)
        .map(|_| {
            let form = form(random);
            (form, content(random, data, form, elements, any))
        })
        .collect();
    let into = form(random);
    let expected = reference::reduce(data, op, function.ranks, &sources, into, elements);

    const CANARY: [u8; 64] = [0xa5; 64];
    let mut memories: Vec<Memory> = sources
        .iter()
        .map(|(_, bytes)| Memory::new(bytes, random.below(64)))
        .collect();
    // The result goes to a source, or to memory that must not be written beyond its end.
    let alias =
        Some(random.below(2 * count)).filter(|&index| sources.get(index).is_some_and(|(form, _)| *form == into));
    let mut own = Memory::new(&[vec![0; expected.len()], CANARY.to_vec()].concat(), random.below(64));
    let pointers: Vec<_> = memories
        .iter_mut()
        .zip(&sources)
        .map(|(memory, (form, _))| (*form, memory.at().cast_const()))
        .collect();
    let to = alias.map_or(own.at(), |index| pointers[index].1.cast_mut());
    // SAFETY: every memory has that many elements of its form, and they are disjoint except for the
    // alias, which is exact.
    unsafe { function.reduce(&pointers, (into, to), elements) };

    let result = alias.map_or(&own, |index| &memories[index]).content(expected.len());
    let result = reference::without_payloads(data, into, result);
    let size = function.bytes(into);
    if let Some(at) = (0..elements).find(|at| result[at * size..][..size] != expected[at * size..][..size]) {
        let forms: Vec<_> = sources.iter().map(|(form, _)| form).collect();
        panic!(
            "{what} {data} {op}, {forms:?} into {into:?} (alias {alias:?}): element {at} of {elements} is {:?}, must be {:?}",
            &result[at * size..][..size],
            &expected[at * size..][..size]
        );
    }
    assert_eq!(
        &own.content(expected.len() + 64)[expected.len()..],
        &CANARY,
        "{what} {data} {op}: written beyond the end"
    );
    for (index, (memory, (_, bytes))) in memories.iter().zip(&sources).enumerate() {
        assert!(
            alias == Some(index) || memory.content(bytes.len()) == bytes,
            "{what} {data} {op}: a source was written"
        );
    }
}

fn sweep(lengths: &[usize], counts: &[usize]) {
    let mut random = Random::new(lengths.len() as u64);
    for version in Version::available() {
        for &data in DataType::ALL {
            for &op in ReduceOp::ALL {
                for &count in counts {
                    let ranks = [count as u32, 3, 300, 70_000][random.below(4)];
                    let function =
                        Function::with_version(data, op.into(), ranks, version).expect("built-in operators fit");
                    for &elements in lengths {
                        for any in [false, true] {
                            compare(
                                &mut random,
                                &function,
                                data,
                                op,
                                count,
                                elements,
                                any,
                                &format!("{version:?}"),
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn agrees_with_the_reference() {
    sweep(SHORT, if cfg!(miri) { &[1, 3] } else { &[1, 2, 3, 4, 5, 6, 7, 8] });
}

#[test]
#[cfg_attr(miri, ignore = "it takes an hour there")]
fn agrees_with_the_reference_beyond_a_tile() {
    sweep(LONG, &[1, 2, 5]);
}

#[test]
fn every_supported_version_is_available() {
    let best = Version::best();
    assert_eq!(Version::available().next_back(), Some(best));
    #[cfg(target_arch = "x86_64")]
    assert_eq!(
        best != Version::Baseline,
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")
    );
}

/// (n − 1) u Σ|x|, and half a unit of the last place where elements are rounded.
#[test]
fn sums_are_within_the_bound_of_their_precision() {
    let mut random = Random::new(3);
    let (count, elements) = (8, if cfg!(miri) { 20 } else { 1000 });
    for (data, unit) in [
        (DataType::F32, 0.0),
        (DataType::F16, 2f64.powi(-11)),
        (DataType::Bf16, 2f64.powi(-8)),
        (DataType::F8E4M3, 2f64.powi(-4)),
        (DataType::F8E5M2, 2f64.powi(-3)),
    ] {
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Prod] {
            let mut sources: Vec<Memory> = (0..count)
                .map(|_| Memory::new(&content(&mut random, data, Element, elements, false), 0))
                .collect();
            let mut into = Memory::new(&vec![0; elements * data.bytes()], 0);
            let function = Function::new(data, op, 8).expect("built-in operators fit");
            let pointers: Vec<_> = sources
                .iter_mut()
                .map(|memory| (Element, memory.at().cast_const()))
                .collect();
            // SAFETY: all memories have that many elements and are disjoint.
            unsafe { function.reduce(&pointers, (Element, into.at()), elements) };
            for index in 0..elements {
                let value = |memory: &Memory| {
                    f64::from(decode_f32(
                        data,
                        Element,
                        memory.content(elements * data.bytes()),
                        index,
                    ))
                };
                let values = || sources.iter().map(value);
                // Errors of eight-term sums and products in f64 are negligible beside those of f32.
                let (exact, scale) = match op {
                    ReduceOp::Prod => (values().product::<f64>(), values().product::<f64>().abs()),
                    ReduceOp::Avg => (values().sum::<f64>() / 8.0, values().map(f64::abs).sum::<f64>() / 8.0),
                    _ => (values().sum::<f64>(), values().map(f64::abs).sum::<f64>()),
                };
                let least = match data {
                    DataType::F32 => f64::from(f32::MIN_POSITIVE),
                    DataType::F16 => 2f64.powi(-24),
                    DataType::Bf16 => f64::from(f32::MIN_POSITIVE),
                    DataType::F8E4M3 => 2f64.powi(-9),
                    _ => 2f64.powi(-16),
                };
                let bound = 8.0 * 2f64.powi(-24) * scale * 1.001 + unit * exact.abs() * 1.001 + least;
                let (got, off) = (value(&into), (value(&into) - exact).abs());
                assert!(
                    off <= bound,
                    "{data} {op}: {got} for {exact}, off by {off}, bound {bound}"
                );
            }
        }
    }
}

/// `f64` against sums that are exact as integers: multiples of 2⁻⁴⁰.
#[test]
fn sums_of_f64_are_within_their_bound() {
    let mut random = Random::new(4);
    let elements = if cfg!(miri) { 20 } else { 500 };
    let inputs: Vec<Vec<i64>> = (0..8)
        .map(|_| (0..elements).map(|_| random.next() as i64 >> 12).collect())
        .collect();
    let unit = 1.0 / (1u64 << 40) as f64;
    let mut sources: Vec<Memory> = inputs
        .iter()
        .map(|input| {
            Memory::new(
                &input
                    .iter()
                    .flat_map(|&value| (value as f64 * unit).to_ne_bytes())
                    .collect::<Vec<_>>(),
                8,
            )
        })
        .collect();
    let mut into = Memory::new(&vec![0; elements * 8], 8);
    let pointers: Vec<_> = sources
        .iter_mut()
        .map(|memory| (Element, memory.at().cast_const()))
        .collect();
    let function = Function::new(DataType::F64, ReduceOp::Sum, 8).expect("built-in operators fit");
    // SAFETY: all memories have that many elements and are disjoint.
    unsafe { function.reduce(&pointers, (Element, into.at()), elements) };
    for (index, chunk) in into.content(elements * 8).as_chunks::<8>().0.iter().enumerate() {
        let (exact, scale) = inputs.iter().fold((0i128, 0i128), |(sum, scale), input| {
            (sum + i128::from(input[index]), scale + i128::from(input[index].abs()))
        });
        let off = ((f64::from_ne_bytes(*chunk) / unit) as i128 - exact).abs();
        assert!(off as f64 <= 7.0 * 2f64.powi(-53) * scale as f64, "off by {off} units");
    }
}

#[test]
fn nan_is_the_result_of_min_and_max_and_minus_zero_is_less() {
    for version in Version::available() {
        for (op, a, b, expected) in [
            (ReduceOp::Min, f32::NAN, 1.0, f32::NAN),
            (ReduceOp::Min, 1.0, -f32::NAN, f32::NAN),
            (ReduceOp::Max, f32::from_bits(0xffa0_0001), f32::INFINITY, f32::NAN),
            (ReduceOp::Max, 1.0, f32::NAN, f32::NAN),
            (ReduceOp::Min, 0.0, -0.0, -0.0),
            (ReduceOp::Min, -0.0, 0.0, -0.0),
            (ReduceOp::Max, 0.0, -0.0, 0.0),
            (ReduceOp::Max, -0.0, 0.0, 0.0),
            (ReduceOp::Sum, f32::INFINITY, f32::NEG_INFINITY, f32::NAN),
        ] {
            let function =
                Function::with_version(DataType::F32, op.into(), 2, version).expect("built-in operators fit");
            let (a, b, mut into) = ([a; 40], [b; 40], [0f32; 40]);
            // SAFETY: all are arrays of that many.
            unsafe {
                function.reduce(
                    &[(Element, a.as_ptr().cast()), (Element, b.as_ptr().cast())],
                    (Element, into.as_mut_ptr().cast()),
                    40,
                )
            };
            assert!(
                into.iter().all(|value| value.to_bits() == expected.to_bits()),
                "{version:?} {op} of {} and {}: {}",
                a[0],
                b[0],
                into[0]
            );
        }
    }
}

#[test]
fn scaling_multiplies_in_the_accumulator_type() {
    let mut random = Random::new(5);
    for version in Version::available() {
        for &data in DataType::ALL {
            let function =
                Function::with_version(data, ReduceOp::PreMulSum.into(), 2, version).expect("built-in operators fit");
            let scalar = match data.accumulator() {
                DataType::I8 => Scalar::of(-3i8),
                DataType::U8 => Scalar::of(3u8),
                DataType::I32 => Scalar::of(-70_000i32),
                DataType::U32 => Scalar::of(70_000u32),
                DataType::I64 => Scalar::of(i64::MIN + 5),
                DataType::U64 => Scalar::of(u64::MAX - 4),
                DataType::F64 => Scalar::of(1.0 / 3.0),
                _ => Scalar::of(1.0f32 / 3.0),
            };
            for elements in [1, 33, if cfg!(miri) { 34 } else { 4100 }] {
                let input = content(&mut random, data, Element, elements, true);
                let bytes = data.accumulator().bytes();
                // SAFETY: the scalar's value is that long.
                let repeated = unsafe { core::slice::from_raw_parts(scalar.address(), bytes) }.repeat(elements);
                let expected = reference::reduce(
                    data,
                    ReduceOp::Prod,
                    2,
                    &[(Element, input.clone()), (Partial, repeated)],
                    Element,
                    elements,
                );
                let (mut from, mut into) = (Memory::new(&input, 3), Memory::new(&input, 5));
                // SAFETY: both have that many elements; the second time they are the same.
                unsafe {
                    function
                        .scale(scalar, from.at(), into.at(), elements)
                        .expect("the scalar fits");
                    function
                        .scale(scalar, from.at(), from.at(), elements)
                        .expect("the scalar fits");
                }
                for memory in [&from, &into] {
                    let found = memory.content(input.len());
                    // A scaled NaN may have a payload where nothing is narrowed.
                    let form = if data == data.accumulator() { Partial } else { Element };
                    assert_eq!(
                        reference::without_payloads(data, form, found),
                        expected,
                        "{version:?} {data}, {elements} elements"
                    );
                }
            }
        }
    }
}
