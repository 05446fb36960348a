//! Calibration of the cost model (alpha, beta): messages by each protocol, between all ranks of a
//! host and between two ranks of different hosts, and the ranks' own reductions and copies.
//!
//! Measured operations are executor plans of hops only, so a measurement includes all costs of
//! operations; idle ranks begin them too. Machines are shared, so the median of each kind counts.
//! Calibration takes some 50 ms, most of it for the longest messages, which must exceed the caches;
//! these are left out where ranks outnumber processors.

use std::hint::black_box;
use std::iter;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::drive::Shared;
use super::{CollectiveError, Communicator, Options};
use crate::algorithm::Algorithm;
use crate::bootstrap::Exchange;
use crate::cost::{Compute, DataMover, MARKS, NEAR, Scale};
use crate::executor::{CachedProgram, Data, Engine, EngineError, Operation, PlanId, Tuning};
use crate::kernel::Function;
use crate::memory::Segment;
use crate::plan::{BlockForm, Collective, Plan, PlanMemory, Program, Shape, Span, Step};
use crate::tune::{Calibration, Hops, MANY, Messages, Tuner, median};
use crate::types::{DataType, Protocol, Rank, ReduceOp};

const SHORT_BYTES: u64 = 8;
/// Maximum bytes of a message of Simple; longer marks consist of several.
const SIMPLE_MESSAGE_BYTES: u64 = 256 << 10;
const MAX_LINE_MARK: u64 = 32 << 10;
/// The longest mark where ranks outnumber processors.
const OVERSUBSCRIBED_MAX_MARK: u64 = 512 << 10;
/// Warm-up rounds; measured rounds; those of long operations.
const WARMUP_ROUNDS: usize = 2;
const ROUNDS: usize = 11;
const LONG_ROUNDS: usize = 3;
/// Time limits of the warm-up rounds, of short and of medium operations, for longer ones to be
/// measured too; and the number of rounds otherwise, as on a lossy network.
const QUICK_LIMITS: [Duration; WARMUP_ROUNDS] = [Duration::from_millis(50), Duration::from_millis(30)];
const SLOW_ROUNDS: usize = 1;
/// Repetitions of a short operation per sample.
const REPEATS: u32 = 8;
/// Repetitions per sample of a tiny operation, which train branch predictors.
const TINY_REPEATS: u32 = 48;
const TINY_BYTES: u64 = 2 << 10;
/// The same before a single message one way, whose sender runs ahead by all slots.
const ONE_WAY_REPEATS: u32 = 192;
const MAX_MULTI_MESSAGE_MARK: u64 = 16 << 10;
const GRANTED_MARK: u64 = MARKS[4];
/// An operation that near caches do not hold, by messages shorter than [`SIMPLE_MESSAGE_BYTES`].
const FAR_MARK: u64 = MARKS[8];
/// Bounds of short and long operations, in bytes.
const SHORT_OPERATION: u64 = 16 << 10;
const LONG_OPERATION: u64 = 1 << 20;
/// Bytes reduced at a time, as a message that has just arrived.
const REDUCE_CHUNK: usize = 64 << 10;

pub(super) fn measured(comm: &Communicator) -> Result<Tuner, CollectiveError> {
    let mut tuner = comm.tuner();
    if comm.size() < 2 {
        return Ok(tuner);
    }
    // An empty operation is never sent, so its time is the fixed cost.
    let nothing = || {
        let call = comm.broadcast(&mut [0.0f32; 0], Rank(0));
        call.algorithm(Algorithm::Ring)
            .protocol(Protocol::Ll)
            .channels(1)
            .wait()
    };
    let through_all = shortest(nothing)?;
    let hosts = comm.hosts();
    comm.shared.with(|state| {
        let mut calibrator = Calibrator::new(&mut state.engine, &comm.shared, &comm.options)?;
        let through_engine = calibrator.nothing()?;
        calibrator.costs(&mut tuner, &hosts)?;
        tuner.compute.begin_ns += (through_all - through_engine).max(0.0);
        Ok(tuner)
    })
}

/// Duration of a local action, ns.
fn shortest<E>(mut act: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    let mut samples = Vec::new();
    for _ in 0..=ROUNDS {
        let began = Instant::now();
        for _ in 0..REPEATS {
            act()?;
        }
        samples.push(began.elapsed().as_nanos() as f64 / f64::from(REPEATS));
    }
    // The first run chooses a plan and allocates memory.
    Ok(median(samples.split_off(1)))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pattern {
    /// So many hops of messages from the input, which is in memory already.
    Resident(u32),
    /// So many hops that each forward the message of the previous hop.
    Forwarded(u32),
    /// So many messages from the input, reduced as they arrive.
    Reduced(u32),
    /// So many messages from the input, received into scratch memory and then reduced.
    Gathered(u32),
    /// So many messages from the first rank to the second; the others are idle.
    Isolated(u32),
    /// The same, reduced as they arrive; and received into scratch memory and then reduced.
    IsolatedReduced(u32),
    IsolatedGathered(u32),
    /// So many ping-pong exchanges between the first two ranks; the others are idle.
    PingPong(u32),
    /// Messages to different ranks, if there are several others, and then as many receives.
    Burst(u32),
}

impl Pattern {
    fn messages(self) -> u32 {
        match self {
            Self::Resident(messages)
            | Self::Forwarded(messages)
            | Self::Reduced(messages)
            | Self::Gathered(messages)
            | Self::Isolated(messages)
            | Self::IsolatedReduced(messages)
            | Self::IsolatedGathered(messages)
            | Self::PingPong(messages)
            | Self::Burst(messages) => messages,
        }
    }

    fn plan(self, ring: &[Rank], ranks: u32) -> Plan {
        let blocks = self.messages();
        let program = |rank: Rank| {
            let Some(at) = ring.iter().position(|member| *member == rank) else {
                return Vec::new();
            };
            let (next, before) = (ring[(at + 1) % ring.len()], ring[(at + ring.len() - 1) % ring.len()]);
            let send = |block: u32| Step::Send {
                to: next,
                span: match self {
                    Self::Forwarded(_) if block > 0 => Span::block(PlanMemory::Output, block - 1),
                    _ => Span::block(PlanMemory::Input, block),
                },
            };
            let receive = |block| {
                let (from, into) = (before, Span::block(PlanMemory::Output, block));
                match self {
                    Self::Reduced(_) | Self::IsolatedReduced(_) => Step::RecvReduce {
                        from,
                        form: BlockForm::Element,
                        with: Span::block(PlanMemory::Input, block),
                        into,
                    },
                    _ => Step::Recv { from, into },
                }
            };
            let arrive = |block| match self {
                Self::Gathered(_) | Self::IsolatedGathered(_) => {
                    let scratch = Span::block(PlanMemory::Scratch, block);
                    let receive = Step::Recv {
                        from: before,
                        into: scratch,
                    };
                    let reduce = Step::Reduce {
                        sources: [scratch, Span::block(PlanMemory::Input, block)].into(),
                        into: Span::block(PlanMemory::Output, block),
                    };
                    vec![receive, reduce]
                }
                _ => vec![receive(block)],
            };
            match self {
                Self::PingPong(_) if at > 1 => Vec::new(),
                Self::Isolated(_) | Self::IsolatedReduced(_) | Self::IsolatedGathered(_) => match at {
                    0 => (0..blocks).map(send).collect(),
                    1 => (0..blocks).flat_map(arrive).collect(),
                    _ => Vec::new(),
                },
                Self::PingPong(_) => {
                    let (there, here) = match at {
                        0 => (ring[1], true),
                        _ => (ring[0], false),
                    };
                    let send = |block| Step::Send {
                        to: there,
                        span: Span::block(PlanMemory::Input, block),
                    };
                    let receive = |block| Step::Recv {
                        from: there,
                        into: Span::block(PlanMemory::Output, block),
                    };
                    let turn = |block| match here {
                        true => [send(block), receive(block)],
                        false => [receive(block), send(block)],
                    };
                    (0..blocks).flat_map(turn).collect()
                }
                Self::Burst(_) => {
                    let others = ring.len() as u32 - 1;
                    let away = |block: u32| (1 + block % others) as usize;
                    let to = |block| Step::Send {
                        to: ring[(at + away(block)) % ring.len()],
                        span: Span::block(PlanMemory::Input, block),
                    };
                    let from = |block| Step::Recv {
                        from: ring[(at + ring.len() - away(block)) % ring.len()],
                        into: Span::block(PlanMemory::Output, block),
                    };
                    (0..blocks).map(to).chain((0..blocks).map(from)).collect()
                }
                _ => (0..blocks)
                    .flat_map(|block| iter::once(send(block)).chain(arrive(block)))
                    .collect(),
            }
        };
        let all = || (0..ranks).map(Rank);
        Plan {
            shape: Shape {
                collective: Collective::AllReduce,
                order: all().collect(),
                root: Rank(0),
                blocks,
            },
            in_place: false,
            programs: all()
                .map(|rank| Program {
                    strands: vec![program(rank)],
                    scratch: match self {
                        Self::Gathered(_) | Self::IsolatedGathered(_) => (0..blocks).collect(),
                        _ => Vec::new(),
                    },
                    ..Program::default()
                })
                .collect(),
        }
    }
}

struct Calibrator<'a> {
    engine: &'a mut Engine,
    function: Function,
    memory: Arc<Segment>,
    repeated: Option<((PlanId, Protocol, u64), CachedProgram)>,
    longest: u64,
    shared: &'a Shared,
    options: &'a Options,
}

struct Measurement {
    protocol: Protocol,
    pattern: Pattern,
    bytes: u64,
    plan: PlanId,
    samples: Vec<f64>,
}

impl Measurement {
    fn whole(&self) -> u64 {
        self.bytes * u64::from(self.pattern.messages())
    }

    fn is_measured(&self) -> bool {
        !self.samples.is_empty()
    }

    fn hops(&self, mark: u64) -> (u64, Hops) {
        let hops = Hops {
            bytes: self.bytes,
            messages: self.pattern.messages(),
            ns: median(self.samples.clone()),
        };
        (mark, hops)
    }
}

impl<'a> Calibrator<'a> {
    fn new(engine: &'a mut Engine, shared: &'a Shared, options: &'a Options) -> Result<Self, CollectiveError> {
        let longest = match engine.is_oversubscribed() {
            false => MARKS[MARKS.len() - 1],
            true => OVERSUBSCRIBED_MAX_MARK,
        };
        Ok(Self {
            memory: engine.allocate(2 * longest as usize + REDUCE_CHUNK)?,
            function: Function::new(DataType::F32, ReduceOp::Sum, engine.ranks())?,
            repeated: None,
            longest,
            engine,
            shared,
            options,
        })
    }

    fn nothing(&mut self) -> Result<f64, CollectiveError> {
        let all: Vec<_> = (0..self.engine.ranks()).map(Rank).collect();
        let plan = self
            .engine
            .prepare(&Pattern::Resident(1).plan(&all, self.engine.ranks()))?;
        Ok(shortest(|| self.run(plan, Protocol::Ll, 0))?)
    }

    fn costs(&mut self, tuner: &mut Tuner, hosts: &[u32]) -> Result<(), CollectiveError> {
        let all = || (0..hosts.len() as u32).map(Rank);
        let near: Vec<_> = all().filter(|rank| hosts[rank.index()] == hosts[0]).collect();
        let far = all().find(|rank| hosts[rank.index()] != hosts[0]);
        let mut of = |ring: Vec<Rank>, mover| -> Result<_, CollectiveError> {
            if ring.len() < 2 {
                return Ok(None);
            }
            let calibration = self.calibrate(&ring)?;
            Ok(Some((calibration.link(mover), calibration.begin_ns())))
        };
        let local = of(near, DataMover::Processors)?;
        let remote = of(far.map_or(Vec::new(), |far| vec![Rank(0), far]), DataMover::Device)?;
        if let Some((link, begin_ns)) = local.or(remote) {
            (tuner.local, tuner.compute.begin_ns) = (link, begin_ns);
        }
        if let Some((link, _)) = remote.or(local) {
            tuner.remote = link;
        }
        tuner.compute = self.own_work(tuner.compute)?;
        Ok(())
    }

    /// Rank 0's measurement, if it is in the ring; those of other ranks are not used.
    fn calibrate(&mut self, ring: &[Rank]) -> Result<Calibration, CollectiveError> {
        let mut measurements = Vec::new();
        let all = [Protocol::Ll, Protocol::Ll128, Protocol::Simple];
        // Between two ranks all go to one; else to as many as there are others, at most four.
        let burst = if ring.len() == 2 {
            MANY
        } else {
            (ring.len() as u32 - 1).min(MANY)
        };
        for protocol in all {
            for pattern in [
                Pattern::Resident(1),
                Pattern::Resident(MANY),
                Pattern::PingPong(1),
                Pattern::PingPong(MANY),
                Pattern::Isolated(1),
                Pattern::Burst(burst),
            ] {
                measurements.push(self.measurement(ring, protocol, pattern, SHORT_BYTES)?);
            }
            if protocol == Protocol::Simple {
                measurements.push(self.measurement(ring, protocol, Pattern::Resident(1), GRANTED_MARK)?);
                if FAR_MARK <= self.longest {
                    let short = Pattern::Isolated((FAR_MARK / GRANTED_MARK) as u32);
                    measurements.push(self.measurement(ring, protocol, short, GRANTED_MARK)?);
                }
            }
            for mark in self.marks(protocol) {
                let (bytes, messages) = if mark <= MAX_MULTI_MESSAGE_MARK {
                    (mark, MANY)
                } else if mark <= NEAR {
                    (mark, 2)
                } else {
                    (SIMPLE_MESSAGE_BYTES, (mark / SIMPLE_MESSAGE_BYTES) as u32)
                };
                measurements.push(self.measurement(ring, protocol, Pattern::Resident(messages), bytes)?);
                measurements.push(self.measurement(ring, protocol, Pattern::Forwarded(messages), bytes)?);
                measurements.push(self.measurement(ring, protocol, Pattern::Reduced(messages), bytes)?);
                if protocol == Protocol::Simple {
                    for pattern in [
                        Pattern::IsolatedReduced,
                        Pattern::Gathered,
                        Pattern::IsolatedGathered,
                        Pattern::Isolated,
                    ] {
                        measurements.push(self.measurement(ring, protocol, pattern(messages), bytes)?);
                    }
                }
            }
        }
        // Each round has some of each kind, so that a disturbance affects all alike. Warm-up rounds
        // allocate memory, wake the ranks, and show whether there is time for long messages.
        let (mut reach, mut rounds, mut quick) = (SHORT_OPERATION, WARMUP_ROUNDS + ROUNDS, true);
        let mut round = 0;
        while round < rounds {
            let began = Instant::now();
            for measurement in &mut measurements {
                let long = measurement.whole() > LONG_OPERATION;
                if measurement.whole() > reach || long && round >= WARMUP_ROUNDS + LONG_ROUNDS {
                    continue;
                }
                // Caches hold other data: a short operation is repeated before it is measured.
                let (before, operations) = if round == 0 || !quick {
                    (0, 1)
                } else if measurement.pattern == Pattern::Isolated(1) && measurement.bytes == SHORT_BYTES {
                    (ONE_WAY_REPEATS, TINY_REPEATS)
                } else if measurement.whole() <= TINY_BYTES {
                    (TINY_REPEATS / 2, TINY_REPEATS)
                } else if measurement.whole() <= SHORT_OPERATION {
                    (REPEATS / 2, REPEATS)
                } else if long {
                    (u32::from(measurement.whole() < self.longest), 1)
                } else {
                    (1, 2)
                };
                for _ in 0..before {
                    self.run(measurement.plan, measurement.protocol, measurement.whole())?;
                }
                let began = Instant::now();
                for _ in 0..operations {
                    self.run(measurement.plan, measurement.protocol, measurement.whole())?;
                }
                if round >= WARMUP_ROUNDS {
                    measurement
                        .samples
                        .push(began.elapsed().as_nanos() as f64 / f64::from(operations));
                }
            }
            if round < WARMUP_ROUNDS && quick {
                quick = self.rank_zero_decides(began.elapsed() < QUICK_LIMITS[round])?;
                reach = match (quick, round) {
                    (true, 0) => LONG_OPERATION,
                    (true, _) => u64::MAX,
                    (false, _) => reach,
                };
                if !quick {
                    rounds = WARMUP_ROUNDS + SLOW_ROUNDS;
                }
            }
            round += 1;
        }
        let mut measurements = measurements.into_iter();
        let [ll, ll128, simple] = all.map(|protocol| {
            let mut next = || measurements.next().map_or(0.0, |next| median(next.samples));
            let [one_ns, many_ns, ping_pong_ns, ping_pongs_ns, single_ns, burst_ns] = core::array::from_fn(|_| next());
            let [long, far] = [0, FAR_MARK].map(|mark| {
                let is_there = protocol == Protocol::Simple && mark <= self.longest;
                let next = is_there.then(|| measurements.next()).flatten();
                next.filter(Measurement::is_measured)
                    .map(|next| next.hops(GRANTED_MARK).1)
            });
            let (mut resident, mut forwarded, mut reduced) = (Vec::new(), Vec::new(), Vec::new());
            let (mut isolated_reduced, mut isolated) = (Vec::new(), Vec::new());
            let (mut gathered, mut isolated_gathered) = (Vec::new(), Vec::new());
            for mark in self.marks(protocol) {
                let mut kinds = vec![&mut resident, &mut forwarded, &mut reduced];
                if protocol == Protocol::Simple {
                    kinds.extend([
                        &mut isolated_reduced,
                        &mut gathered,
                        &mut isolated_gathered,
                        &mut isolated,
                    ]);
                }
                for kind in kinds {
                    let measured = measurements.next().filter(Measurement::is_measured);
                    kind.extend(measured.map(|measurement| measurement.hops(mark)));
                }
            }
            Messages {
                one_ns,
                many_ns,
                ping_pong_ns,
                ping_pongs_ns,
                single_ns,
                burst: (burst, burst_ns),
                long,
                far: far.map(|hops| (FAR_MARK, hops)),
                resident,
                forwarded,
                reduced,
                isolated_reduced,
                gathered,
                isolated_gathered,
                isolated,
            }
        });
        Ok(Calibration { simple, ll, ll128 })
    }

    fn rank_zero_decides(&self, mine: bool) -> Result<bool, CollectiveError> {
        let mut group = self.shared.group();
        group.control_mut().set_timeout(self.options.deadline);
        let said = group.control_mut().all_gather(&[u8::from(mine)])?;
        Ok(said.first().is_some_and(|first| first == &[1]))
    }

    fn marks(&self, protocol: Protocol) -> impl Iterator<Item = u64> + use<> {
        let longest = match protocol {
            Protocol::Simple => self.longest,
            Protocol::Ll | Protocol::Ll128 => MAX_LINE_MARK,
        };
        MARKS.into_iter().filter(move |&mark| mark <= longest)
    }

    fn measurement(
        &mut self,
        ring: &[Rank],
        protocol: Protocol,
        pattern: Pattern,
        bytes: u64,
    ) -> Result<Measurement, CollectiveError> {
        let plan = self.engine.prepare(&pattern.plan(ring, self.engine.ranks()))?;
        Ok(Measurement {
            protocol,
            pattern,
            bytes,
            plan,
            samples: Vec::with_capacity(ROUNDS),
        })
    }

    fn run(&mut self, plan: PlanId, protocol: Protocol, bytes: u64) -> Result<(), EngineError> {
        let way = (plan, protocol, bytes);
        let start = self.memory.start();
        let repeated = self.repeated.filter(|(last, _)| *last == way);
        if let Some((_, cached)) = repeated.filter(|(_, cached)| self.engine.can_run_cached(*cached)) {
            let data = (start, start.wrapping_add(self.longest as usize));
            // SAFETY: both halves of the memory are long enough and not used otherwise.
            let ticket = unsafe { self.engine.run_cached(cached, data, || false) };
            return ticket.map_or(Ok(()), |ticket| Ok(self.engine.wait(ticket)?));
        }
        let operation = Operation {
            plan,
            function: self.function.clone(),
            count: bytes / size_of::<f32>() as u64,
            parts: None,
            input: Data::Registered(Arc::clone(&self.memory), 0),
            output: Data::Registered(Arc::clone(&self.memory), self.longest as usize),
            scale: None,
            tuning: Tuning {
                protocol,
                channels: 1,
                slice: self.longest as usize,
            },
            deadline: Some(self.options.deadline),
        };
        // SAFETY: both halves of the memory are long enough and not used otherwise.
        let ticket = unsafe { self.engine.submit(operation) }?;
        self.repeated = self.engine.cache_program(ticket).map(|cached| (way, cached));
        Ok(self.engine.wait(ticket)?)
    }

    /// Costs of a rank's own work, measured by all ranks at about the same time, as in operations.
    fn own_work(&self, otherwise: Compute) -> Result<Compute, CollectiveError> {
        let function = Function::new(DataType::F32, ReduceOp::Sum, 2)?;
        let (input, output) = (
            self.memory.start(),
            self.memory.start().wrapping_add(self.longest as usize),
        );
        let come = output.wrapping_add(self.longest as usize);
        let reduce = |at: usize, bytes: usize| {
            let (with, into) = (input.wrapping_add(at), output.wrapping_add(at));
            let sources = [
                (BlockForm::Element, come.cast_const()),
                (BlockForm::Element, with.cast_const()),
            ];
            // SAFETY: both halves of the memory are long enough, and the received data lies behind
            // them; nothing else accesses them, as all operations on them are done.
            unsafe { function.reduce(&sources, (BlockForm::Element, into), bytes / 4) };
        };
        let copy = |at: usize, bytes: usize| {
            // SAFETY: as above.
            unsafe { core::ptr::copy_nonoverlapping(input.wrapping_add(at), output.wrapping_add(at), bytes) };
            black_box(output);
        };
        let gamma = self.scale(reduce);
        let copy = self.scale(copy);
        let middle = |scale: Option<Scale>, otherwise| {
            scale.map_or(otherwise, |scale| {
                scale.ns_per_byte(OVERSUBSCRIBED_MAX_MARK as f64, OVERSUBSCRIBED_MAX_MARK as f64)
            })
        };
        Ok(Compute {
            gamma_ns_per_byte: middle(gamma, otherwise.gamma_ns_per_byte),
            copy_ns_per_byte: middle(copy, otherwise.copy_ns_per_byte),
            gamma,
            copy,
            ..otherwise
        })
    }

    fn scale(&self, work: impl Fn(usize, usize)) -> Option<Scale> {
        let mut rates = Vec::new();
        for mark in MARKS.into_iter().filter(|&mark| mark <= self.longest) {
            let (whole, times) = (mark as usize, (64 << 10) / mark + 1);
            let mut samples = Vec::new();
            for _ in 0..4 {
                let began = Instant::now();
                for _ in 0..times {
                    (0..whole)
                        .step_by(REDUCE_CHUNK)
                        .for_each(|at| work(at, REDUCE_CHUNK.min(whole - at)));
                }
                samples.push(began.elapsed().as_nanos() as f64 / (times * mark) as f64);
            }
            // The first sample allocates memory.
            rates.push((mark, median(samples.split_off(1))));
        }
        Scale::of(&rates)
    }
}
