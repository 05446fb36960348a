//! All ranks of a collective on GPUs in one process, each with an arena that all others reach: the executor by kernels without a communicator. Its cases and its measurements; they run on GPUs, and on the stand-in for one.

use std::collections::HashSet;
use std::fmt;
use std::sync::Mutex;

use anyhow::{Context as _, Result, anyhow, bail};
use doorbell_collectives::gpu::kernel::{KernelExecutor, Operation, Plan};
use doorbell_collectives::gpu::lower::LowerError;
use doorbell_collectives::gpu::program::{Cut, Function};
use doorbell_collectives::gpu::small::SmallExecutor;
use doorbell_collectives::gpu::{Areas, Sizes};
use doorbell_collectives::kernel::{F8E4M3, F8E5M2, bf16, f16};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::{Case, Number, given};
use doorbell_collectives::{Algorithm, DataType, Element, Rank, ReduceOp};
use doorbell_cuda::collective::CollectiveKernels;
use doorbell_cuda::{Context, DeviceMemory, Driver, Event, HostMemory, Memory as _, Stream};

/// Bytes that buffers are longer than what they are for, so that they can begin anywhere.
const SPARE: usize = 256;

/// All ranks.
pub struct Rig {
    /// By rank.
    pub ranks: Vec<Member>,
    pub(super) sizes: Sizes,
    prepared: Mutex<HashSet<(DataType, bool, bool)>>,
}

/// One rank.
pub struct Member {
    /// Of its device.
    pub context: Context,
    /// Where its operations go.
    pub stream: Stream,
    /// Its kernels.
    pub executor: KernelExecutor,
    /// The same for short operations.
    pub small: SmallExecutor,
    /// When it began and ended.
    pub times: (Event, Event),
    pub(super) input: DeviceMemory,
    pub(super) output: DeviceMemory,
    host: HostMemory,
    stop: HostMemory,
    _arena: DeviceMemory,
}

/// How a case is run.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// By which plan.
    pub algorithm: Algorithm,
    /// Whether outputs are written by all others.
    pub direct: bool,
    /// Input and output in one memory.
    pub in_place: bool,
    /// How it is cut.
    pub cut: Cut,
    /// Bytes by which memory is off its alignment, input and output.
    pub skew: (usize, usize),
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cut {
            blocks,
            threads,
            slice,
            lines,
        } = self.cut;
        let staged = if self.direct { "direct" } else { "staged" };
        let place = if self.in_place { ", in place" } else { "" };
        let lines = if lines { ", lines" } else { "" };
        write!(
            f,
            "{}, {staged}{place}{lines}, {blocks} x {threads} threads, slices of {slice}, memory off by {:?}",
            self.algorithm, self.skew
        )
    }
}

impl Rig {
    /// `ranks` ranks on the driver's devices by turns, with `bytes` of input and of output each. `ptx`: kernels built otherwise.
    ///
    /// # Errors
    /// The driver's error; devices that do not reach each other.
    pub fn new(
        driver: Driver,
        ranks: usize,
        bytes: usize,
        sizes: Sizes,
        blocks: u32,
        ptx: Option<&str>,
    ) -> Result<Self> {
        let devices = driver.devices()?;
        let areas = Areas::new(ranks, sizes);
        let contexts: Vec<Context> = (0..ranks)
            .map(|rank| devices[rank % devices.len()].context())
            .collect::<Result<_, _>>()?;
        let here: Vec<_> = contexts.iter().map(Context::device).collect();
        let shared = |context: &Context, len| DeviceMemory::options(context).peers(&here).alloc(len);
        let arenas: Vec<DeviceMemory> = contexts
            .iter()
            .map(|context| shared(context, areas.len()))
            .collect::<Result<_, _>>()?;
        let addresses: Vec<u64> = arenas.iter().map(|arena| arena.device_ptr().0).collect();
        let mut members = Vec::new();
        for (rank, (context, arena)) in contexts.iter().zip(arenas).enumerate() {
            let stream = Stream::new(context)?;
            stream.fill(arena.span(..areas.fifos.start)?, 0)?;
            stream.synchronize()?;
            let stop = HostMemory::alloc(context, 4096)?;
            let kernels = match ptx {
                Some(ptx) => CollectiveKernels::with_ptx(context, ptx.to_owned()),
                None => CollectiveKernels::new(context),
            };
            let word = stop.device_ptr().0;
            members.push(Member {
                context: context.clone(),
                executor: KernelExecutor::new(kernels, Rank(rank as u32), addresses.clone(), &areas, word, blocks),
                small: SmallExecutor::new(context, Rank(rank as u32), addresses.clone(), &areas, word),
                times: (Event::timed(context)?, Event::timed(context)?),
                input: shared(context, bytes + SPARE)?,
                output: shared(context, bytes + SPARE)?,
                host: HostMemory::alloc(context, bytes.min(64 << 20) + SPARE)?,
                stop,
                stream,
                _arena: arena,
            });
        }
        Ok(Self {
            ranks: members,
            sizes,
            prepared: Mutex::default(),
        })
    }

    /// Tells all kernels to give up, those of later launches too; or no longer.
    ///
    /// # Errors
    /// None that can happen.
    pub fn stop(&self, all: bool) -> Result<()> {
        for member in &self.ranks {
            member
                .stop
                .atomic_u32(0)?
                .store(u32::from(all), std::sync::atomic::Ordering::Release);
        }
        Ok(())
    }

    /// Loads a function's kernels for all ranks, if they are not.
    ///
    /// # Errors
    /// The driver's error.
    pub fn prepare(&self, function: Function, lines: bool) -> Result<()> {
        let mut prepared = self.prepared.lock().map_err(|_| anyhow!("a thread has panicked"))?;
        if !prepared.insert((function.data, function.op.is_some(), lines)) {
            return Ok(());
        }
        for member in &self.ranks {
            member.executor.prepare(&member.stream, function, lines)?;
        }
        Ok(())
    }

    /// Each rank's plan of a case.
    ///
    /// # Errors
    /// Where the algorithm does not do it, or it cannot be lowered.
    pub fn plans(&self, case: &Case, way: Way) -> Result<Vec<Plan>> {
        let order: Vec<Rank> = (0..case.ranks).map(Rank).collect();
        let schedule = way.algorithm.schedule(case.collective, &order, case.root)?;
        if way.in_place && !schedule.in_place() {
            return Err(NotInPlace(way.algorithm, case.collective).into());
        }
        let direct = way.direct && !way.cut.lines;
        order
            .iter()
            .map(|&rank| Ok(Plan::new(&*schedule, rank, direct, way.in_place)?))
            .collect()
    }

    /// Where each rank's input and output begin: in place, or off their alignment by so many bytes.
    #[must_use]
    pub fn places(&self, case: &Case, in_place: bool, skew: (usize, usize), bytes: usize) -> Vec<(u64, u64)> {
        let place = |(rank, member): (usize, &Member)| {
            let output = member.output.device_ptr().0 + skew.1 as u64;
            if !in_place {
                return (member.input.device_ptr().0 + skew.0 as u64, output);
            }
            let own = rank as u64 * case.count * bytes as u64;
            match case.collective {
                Collective::AllGather | Collective::Gather => (output + own, output),
                Collective::ReduceScatter | Collective::Scatter => (output, output + own),
                _ => (output, output),
            }
        };
        self.ranks.iter().enumerate().map(place).collect()
    }

    /// Puts an operation into all ranks' streams.
    ///
    /// # Errors
    /// What the executor says.
    pub fn launch(&self, plans: &[Plan], case: &Case, way: Way, function: impl Fn(Rank) -> Function) -> Result<()> {
        for rank in 0..self.ranks.len() {
            self.launch_one(rank, plans, case, way, function(Rank(rank as u32)))?;
        }
        Ok(())
    }

    /// Puts one rank's part into its stream.
    ///
    /// # Errors
    /// What the executor says.
    pub fn launch_one(
        &self,
        rank: usize,
        plans: &[Plan],
        case: &Case,
        way: Way,
        function: Function,
    ) -> Result<(), anyhow::Error> {
        let places = self.places(case, way.in_place, way.skew, function.data.bytes());
        let outputs: Vec<u64> = places.iter().map(|place| place.1).collect();
        let operation = Operation {
            input: places[rank].0,
            output: places[rank].1,
            outputs: way.direct.then_some(&outputs[..]),
            count: case.count,
        };
        let member = &self.ranks[rank];
        let uses = [member.input.all(), member.output.all()];
        // SAFETY: the memories are long enough for the case, as `fits` has it, and nothing else is done with them until the streams are waited for.
        unsafe {
            member
                .executor
                .launch(&member.stream, &plans[rank], function, way.cut, operation, &uses)?;
        }
        Ok(())
    }

    /// Runs a case of the type `T` so many times in a row, from inputs of the seed, and fails unless the results are right each time.
    ///
    /// # Errors
    /// What is wrong, or the driver's error.
    pub fn check<T: Number>(&self, case: &Case, way: Way, op: Option<ReduceOp>, seed: u64, times: u64) -> Result<()> {
        let plans = self.plans(case, way)?;
        let bytes = size_of::<T>();
        self.prepare(
            Function {
                data: T::TYPE,
                op,
                scalar: 0,
            },
            way.cut.lines,
        )?;
        let places = self.places(case, way.in_place, way.skew, bytes);
        for round in 0..times {
            self.round::<T>(case, &places, op, seed + round, |function| {
                self.launch(&plans, case, way, function)
            })?;
        }
        Ok(())
    }

    /// Has `launch` put an operation of the type `T` into all ranks' streams, from inputs of the seed, and fails unless the results are right. In `places` is where each rank has its input and its output.
    pub(super) fn round<T: Number>(
        &self,
        case: &Case,
        places: &[(u64, u64)],
        op: Option<ReduceOp>,
        seed: u64,
        launch: impl FnOnce(&dyn Fn(Rank) -> Function) -> Result<()>,
    ) -> Result<()> {
        for (rank, member) in self.ranks.iter().enumerate() {
            let rank = Rank(rank as u32);
            member.stream.fill(member.output.all(), 0xa5)?;
            member.stream.synchronize()?;
            let inputs: Vec<T> = (0..case.input(rank)).map(|at| given(seed, rank, at)).collect();
            let at = |memory: &DeviceMemory| places[rank.index()].0.wrapping_sub(memory.device_ptr().0) as usize;
            let memory = match at(&member.output) < member.output.len() {
                true => &member.output,
                false => &member.input,
            };
            member.write(memory, at(memory), &inputs)?;
        }
        launch(&|rank| Function {
            data: T::TYPE,
            op,
            scalar: match op {
                Some(ReduceOp::PreMulSum) => bits(T::scalar(rank)),
                _ => 0,
            },
        })?;
        for (rank, member) in self.ranks.iter().enumerate() {
            member.stream.synchronize()?;
            let rank = Rank(rank as u32);
            let mut output = vec![T::ZERO; case.output(rank) as usize];
            let base = member.output.device_ptr().0;
            member.read(&member.output, (places[rank.index()].1 - base) as usize, &mut output)?;
            let wrong = case.wrong(op.unwrap_or(ReduceOp::Sum), rank, seed, &output);
            if wrong > 0 {
                bail!(
                    "{wrong} of {} elements of rank {rank} are wrong, of seed {seed}",
                    output.len()
                );
            }
        }
        Ok(())
    }
}

/// A scalar's bits.
fn bits<A: Element>(scalar: A) -> u64 {
    let mut bytes = [0; 8];
    let size = size_of::<A>();
    // SAFETY: an element is plain data of at most 8 bytes.
    unsafe { std::ptr::copy_nonoverlapping((&raw const scalar).cast::<u8>(), bytes.as_mut_ptr(), size) };
    u64::from_le_bytes(bytes)
}

impl Member {
    pub(super) fn write<T: Element>(&self, memory: &DeviceMemory, at: usize, elements: &[T]) -> Result<()> {
        // SAFETY: elements are plain data.
        let bytes = unsafe { std::slice::from_raw_parts(elements.as_ptr().cast::<u8>(), size_of_val(elements)) };
        for (index, part) in bytes.chunks(self.host.len()).enumerate() {
            let start = at + index * self.host.len();
            self.host.copy_in(0, part)?;
            self.stream
                .copy(memory.span(start..start + part.len())?, self.host.span(..part.len())?)?;
            self.stream.synchronize()?;
        }
        Ok(())
    }

    pub(super) fn read<T: Element>(&self, memory: &DeviceMemory, at: usize, elements: &mut [T]) -> Result<()> {
        // SAFETY: elements are plain data, of which any bits are one.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast::<u8>(), size_of_val(elements)) };
        let len = self.host.len();
        for (index, part) in bytes.chunks_mut(len).enumerate() {
            let start = at + index * len;
            self.stream
                .copy(self.host.span(..part.len())?, memory.span(start..start + part.len())?)?;
            self.stream.synchronize()?;
            self.host.copy_out(0, part)?;
        }
        Ok(())
    }
}

/// Bytes that a case takes of an input or output at most.
#[must_use]
pub fn fits(case: &Case, bytes: usize) -> usize {
    let most = (0..case.ranks)
        .map(|rank| case.input(Rank(rank)).max(case.output(Rank(rank))))
        .max()
        .unwrap_or(0);
    usize::try_from(most).unwrap_or(usize::MAX).saturating_mul(bytes)
}

/// Which ways are taken of all: one of so many, by turns.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    every: u64,
    at: u64,
}

impl Sample {
    /// One of `every`: all, if that is 1.
    #[must_use]
    pub fn one_of(every: u64) -> Self {
        Self { every, at: 0 }
    }

    pub(super) fn takes(&mut self) -> bool {
        self.at += 1;
        self.at.is_multiple_of(self.every)
    }
}

/// Ways of a case, of those that the sample has: how many were right.
///
/// # Errors
/// The first that is not.
pub fn ways<T: Number>(rig: &Rig, case: &Case, ops: &[ReduceOp], cuts: &[Cut], sample: &mut Sample) -> Result<usize> {
    let mut done = 0;
    let seed = sample.at;
    let none = [None];
    let some: Vec<_> = ops.iter().copied().map(Some).collect();
    let ops = if case.collective.reduces() {
        &some[..]
    } else {
        &none[..]
    };
    for algorithm in Algorithm::of(case.collective) {
        for &cut in cuts {
            for in_place in [false, true] {
                for direct in [true, false] {
                    if direct && cut.lines {
                        continue;
                    }
                    for skew in [(0, 0), (3 * size_of::<T>(), size_of::<T>())] {
                        let way = Way {
                            algorithm,
                            direct,
                            in_place,
                            cut,
                            skew,
                        };
                        for &op in ops {
                            if !sample.takes() {
                                continue;
                            }
                            let found = rig.check::<T>(case, way, op, seed, 2);
                            match found {
                                Ok(()) => done += 1,
                                Err(error) if is_refused(&error) => {}
                                Err(error) => {
                                    let op = op.map_or("", ReduceOp::name);
                                    return Err(error).with_context(|| {
                                        format!(
                                            "{} of {} {} {op} among {}, root {}: {way}",
                                            case.collective,
                                            case.count,
                                            T::TYPE,
                                            case.ranks,
                                            case.root
                                        )
                                    });
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    Ok(done)
}

/// Whether an error says that something is not done this way.
fn is_refused(error: &anyhow::Error) -> bool {
    error.is::<NotInPlace>()
        || matches!(error.downcast_ref(), Some(LowerError::Stuck { .. }))
        || error.to_string().contains("do not go as lines")
}

/// What is not done in place.
#[derive(Debug, thiserror::Error)]
#[error("{0} of {1} does not run in place")]
struct NotInPlace(Algorithm, Collective);

/// Every way of a case with every type of elements, the operators among the types by turns: how many were right.
///
/// # Errors
/// The first that is not.
pub fn every_type(rig: &Rig, case: &Case, cuts: &[Cut], sample: &mut Sample) -> Result<usize> {
    use ReduceOp::{Avg, Max, Min, PreMulSum, Prod, Sum};
    if !case.collective.reduces() {
        return Ok(ways::<u8>(rig, case, &[], cuts, sample)?
            + ways::<bf16>(rig, case, &[], cuts, sample)?
            + ways::<f32>(rig, case, &[], cuts, sample)?
            + ways::<u64>(rig, case, &[], cuts, sample)?);
    }
    Ok(ways::<f32>(rig, case, &[Sum, PreMulSum], cuts, sample)?
        + ways::<bf16>(rig, case, &[Sum, Avg], cuts, sample)?
        + ways::<f16>(rig, case, &[Prod, PreMulSum], cuts, sample)?
        + ways::<F8E4M3>(rig, case, &[Max], cuts, sample)?
        + ways::<F8E5M2>(rig, case, &[Sum], cuts, sample)?
        + ways::<f64>(rig, case, &[Avg], cuts, sample)?
        + ways::<i8>(rig, case, &[Min, Avg], cuts, sample)?
        + ways::<u8>(rig, case, &[Sum], cuts, sample)?
        + ways::<i32>(rig, case, &[Avg], cuts, sample)?
        + ways::<u32>(rig, case, &[Prod], cuts, sample)?
        + ways::<i64>(rig, case, &[PreMulSum], cuts, sample)?
        + ways::<u64>(rig, case, &[Max], cuts, sample)?)
}

/// What is checked among so many ranks.
#[must_use]
pub fn cases(ranks: u32, quick: bool) -> Vec<Case> {
    let counts: &[u64] = if quick {
        &[1, 1031]
    } else {
        &[1, 3, 1031, 65536, 1_000_003]
    };
    let mut cases = Vec::new();
    for &collective in Collective::ALL {
        if matches!(collective, Collective::AllToAllV | Collective::Barrier) {
            continue;
        }
        for &count in counts {
            cases.push(Case {
                collective,
                ranks,
                root: Rank(ranks - 1),
                count,
            });
        }
    }
    cases
}

/// How cases are cut: whole messages in one slice and in many, and lines.
#[must_use]
pub fn cuts(quick: bool) -> Vec<Cut> {
    let cut = |blocks, threads, slice, lines| Cut {
        blocks,
        threads,
        slice,
        lines,
    };
    if quick {
        vec![cut(2, 64, 1024, false), cut(2, 64, 512, true)]
    } else {
        vec![
            cut(3, 512, 32 << 10, false),
            cut(16, 256, 2048, false),
            cut(4, 512, 4096, true),
        ]
    }
}
