//! The matrix of collectives.

use std::sync::Arc;

use doorbell_collectives::executor::{Config, Data, Operation, Parts, PlanId, Tuning};
use doorbell_collectives::kernel::{F8E4M3, F8E5M2, Function, Scalar, bf16, f16};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::{Case, Number, input_element};
use doorbell_collectives::{Algorithm, DataType, Protocol, Rank, ReduceOp, Segment};

use crate::world::{Device, World};

/// Bytes of memory that each rank has for its input, and for its output.
const HALF: usize = 1 << 20;
/// Elements of the whole, or of a part. None is divisible by many numbers of ranks.
const COUNTS: [u64; 5] = [1, 5, 131, 1027, 0];
/// How an operation is cut: channels, and bytes of a slice.
const CUTS: [(u32, usize); 4] = [(1, 1 << 16), (2, 96), (1, 1000), (2, 2048)];

pub(crate) struct Team {
    pub(crate) world: World,
    memory: Vec<Arc<Segment>>,
    ranks: u32,
    plans: Vec<(Algorithm, Collective, Rank, PlanId)>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Mode {
    pub(crate) algorithm: Algorithm,
    pub(crate) tuning: Tuning,
    pub(crate) in_place: bool,
}

impl Team {
    pub(crate) fn new(ranks: u32) -> Self {
        Self::on(Device::Soft(0), ranks)
    }

    fn on(device: Device, ranks: u32) -> Self {
        // With Simple some messages are eager, and some use rendezvous.
        let mut config = Config {
            channels: 2,
            eager: 300,
            ..Config::default()
        };
        if device == Device::Lossy {
            // 134 ms, lost with the end of a message. Eight must outlast any time for which a busy
            // machine gives the peer no processor: eight of 67 ms did not, beside three builds.
            config.timeout = 15;
        }
        let mut world = World::new(ranks, &[device], config);
        let memory = world
            .engines
            .iter_mut()
            .map(|engine| engine.allocate(2 * HALF).unwrap());
        Self {
            memory: memory.collect(),
            world,
            ranks,
            plans: Vec::new(),
        }
    }

    fn plan(&mut self, algorithm: Algorithm, collective: Collective, root: Rank) -> PlanId {
        let known = |known: &&(Algorithm, Collective, Rank, PlanId)| {
            (known.0, known.1, known.2) == (algorithm, collective, root)
        };
        if let Some((.., plan)) = self.plans.iter().find(known) {
            return *plan;
        }
        let plan = self.world.prepare(algorithm, collective, root);
        self.plans.push((algorithm, collective, root, plan));
        plan
    }

    fn offsets(case: &Case, rank: Rank, element: usize, in_place: bool) -> (usize, usize) {
        let own = rank.index() * case.count as usize * element;
        if !in_place {
            return (0, HALF);
        }
        match case.collective {
            Collective::AllGather => (own, 0),
            Collective::Gather if rank == case.root => (own, 0),
            Collective::ReduceScatter => (0, own),
            Collective::Scatter if rank == case.root => (0, own),
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => (0, 0),
            _ => (0, HALF),
        }
    }

    /// A rank's memory from byte `at` on, as elements. No operation is in flight.
    fn elements<T: Number>(&mut self, rank: Rank, at: usize, len: u64) -> &mut [T] {
        let bytes = len as usize * size_of::<T>();
        assert!(
            at + bytes <= 2 * HALF && at.is_multiple_of(align_of::<T>()),
            "{len} elements at {at}"
        );
        // SAFETY: in the segment, all initialised; any bits are a value; the engines are idle.
        unsafe { core::slice::from_raw_parts_mut(self.memory[rank.index()].start().add(at).cast::<T>(), len as usize) }
    }

    /// Runs an operation on inputs drawn from a seed, and leaves the results in the ranks' memory.
    pub(crate) fn run<T: Number>(&mut self, case: &Case, op: ReduceOp, seed: u64, mode: Mode) {
        let all = || (0..case.ranks).map(Rank);
        let plan = self.plan(mode.algorithm, case.collective, case.root);
        let function = Function::new(T::TYPE, op, self.ranks).unwrap();
        let mut operations = Vec::new();
        for rank in all() {
            let (input, output) = Self::offsets(case, rank, size_of::<T>(), mode.in_place);
            let spoilt = input_element(!seed, rank, u64::MAX);
            self.elements::<T>(rank, output, case.output(rank)).fill(spoilt);
            for (index, element) in (0..).zip(self.elements::<T>(rank, input, case.input(rank))) {
                *element = input_element(seed, rank, index);
            }
            let lay = |len: &dyn Fn(Rank) -> u64| {
                let mut at = 0;
                let offset = |other| {
                    at += len(other);
                    (at - len(other), len(other))
                };
                all().map(offset).collect()
            };
            let memory = &self.memory[rank.index()];
            operations.push(Operation {
                plan,
                function: function.clone(),
                count: case.count,
                parts: (case.collective == Collective::AllToAllV).then(|| Parts {
                    send: lay(&|to| case.part(rank, to)),
                    receive: lay(&|from| case.part(from, rank)),
                    root: None,
                }),
                input: Data::Registered(Arc::clone(memory), input),
                output: Data::Registered(Arc::clone(memory), output),
                scale: (op == ReduceOp::PreMulSum && case.collective.reduces()).then(|| Scalar::of(T::scalar(rank))),
                tuning: mode.tuning,
                deadline: None,
            });
        }
        // SAFETY: long enough, live, and not accessed before all results are taken.
        let tickets = unsafe { self.world.submit(|rank| operations[rank.index()].clone()) };
        for result in self.world.finish(&tickets) {
            result.unwrap_or_else(|error| panic!("{case:?} {mode:?}: {error}"));
        }
    }

    pub(crate) fn output<T: Number>(&mut self, case: &Case, rank: Rank, in_place: bool) -> &[T] {
        let (_, output) = Self::offsets(case, rank, size_of::<T>(), in_place);
        self.elements(rank, output, case.output(rank))
    }

    fn check<T: Number>(&mut self, case: &Case, op: ReduceOp, seed: u64, mode: Mode) {
        self.run::<T>(case, op, seed, mode);
        for rank in (0..case.ranks).map(Rank) {
            let wrong = case.count_wrong(op, rank, seed, self.output::<T>(case, rank, mode.in_place));
            assert_eq!(
                wrong,
                0,
                "{case:?} {} {op} {mode:?}: elements of rank {rank} that are wrong",
                T::TYPE
            );
        }
        if case.collective == Collective::AllReduce {
            let first = bits(self.output::<T>(case, Rank(0), mode.in_place)).to_vec();
            for rank in (1..case.ranks).map(Rank) {
                let same = bits(self.output::<T>(case, rank, mode.in_place)) == first;
                assert!(
                    same,
                    "{case:?} {} {op} {mode:?}: rank {rank} has other bits than rank 0",
                    T::TYPE
                );
            }
        }
    }
}

pub(crate) fn bits<T: Number>(elements: &[T]) -> &[u8] {
    // SAFETY: elements have no padding.
    unsafe { core::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

type Check = fn(&mut Team, &Case, ReduceOp, u64, Mode);

const TYPES: [(DataType, Check); 12] = [
    (DataType::I8, Team::check::<i8>),
    (DataType::U8, Team::check::<u8>),
    (DataType::I32, Team::check::<i32>),
    (DataType::U32, Team::check::<u32>),
    (DataType::I64, Team::check::<i64>),
    (DataType::U64, Team::check::<u64>),
    (DataType::F16, Team::check::<f16>),
    (DataType::Bf16, Team::check::<bf16>),
    (DataType::F32, Team::check::<f32>),
    (DataType::F64, Team::check::<f64>),
    (DataType::F8E4M3, Team::check::<F8E4M3>),
    (DataType::F8E5M2, Team::check::<F8E5M2>),
];

fn counts() -> usize {
    std::env::var("DOORBELL_COLLECTIVES_COUNTS").map_or(1, |counts| counts.parse().expect("a number"))
}

fn rank_counts() -> Vec<u32> {
    const ALL: [u32; 7] = [2, 3, 4, 5, 7, 8, 16];
    let some = |numbers: String| {
        let number = |number: &str| number.parse().expect("numbers of ranks, with commas between them");
        numbers.split(',').map(number).collect()
    };
    std::env::var("DOORBELL_COLLECTIVES_RANKS").map_or_else(|_| ALL.to_vec(), some)
}

/// Whether all cases run on every device; otherwise samples run over UDP.
fn runs_all() -> bool {
    std::env::var_os("DOORBELL_COLLECTIVES_WHOLE").is_some()
}

/// All cases among so many ranks. Counts, cuts, roots and in-place vary from case to case.
fn matrix(ranks: u32) {
    sampled(Device::Soft(0), ranks, 1);
}

/// One case in `one_in`: a prime combines all parameters that vary. The first differs by `ranks`.
fn sampled(device: Device, ranks: u32, one_in: usize) {
    let mut team = Team::on(device, ranks);
    let (mut cases, mut done) = (0, 0);
    let counts = counts();
    for &collective in Collective::ALL {
        for algorithm in Algorithm::of(collective) {
            for &protocol in Protocol::ALL {
                for (_, check) in TYPES {
                    let ops = if collective.reduces() {
                        ReduceOp::ALL
                    } else {
                        &[ReduceOp::Sum]
                    };
                    for &op in ops {
                        for _ in 0..counts {
                            cases += 1;
                            if !(cases + ranks as usize).is_multiple_of(one_in) {
                                continue;
                            }
                            done += 1;
                            let (channels, slice) = CUTS[cases % CUTS.len()];
                            let case = Case {
                                collective,
                                ranks,
                                root: Rank(if collective.has_root() { cases as u32 % ranks } else { 0 }),
                                count: COUNTS[cases / 3 % COUNTS.len()],
                            };
                            let mode = Mode {
                                algorithm,
                                tuning: Tuning {
                                    protocol,
                                    channels,
                                    slice,
                                },
                                in_place: collective.runs_in_place() && cases / 2 % 3 == 0,
                            };
                            check(&mut team, &case, op, cases as u64, mode);
                        }
                    }
                }
            }
            println!("{done} of {cases} cases among {ranks} ranks on {device:?}, {collective} by {algorithm} the last");
        }
    }
    // 14 reductions, each of 6 operators, and 16 collectives without one.
    assert!(
        cases >= 3 * TYPES.len() * (14 * 6 + 16) * counts,
        "{cases} cases among {ranks} ranks"
    );
    assert!(done >= cases / one_in, "{done} of {cases} cases among {ranks} ranks");
}

/// Samples among every number of ranks, or all cases.
fn on(device: Device, one_in: usize) {
    let one_in = if runs_all() { 1 } else { one_in };
    for ranks in rank_counts() {
        sampled(device, ranks, one_in);
    }
}

#[test]
fn over_udp() {
    on(Device::Udp, 43);
}

#[test]
fn over_udp_with_losses() {
    on(Device::Lossy, 101);
}

#[test]
fn two_ranks() {
    matrix(2);
}

#[test]
fn three_ranks() {
    matrix(3);
}

#[test]
fn four_ranks() {
    matrix(4);
}

#[test]
fn five_ranks() {
    matrix(5);
}

#[test]
fn seven_ranks() {
    matrix(7);
}

#[test]
fn eight_ranks() {
    matrix(8);
}

#[test]
fn sixteen_ranks() {
    matrix(16);
}
