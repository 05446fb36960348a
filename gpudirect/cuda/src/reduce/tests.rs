//! Tests of validation and work division; tests/gpu runs the kernels, on a GPU and on the host.

use super::plan::Divisor;
use super::*;
use crate::module::entries;

const SHAPE: LaunchConfig = LaunchConfig {
    threads: 64,
    blocks: 1000,
    unroll: 2,
};

fn elements(address: u64) -> SourceOperand {
    SourceOperand {
        address,
        kind: OperandKind::Element,
        scalar: None,
    }
}

fn partials(address: u64) -> SourceOperand {
    SourceOperand {
        kind: OperandKind::Partial,
        ..elements(address)
    }
}

fn sum(
    data: DataType,
    sources: &[SourceOperand],
    into: (OperandKind, u64),
    elements: u64,
) -> Result<Reduction, InvalidReduction> {
    Reduction::new(data, Operator::Sum, sources, into, elements, SHAPE)
}

#[test]
fn every_kernel_has_a_ptx_excerpt_of_its_own() {
    let entries: HashMap<_, _> = entries(KernelFile::Reduce.ptx())
        .map(|entry| (entry.name, entry.ptx()))
        .collect();
    assert_eq!(entries.len(), KernelName::all().count());
    for name in KernelName::all().map(|name| name.to_string()) {
        let ptx = entries.get(&*name).unwrap_or_else(|| panic!("no {name}"));
        assert!(ptx.contains(".version 7.8\n.target sm_90\n"), "{name}");
        assert_eq!(ptx.matches(".entry").count(), 1, "{name}");
        assert!(ptx.contains(&format!(
            ".param .align 8 .b8 {name}_param_0[{}]",
            size_of::<Arguments>()
        )));
        assert!(ptx.ends_with("ret;\n\n}\n"), "{name}");
    }
}

#[test]
fn equally_aligned_memories_have_head_and_tail() {
    for (data, offset, head, groups) in [
        (DataType::F32, 0, 0, 25),
        (DataType::F32, 4, 3, 24),
        (DataType::F64, 8, 1, 49),
        (DataType::Bf16, 14, 1, 12),
        (DataType::U8, 1, 15, 5),
    ] {
        let reduction = sum(
            data,
            &[elements(0x1000 + offset), elements(0x2000 + offset)],
            (OperandKind::Element, 0x3000 + offset),
            100,
        )
        .unwrap();
        let found = format!("{:?}", reduction.arguments);
        assert!(
            found.contains(&format!("head: {head}, groups: {groups},")),
            "{data} {offset}: {found}"
        );
        assert_eq!((reduction.blocks, reduction.threads), (1, 64));
    }
}

#[test]
fn differently_aligned_memories_have_groups_of_the_target() {
    for (data, target, head, groups, group) in [
        (DataType::F16, 0, 0, 500, 4),
        (DataType::F16, 2, 1, 499, 4),
        (DataType::U8, 1, 3, 249, 4),
        (DataType::F32, 4, 0, 1000, 4),
        (DataType::I64, 0, 0, 1000, 8),
    ] {
        let bytes = data.bytes() as u64;
        let sources = [elements(0x1000 + target), elements(0x1_2000 + target + bytes)];
        let reduction = sum(data, &sources, (OperandKind::Element, 0x3_0000 + target), 1000).unwrap();
        let found = format!("{:?}", reduction.arguments);
        assert!(
            found.contains(&format!("head: {head}, groups: {groups},"))
                && found.contains(&format!("group: {group} }}")),
            "{data} {target}: {found}"
        );
    }
    // Partial results have groups of 16 bytes alone.
    let sources = [elements(0x1000), partials(0x2004)];
    let reduction = sum(DataType::F16, &sources, (OperandKind::Element, 0x9000), 1000).unwrap();
    assert!(format!("{:?}", reduction.arguments).contains("head: 1000, groups: 0,"));
    assert_eq!(reduction.blocks, 16);
}

/// `Division` of kernels/arithmetic.cuh: every value of 8 bits, and floats of all magnitudes.
#[test]
fn products_with_the_reciprocal_are_the_quotients() {
    let divisors = (1..=1024).chain((1..=20).flat_map(|shift| [(1 << shift) - 1, 1 << shift, (1 << shift) + 1]));
    for ranks in divisors.filter(|ranks| (1..=1 << 20).contains(ranks)) {
        let divisor = Divisor::new(DataType::I8, ranks);
        for value in -128..256 {
            let product = ((value * divisor.high as i32) >> 16) + i32::from(value < 0);
            assert_eq!(
                i64::from(product),
                i64::from(value) / i64::from(ranks),
                "{value} / {ranks}"
            );
        }
        let divisor = Divisor::new(DataType::Bf16, ranks);
        let (high, low) = (f32::from_bits(divisor.high), f32::from_bits(divisor.low));
        let mut bits = ranks;
        for _ in 0..2000 {
            bits = bits.wrapping_mul(0x915f_77f5).wrapping_add(0x9e37_79b9);
            let value = f32::from_bits(bits);
            if value.abs() >= 2f32.powi(-64) || value == 0.0 {
                let product = value.mul_add(high, value * low);
                assert_eq!(product.to_bits(), (value / ranks as f32).to_bits(), "{value} / {ranks}");
            }
        }
        for value in [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN] {
            let product = value.mul_add(high, value * low);
            assert_eq!(product.to_bits(), (value / ranks as f32).to_bits(), "{value} / {ranks}");
        }
    }
}

#[test]
fn partial_results_are_aligned_by_their_own_size() {
    // 2 elements take 4 bytes, as partial results 8: 6 more of either reach a multiple of 16.
    let reduction = sum(
        DataType::Bf16,
        &[elements(0x1004), partials(0x2008)],
        (OperandKind::Partial, 0x3008),
        100,
    );
    let found = format!("{:?}", reduction.unwrap().arguments);
    assert!(
        found.contains("head: 6, groups: 11, count: 2, partials: 258,"),
        "{found}"
    );
    // For types that accumulate as themselves, partial results are elements.
    let reduction = sum(DataType::I32, &[partials(0x1000)], (OperandKind::Partial, 0x2000), 100);
    assert!(format!("{:?}", reduction.unwrap().arguments).contains("partials: 0,"));
}

#[test]
fn one_block_per_tile_up_to_the_limit() {
    // A tile is 64 threads with 2 groups of 4 elements each.
    let blocks = |elements_| {
        sum(
            DataType::F32,
            &[elements(0x10_0000)],
            (OperandKind::Element, 0x2000_0000),
            elements_,
        )
        .unwrap()
        .blocks
    };
    assert_eq!((blocks(0), blocks(1), blocks(515), blocks(516)), (0, 1, 1, 2));
    assert_eq!(blocks(10_000_000), 1000);
}

#[test]
fn invalid_reductions_are_refused() {
    let into = (OperandKind::Element, 0x9000);
    let of = |sources: &[SourceOperand]| sum(DataType::F32, sources, into, 16).unwrap_err();
    assert_eq!(of(&[]), InvalidReduction::Sources(0));
    assert_eq!(of(&[elements(0x1000); 9]), InvalidReduction::Sources(9));
    assert_eq!(
        of(&[elements(0x1002)]),
        InvalidReduction::Misaligned {
            address: 0x1002,
            bytes: 4
        }
    );
    assert!(matches!(
        of(&[elements(u64::MAX - 15)]),
        InvalidReduction::TooLong { .. }
    ));
    assert!(matches!(of(&[elements(0x8fc4)]), InvalidReduction::Overlap { .. }));
    assert!(matches!(of(&[elements(0x903c)]), InvalidReduction::Overlap { .. }));
    assert!(sum(DataType::F32, &[elements(0x9000), elements(0x9040)], into, 16).is_ok());
    let narrow = sum(DataType::F16, &[partials(0x9000)], into, 16);
    assert!(matches!(narrow, Err(InvalidReduction::Overlap { .. })));

    for threads in [0, 33, 1024] {
        let config = LaunchConfig { threads, ..SHAPE };
        let refused = Reduction::new(DataType::U8, Operator::Max, &[elements(0)], into, 1, config);
        assert_eq!(refused, Err(InvalidReduction::Threads(threads)));
    }
    let average = Reduction::new(DataType::U8, Operator::Avg { ranks: 0 }, &[elements(0)], into, 1, SHAPE);
    assert_eq!(average, Err(InvalidReduction::NoRanks));
}

#[test]
fn scalars_are_for_sums_of_elements_and_of_their_accumulator() {
    let scaled = |source: SourceOperand, scalar: Scalar, operator| {
        let source = SourceOperand {
            scalar: Some(scalar),
            ..source
        };
        let sources = [source, elements(0x3000)];
        Reduction::new(
            DataType::F16,
            operator,
            &sources,
            (OperandKind::Element, 0x9000),
            16,
            SHAPE,
        )
    };
    let reduction = scaled(elements(0x1000), 2.5f32.into(), Operator::Sum).unwrap();
    assert_eq!(reduction.kernel.to_string(), "reduce_f16_premulsum");
    // The factor of the other source is one.
    let (first, second) = (2.5f32.to_bits(), 1f32.to_bits());
    assert!(format!("{:?}", reduction.arguments).contains(&format!("scalars: [{first}, {second}, 0,")));
    assert!(matches!(
        scaled(elements(0x1000), 2.5f64.into(), Operator::Sum),
        Err(InvalidReduction::Scalar { .. })
    ));
    assert!(matches!(
        scaled(elements(0x1000), 2.5f32.into(), Operator::Max),
        Err(InvalidReduction::Scaled { .. })
    ));
    assert!(matches!(
        scaled(partials(0x1000), 2.5f32.into(), Operator::Sum),
        Err(InvalidReduction::Scaled { .. })
    ));
}

#[test]
fn averages_are_divided_when_elements_are_finished() {
    let of = |kind| {
        let average = Operator::Avg { ranks: 7 };
        let reduction = Reduction::new(DataType::Bf16, average, &[elements(0x1000)], (kind, 0x9000), 16, SHAPE);
        reduction.unwrap()
    };
    let finished = of(OperandKind::Element);
    assert_eq!(finished.kernel.to_string(), "reduce_bf16_avg");
    assert!(format!("{:?}", finished.arguments).contains("divisor: Divisor { ranks: 7,"));
    assert_eq!(of(OperandKind::Partial).kernel.to_string(), "reduce_bf16_sum");
}
