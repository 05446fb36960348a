//! Each rank gets what the collective defines, for every algorithm, protocol and way of cutting.

use doorbell_collectives::executor::{Config, Data, Operation, Parts, Tuning};
use doorbell_collectives::kernel::Function;
use doorbell_collectives::plan::{Collective, Shape};
use doorbell_collectives::{Algorithm, DataType, Protocol, Rank, ReduceOp};

use crate::world::{Device, World};

const ONE: &[Device] = &[Device::Soft(0)];
const TWO: &[Device] = &[Device::Soft(0), Device::Soft(1)];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Memory {
    Registered,
    Plain,
    InPlace,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    algorithm: Algorithm,
    collective: Collective,
    root: Rank,
    ranks: u32,
    count: u64,
    tuning: Tuning,
    memory: Memory,
}

fn given(rank: u32, index: u64) -> i32 {
    (index as i32).wrapping_mul(31).wrapping_add(7 * rank as i32 + 1)
}

fn input(case: &Case, rank: u32, parts: &[Parts]) -> Vec<i32> {
    let p = u64::from(case.ranks);
    let len = match case.collective {
        Collective::AllReduce
        | Collective::Reduce
        | Collective::AllGather
        | Collective::Gather
        | Collective::SendRecv => case.count,
        Collective::Broadcast if Rank(rank) == case.root => case.count,
        Collective::Scatter if Rank(rank) == case.root => case.count * p,
        Collective::ReduceScatter | Collective::AllToAll => case.count * p,
        Collective::AllToAllV => parts[rank as usize]
            .send
            .iter()
            .map(|(start, len)| start + len)
            .max()
            .unwrap_or(0),
        _ => 0,
    };
    (0..len).map(|index| given(rank, index)).collect()
}

fn output(case: &Case, rank: u32, parts: &[Parts]) -> Vec<Option<i32>> {
    let (p, n) = (case.ranks, case.count);
    let sum = |index: u64| (0..p).fold(0_i32, |sum, rank| sum.wrapping_add(given(rank, index)));
    let here = Rank(rank) == case.root;
    match case.collective {
        Collective::AllReduce => (0..n).map(|index| Some(sum(index))).collect(),
        Collective::Reduce if here => (0..n).map(|index| Some(sum(index))).collect(),
        Collective::Broadcast => (0..n).map(|index| Some(given(case.root.0, index))).collect(),
        Collective::AllGather => (0..p)
            .flat_map(|of| (0..n).map(move |index| Some(given(of, index))))
            .collect(),
        Collective::Gather if here => (0..p)
            .flat_map(|of| (0..n).map(move |index| Some(given(of, index))))
            .collect(),
        Collective::ReduceScatter => (0..n).map(|index| Some(sum(u64::from(rank) * n + index))).collect(),
        Collective::Scatter => (0..n)
            .map(|index| Some(given(case.root.0, u64::from(rank) * n + index)))
            .collect(),
        Collective::AllToAll => (0..p)
            .flat_map(|of| (0..n).map(move |index| Some(given(of, u64::from(rank) * n + index))))
            .collect(),
        Collective::AllToAllV => {
            let receive = &parts[rank as usize].receive;
            let len = receive.iter().map(|(start, len)| start + len).max().unwrap_or(0);
            let mut all = vec![None; len as usize];
            for (of, (start, len)) in receive.iter().enumerate() {
                let from = parts[of].send[rank as usize].0;
                for index in 0..*len {
                    all[(start + index) as usize] = Some(given(of as u32, from + index));
                }
            }
            all
        }
        Collective::SendRecv => (0..n).map(|index| Some(given((rank + p - 1) % p, index))).collect(),
        _ => Vec::new(),
    }
}

fn ragged(case: &Case) -> Vec<Parts> {
    let p = case.ranks as u64;
    let len = |from: u64, to: u64| (from * 5 + to * 3) % 4 * case.count / 2 + (from + to) % 2;
    let lay = |len: &dyn Fn(u64) -> u64| {
        let mut at = 0;
        let place = |other| {
            let start = at;
            at += len(other) + 1;
            (start, len(other))
        };
        (0..p).map(place).collect()
    };
    (0..p)
        .map(|rank| Parts {
            send: lay(&|to| len(rank, to)),
            receive: lay(&|from| len(from, rank)),
            root: None,
        })
        .collect()
}

/// A value that no result has, for elements that must not be written.
const UNTOUCHED: i32 = -0x5a5a_5a5a;

fn run(world: &mut World, case: Case) {
    let plan = world.prepare(case.algorithm, case.collective, case.root);
    let parts = if case.collective == Collective::AllToAllV {
        ragged(&case)
    } else {
        Vec::new()
    };
    let shape = Shape {
        collective: case.collective,
        order: (0..case.ranks).map(Rank).collect(),
        root: case.root,
        blocks: 1,
    };
    let function = Function::new(DataType::I32, ReduceOp::Sum, case.ranks).unwrap();
    let mut plain: Vec<(Vec<i32>, Vec<i32>)> = Vec::new();
    let mut segments = Vec::new();
    let mut outputs = Vec::new();
    for rank in 0..case.ranks {
        let (given, expected) = (input(&case, rank, &parts), output(&case, rank, &parts));
        let shared = shape.shared(Rank(rank)).filter(|_| case.memory == Memory::InPlace);
        let bytes = 4 * (given.len() + expected.len() + 1);
        match case.memory {
            Memory::Plain => {
                plain.push((given, vec![UNTOUCHED; expected.len()]));
                let (input, output) = plain.last_mut().unwrap();
                segments.push((
                    Data::Plain(input.as_mut_ptr().cast()),
                    Data::Plain(output.as_mut_ptr().cast()),
                ));
                outputs.push((output.as_ptr(), expected));
            }
            Memory::Registered | Memory::InPlace => {
                let segment = world.engines[rank as usize].allocate(bytes).unwrap();
                let count = case.count as usize;
                let (input_at, output_at) = match shared {
                    Some(shared) if shared.output > 0 => (shared.output as usize * count, 0),
                    Some(shared) => (0, shared.input as usize * count),
                    None => (0, given.len()),
                };
                let start = segment.start().cast::<i32>();
                // SAFETY: in the segment, which is not shared yet.
                unsafe {
                    for index in 0..expected.len() {
                        *start.add(output_at + index) = UNTOUCHED;
                    }
                    for (index, value) in given.iter().enumerate() {
                        *start.add(input_at + index) = *value;
                    }
                }
                outputs.push((start.wrapping_add(output_at).cast_const(), expected));
                segments.push((
                    Data::Registered(segment.clone(), 4 * input_at),
                    Data::Registered(segment, 4 * output_at),
                ));
            }
        }
    }
    // SAFETY: the memory is as long as the case says, and lives until all results are taken.
    let tickets = unsafe {
        world.submit(|rank| Operation {
            plan,
            function: function.clone(),
            count: case.count,
            parts: parts.get(rank.index()).cloned(),
            input: segments[rank.index()].0.clone(),
            output: segments[rank.index()].1.clone(),
            scale: None,
            tuning: case.tuning,
            deadline: None,
        })
    };
    for result in world.finish(&tickets) {
        result.unwrap_or_else(|error| panic!("{case:?}: {error}"));
    }
    for (rank, (at, expected)) in outputs.iter().enumerate() {
        for (index, expected) in expected.iter().enumerate() {
            // SAFETY: as long as the expected output, and not written any more.
            let got = unsafe { *at.add(index) };
            assert_eq!(
                got,
                expected.unwrap_or(UNTOUCHED),
                "{case:?}: rank {rank}, element {index}"
            );
        }
    }
}

fn cases(ranks: u32) -> impl Iterator<Item = (Algorithm, Collective, Rank)> {
    Algorithm::ALL.iter().flat_map(move |&algorithm| {
        Collective::ALL
            .iter()
            .filter(move |&&collective| algorithm.supports(collective))
            .flat_map(move |&collective| {
                let roots = if collective.has_root() {
                    vec![0, ranks - 1]
                } else {
                    vec![0]
                };
                roots.into_iter().map(move |root| (algorithm, collective, Rank(root)))
            })
    })
}

fn sweep(ranks: u32, devices: &[Device], config: Config, protocols: &[Protocol], counts: &[u64], slice: usize) {
    let mut world = World::new(ranks, devices, config);
    let most = world.engines[0].config().channels;
    for &protocol in protocols {
        for (algorithm, collective, root) in cases(ranks) {
            for (index, &count) in counts.iter().enumerate() {
                let memory = [Memory::Registered, Memory::Plain, Memory::InPlace][(index + count as usize) % 3];
                let tuning = Tuning {
                    protocol,
                    channels: 1 + index as u32 % most,
                    slice,
                };
                run(
                    &mut world,
                    Case {
                        algorithm,
                        collective,
                        root,
                        ranks,
                        count,
                        tuning,
                        memory,
                    },
                );
            }
        }
    }
}

#[test]
fn one_small_sum_of_two() {
    let mut world = World::new(2, ONE, Config::default());
    for protocol in [Protocol::Simple, Protocol::Ll, Protocol::Ll128] {
        let tuning = Tuning {
            protocol,
            channels: 1,
            slice: 1 << 16,
        };
        let case = Case {
            algorithm: Algorithm::Ring,
            collective: Collective::AllReduce,
            root: Rank(0),
            ranks: 2,
            count: 1000,
            tuning,
            memory: Memory::Registered,
        };
        run(&mut world, case);
    }
}

#[test]
fn a_rank_alone() {
    sweep(1, ONE, Config::default(), Protocol::ALL, &[0, 1, 1000], 1024);
}

#[test]
fn two_ranks() {
    sweep(2, ONE, Config::default(), Protocol::ALL, &[0, 1, 3, 1000, 4099], 1024);
}

#[test]
fn three_ranks() {
    // Some messages of an operation are eager, and some are granted.
    let config = Config {
        eager: 700,
        ..Config::default()
    };
    sweep(3, ONE, config, Protocol::ALL, &[0, 1, 2, 1000, 4099], 1024);
}

#[test]
fn four_ranks() {
    sweep(4, ONE, Config::default(), Protocol::ALL, &[1, 3, 4099], 1024);
}

#[test]
fn five_ranks_on_two_devices() {
    for eager in [0, 16 << 10] {
        let config = Config {
            eager,
            ..Config::default()
        };
        sweep(5, TWO, config, Protocol::ALL, &[1, 1000], 512);
    }
}

#[test]
fn seven_and_eight_ranks() {
    for (ranks, eager) in [(7, 16 << 10), (8, 256)] {
        let config = Config {
            channels: 2,
            eager,
            ..Config::default()
        };
        sweep(ranks, ONE, config, Protocol::ALL, &[5, 1031], 2048);
    }
}

/// In place, plain and registered.
const LONG: &[u64] = &[50_000, 50_001, 49_999];

#[test]
fn messages_longer_than_memory_for_them() {
    let config = Config {
        channels: 2,
        fragment: 4096,
        eager: 1000,
        ..Config::default()
    };
    // Two ranks that exchange wait only for each other.
    sweep(2, ONE, config, &[Protocol::Simple], LONG, 1 << 20);
    sweep(3, ONE, config, &[Protocol::Simple], LONG, 1 << 20);
    sweep(5, ONE, config, &[Protocol::Simple], &[30_011], 1 << 20);
    let eager = Config { eager: 4096, ..config };
    sweep(2, ONE, eager, &[Protocol::Simple], &[50_000], 1 << 20);
    sweep(3, ONE, eager, &[Protocol::Simple], &[50_000], 1 << 20);
    sweep(4, TWO, config, &[Protocol::Simple, Protocol::Ll], &[50_001], 1 << 20);
}

#[test]
fn over_udp() {
    let config = Config {
        eager: 2048,
        ..Config::default()
    };
    sweep(3, &[Device::Udp], config, Protocol::ALL, &[3, 4099], 4096);
}

#[test]
fn over_udp_that_loses_packets() {
    let config = Config {
        channels: 2,
        timeout: 13,
        ..Config::default()
    };
    sweep(3, &[Device::Lossy], config, Protocol::ALL, &[1031], 2048);
    let granted = Config { eager: 256, ..config };
    sweep(3, &[Device::Lossy], granted, &[Protocol::Simple], &[1031], 2048);
}
