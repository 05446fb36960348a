//! Every type and operator, exactly; and the same bits for every way of cutting where promised.

use doorbell_collectives::executor::{Config, Data, Operation, Tuning};
use doorbell_collectives::kernel::{F8E4M3, F8E5M2, Function, Op, Scalar, UserOperator, bf16, f16};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::{Algorithm, DataType, Protocol, Rank, ReduceOp};

use crate::world::{Device, World};

/// A number that the type represents exactly, or rounds to by way of f32, as bytes; integers wrap.
fn encode(data: DataType, value: f64) -> Vec<u8> {
    match data {
        DataType::I8 => (value as i64 as i8).to_ne_bytes().into(),
        DataType::U8 => (value as i64 as u8).to_ne_bytes().into(),
        DataType::I32 => (value as i32).to_ne_bytes().into(),
        DataType::U32 => (value as u32).to_ne_bytes().into(),
        DataType::I64 => (value as i64).to_ne_bytes().into(),
        DataType::U64 => (value as u64).to_ne_bytes().into(),
        DataType::F16 => f16::from_f32(value as f32).to_ne_bytes().into(),
        DataType::Bf16 => bf16::from_f32(value as f32).to_ne_bytes().into(),
        DataType::F32 => (value as f32).to_ne_bytes().into(),
        DataType::F64 => value.to_ne_bytes().into(),
        DataType::F8E4M3 => vec![F8E4M3::from_f32(value as f32).to_bits()],
        DataType::F8E5M2 => vec![F8E5M2::from_f32(value as f32).to_bits()],
    }
}

fn is_float(data: DataType) -> bool {
    matches!(
        data,
        DataType::F16 | DataType::Bf16 | DataType::F32 | DataType::F64 | DataType::F8E4M3 | DataType::F8E5M2
    )
}

fn two(data: DataType) -> Scalar {
    match data.accumulator() {
        DataType::I8 => Scalar::of(2_i8),
        DataType::U8 => Scalar::of(2_u8),
        DataType::I32 => Scalar::of(2_i32),
        DataType::U32 => Scalar::of(2_u32),
        DataType::I64 => Scalar::of(2_i64),
        DataType::U64 => Scalar::of(2_u64),
        DataType::F64 => Scalar::of(2_f64),
        _ => Scalar::of(2_f32),
    }
}

/// 1, 2 or 3, which every type represents; few 3s, so that products do not overflow.
fn given(rank: u32, index: u64) -> f64 {
    1.0 + ((index * 5 + u64::from(rank) * 3) % 3) as f64
}

fn expected(data: DataType, op: ReduceOp, ranks: u32, index: u64) -> f64 {
    let all = (0..ranks).map(|rank| given(rank, index));
    let sum: f64 = all.clone().sum();
    match op {
        ReduceOp::Sum => sum,
        ReduceOp::Prod => all.product(),
        ReduceOp::Min => all.fold(f64::MAX, f64::min),
        ReduceOp::Max => all.fold(0.0, f64::max),
        ReduceOp::PreMulSum => 2.0 * sum,
        ReduceOp::Avg if !is_float(data) => (sum / f64::from(ranks)).trunc(),
        ReduceOp::Avg if data == DataType::F64 => sum / f64::from(ranks),
        // Divided in f32.
        ReduceOp::Avg => f64::from(sum as f32 / ranks as f32),
    }
}

fn all_reduce(
    world: &mut World,
    algorithm: Algorithm,
    function: &Function,
    scale: Option<Scalar>,
    tuning: Tuning,
    inputs: &[Vec<u8>],
) -> Vec<Vec<u8>> {
    let plan = world.prepare(algorithm, Collective::AllReduce, Rank(0));
    let bytes = inputs[0].len();
    let segments: Vec<_> = world
        .engines
        .iter_mut()
        .map(|engine| engine.allocate(2 * bytes).unwrap())
        .collect();
    for (segment, input) in segments.iter().zip(inputs) {
        // SAFETY: as long, and not shared yet.
        unsafe { core::ptr::copy_nonoverlapping(input.as_ptr(), segment.start(), bytes) };
    }
    // SAFETY: the segments are long enough.
    let tickets = unsafe {
        world.submit(|rank| Operation {
            plan,
            function: function.clone(),
            count: (bytes / function.data().bytes()) as u64,
            parts: None,
            input: Data::Registered(segments[rank.index()].clone(), 0),
            output: Data::Registered(segments[rank.index()].clone(), bytes),
            scale,
            tuning,
            deadline: None,
        })
    };
    for result in world.finish(&tickets) {
        result.unwrap();
    }
    let output = |segment: &std::sync::Arc<doorbell_collectives::Segment>| {
        // SAFETY: as long, and not written any more.
        unsafe { core::slice::from_raw_parts(segment.start().add(bytes), bytes) }.to_vec()
    };
    segments.iter().map(output).collect()
}

#[test]
fn every_type_and_operator_by_every_algorithm() {
    const COUNT: u64 = 700;
    for ranks in [2, 3, 5] {
        let mut world = World::new(ranks, &[Device::Soft(0)], Config::default());
        let algorithms: Vec<_> = Algorithm::of(Collective::AllReduce).collect();
        let mut turn = 0;
        for &data in DataType::ALL {
            for &op in ReduceOp::ALL {
                turn += 1;
                let algorithm = algorithms[turn % algorithms.len()];
                let tuning = Tuning {
                    protocol: Protocol::ALL[turn % 3],
                    channels: 1 + turn as u32 % 3,
                    slice: 512,
                };
                let function = Function::new(data, op, ranks).unwrap();
                let scale = (op == ReduceOp::PreMulSum).then(|| two(data));
                let inputs: Vec<Vec<u8>> = (0..ranks)
                    .map(|rank| (0..COUNT).flat_map(|index| encode(data, given(rank, index))).collect())
                    .collect();
                let expected: Vec<u8> = (0..COUNT)
                    .flat_map(|index| encode(data, expected(data, op, ranks, index)))
                    .collect();
                let got = all_reduce(&mut world, algorithm, &function, scale, tuning, &inputs);
                for (rank, got) in got.iter().enumerate() {
                    let wrong = got.iter().zip(&expected).position(|(got, expected)| got != expected);
                    assert_eq!(
                        wrong, None,
                        "{algorithm} {data} {op} {tuning:?}: rank {rank} of {ranks}, byte"
                    );
                }
            }
        }
    }
}

#[test]
fn an_operator_of_the_users() {
    let mut world = World::new(3, &[Device::Soft(0)], Config::default());
    let or = UserOperator::new("or", |into: &mut [u64], from: &[u64]| {
        into.iter_mut().zip(from).for_each(|(into, from)| *into |= from);
    });
    let function = Function::new(DataType::U64, Op::from(or), 3).unwrap();
    let inputs: Vec<Vec<u8>> = (0..3_u64)
        .map(|rank| {
            (0..99_u64)
                .flat_map(|index| (1_u64 << (index % 20 + 20 * rank)).to_ne_bytes())
                .collect()
        })
        .collect();
    let expected: Vec<u8> = (0..99_u64)
        .flat_map(|index| {
            (0..3)
                .fold(0, |all, rank| all | 1_u64 << (index % 20 + 20 * rank))
                .to_ne_bytes()
        })
        .collect();
    let tuning = Tuning {
        protocol: Protocol::Ll,
        channels: 2,
        slice: 128,
    };
    for algorithm in Algorithm::of(Collective::AllReduce) {
        for got in all_reduce(&mut world, algorithm, &function, None, tuning, &inputs) {
            assert!(got == expected, "{algorithm}");
        }
    }
}

/// Numbers of very different magnitudes, so that sums depend on their order.
fn rough(rank: u32, index: u32) -> f32 {
    let mut bits = (index ^ rank.rotate_left(16)).wrapping_mul(0x9e37_79b9);
    bits ^= bits >> 15;
    bits = bits.wrapping_mul(0x85eb_ca6b);
    f32::from_bits(bits & 0x8fff_ffff | 0x3000_0000)
}

#[test]
fn the_same_bits_on_every_rank_and_however_it_is_cut_where_that_is_promised() {
    const RANKS: u32 = 5;
    let mut world = World::new(RANKS, &[Device::Soft(0)], Config::default());
    let inputs: Vec<Vec<u8>> = (0..RANKS)
        .map(|rank| (0..4001).flat_map(|index| rough(rank, index).to_ne_bytes()).collect())
        .collect();
    let function = Function::new(DataType::F32, ReduceOp::Sum, RANKS).unwrap();
    let mut promised = 0;
    for algorithm in Algorithm::of(Collective::AllReduce) {
        let mut first: Option<Vec<u8>> = None;
        for (protocol, channels, slice) in [
            (Protocol::Simple, 1, 1 << 20),
            (Protocol::Ll, 3, 600),
            (Protocol::Ll128, 4, 2000),
            (Protocol::Simple, 2, 4096),
        ] {
            let tuning = Tuning {
                protocol,
                channels,
                slice,
            };
            let got = all_reduce(&mut world, algorithm, &function, None, tuning, &inputs);
            assert!(
                got.iter().all(|of| *of == got[0]),
                "{algorithm} {tuning:?}: ranks differ"
            );
            if algorithm.deterministic(Collective::AllReduce) {
                let first = first.get_or_insert_with(|| got[0].clone());
                assert!(*first == got[0], "{algorithm} {tuning:?}: not as when cut otherwise");
            }
        }
        promised += u32::from(algorithm.deterministic(Collective::AllReduce));
    }
    assert!(promised > 1, "some algorithms promise it");
}
