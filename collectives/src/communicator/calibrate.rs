//! Measuring what messages cost, at the start: ping-pongs between two ranks of a host, and between two of different hosts, by each protocol; and rank 0's own reductions and copies.
//!
//! A message is an operation in which only one rank gives another something, so what is measured has all that operations have. All ranks begin the same operations, most of them with nothing to do. It takes a few milliseconds;
//! machines are shared, so of each size the median counts, and the [fit](crate::tune::Calibration) is one that a few disturbed samples do not move.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::make::tuner_of;
use super::{CollectiveError, Options};
use crate::algorithm::Algorithm;
use crate::cost::{Compute, Link, Mover};
use crate::executor::{Data, Engine, EngineError, Operation, Parts, PlanId, Tuning};
use crate::kernel::Function;
use crate::memory::Segment;
use crate::plan::{Collective, Form};
use crate::tune::{Calibration, Messages, Sample, Tuner, TuningFile, compute};
use crate::types::{DataType, Protocol, Rank, ReduceOp};

/// Bytes and round trips, for each protocol: up to where it may be chosen.
const SIMPLE: &[(usize, u32)] = &[(8, 15), (4 << 10, 15), (64 << 10, 9), (512 << 10, 5)];
const LL: &[(usize, u32)] = &[(8, 15), (1 << 10, 15), (16 << 10, 9)];
const LL128: &[(usize, u32)] = &[(8, 15), (4 << 10, 15), (64 << 10, 9)];
/// The longest of them.
const LONGEST: usize = 512 << 10;
/// Bytes of reductions and copies, and how often.
const WORK: [usize; 3] = [4 << 10, 64 << 10, 512 << 10];
const TIMES: usize = 5;

/// The tuner of these options, with costs that were measured unless a tuning file has some.
pub(super) fn measured(engine: &mut Engine, hosts: &[u32], options: &Options) -> Result<Tuner, CollectiveError> {
    let other = |local: bool| {
        let ranks = hosts.iter().enumerate().skip(1);
        let mut fits = ranks.filter(|(_, host)| (**host == hosts[0]) == local);
        fits.next().map(|(rank, _)| Rank(rank as u32))
    };
    let (near, far) = (other(true), other(false));
    let mut tuner = tuner_of(options);
    if !options.calibrate || near.or(far).is_none() {
        return with_file(tuner, options);
    }
    let memory = engine.allocate(2 * LONGEST)?;
    let order: Vec<_> = (0..engine.ranks()).map(Rank).collect();
    let schedule = Algorithm::FullMesh.schedule(Collective::AllToAllV, &order, Rank(0))?;
    let mut table = Table {
        plan: engine.prepare(&*schedule)?,
        function: Function::new(DataType::U8, ReduceOp::Sum, engine.ranks())?,
        engine,
        memory: &memory,
        options,
    };
    let local = near
        .map(|rank| table.link(rank, Mover::Receiver))
        .transpose()?
        .flatten();
    let remote = far.map(|rank| table.link(rank, Mover::Device)).transpose()?.flatten();
    tuner.local = local.or(remote).unwrap_or(tuner.local);
    tuner.remote = remote.or(local).unwrap_or(tuner.remote);
    if table.engine.rank() == Rank(0) {
        tuner.compute = own_work(&memory, tuner.compute)?;
    }
    with_file(tuner, options)
}

fn with_file(tuner: Tuner, options: &Options) -> Result<Tuner, CollectiveError> {
    Ok(match &options.tuning_file {
        Some(path) => tuner.with_file(TuningFile::read(path)?),
        None => tuner,
    })
}

/// What is played with.
struct Table<'a> {
    engine: &'a mut Engine,
    plan: PlanId,
    function: Function,
    memory: &'a Arc<Segment>,
    options: &'a Options,
}

impl Table<'_> {
    /// The link between rank 0 and another, as rank 0 measures it; the others get what they measured of doing nothing, and drop it.
    fn link(&mut self, other: Rank, mover: Mover) -> Result<Option<Link>, CollectiveError> {
        Ok(Calibration {
            simple: self.messages(other, Protocol::Simple, SIMPLE)?,
            ll: self.messages(other, Protocol::Ll, LL)?,
            ll128: self.messages(other, Protocol::Ll128, LL128)?,
        }
        .link(mover))
    }

    fn messages(
        &mut self,
        other: Rank,
        protocol: Protocol,
        sizes: &[(usize, u32)],
    ) -> Result<Messages, CollectiveError> {
        let mut ping_pong = Vec::new();
        for &(bytes, rounds) in sizes {
            let mut halves = Vec::new();
            // The first is to make memory ready.
            for round in 0..=rounds {
                let began = Instant::now();
                self.message(Rank(0), other, bytes, protocol)?;
                self.message(other, Rank(0), bytes, protocol)?;
                if round > 0 {
                    halves.push(began.elapsed().as_nanos() as f64 / 2.0);
                }
            }
            halves.sort_by(f64::total_cmp);
            ping_pong.push(Sample {
                bytes: bytes as u64,
                ns: halves[halves.len() / 2],
            });
        }
        Ok(Messages {
            ping_pong,
            stream: Vec::new(),
        })
    }

    fn message(&mut self, from: Rank, to: Rank, bytes: usize, protocol: Protocol) -> Result<(), EngineError> {
        let me = self.engine.rank();
        let part = |at: Rank, with: Rank| {
            let ranks = (0..self.engine.ranks()).map(Rank);
            let len = |rank| if at == me && rank == with { bytes as u64 } else { 0 };
            ranks.map(|rank| (0, len(rank))).collect()
        };
        let operation = Operation {
            plan: self.plan,
            function: self.function.clone(),
            count: 0,
            parts: Some(Parts {
                send: part(from, to),
                receive: part(to, from),
            }),
            input: Data::Registered(Arc::clone(self.memory), 0),
            output: Data::Registered(Arc::clone(self.memory), LONGEST),
            scale: None,
            tuning: Tuning {
                protocol,
                channels: 1,
                slice: LONGEST,
            },
            deadline: Some(self.options.deadline),
        };
        // SAFETY: both halves of the memory are long enough, and nobody else's.
        let ticket = unsafe { self.engine.submit(operation) }?;
        Ok(self.engine.wait(ticket)?)
    }
}

/// What a rank's own work costs.
fn own_work(memory: &Segment, otherwise: Compute) -> Result<Compute, CollectiveError> {
    let function = Function::new(DataType::F32, ReduceOp::Sum, 2)?;
    let (from, into) = (memory.start(), memory.start().wrapping_add(LONGEST));
    let (mut reductions, mut copies) = (Vec::new(), Vec::new());
    for bytes in WORK {
        for _ in 0..TIMES {
            let began = Instant::now();
            // SAFETY: both halves of the memory are long enough, and nobody else touches them: all operations on them are done.
            unsafe {
                let sources = [(Form::Element, from.cast_const()), (Form::Element, into.cast_const())];
                function.reduce(&sources, (Form::Element, into), bytes / 4);
            }
            reductions.push(began.elapsed());
            let began = Instant::now();
            // SAFETY: as above.
            unsafe { core::ptr::copy_nonoverlapping(from, into, bytes) };
            black_box(into);
            copies.push(began.elapsed());
        }
    }
    let samples = |times: Vec<Duration>| -> Vec<Sample> {
        let sizes = WORK.iter().flat_map(|bytes| [*bytes as u64; TIMES]);
        let sample = |(bytes, time): (u64, Duration)| Sample {
            bytes,
            ns: time.as_nanos() as f64,
        };
        sizes.zip(times).map(sample).collect()
    };
    Ok(compute(&samples(reductions), &samples(copies), otherwise))
}
