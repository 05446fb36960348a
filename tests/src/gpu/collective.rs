//! All ranks of a GPU collective in one process, without a communicator: each has an arena that all
//! others access. Cases and measurements, for GPUs and for the stand-in.

use std::fmt;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use doorbell_collectives::gpu::kernel::{KernelExecutor, Operation, Plan};
use doorbell_collectives::gpu::lower::LowerError;
use doorbell_collectives::gpu::program::{Function, LaunchShape};
use doorbell_collectives::gpu::small::SmallExecutor;
use doorbell_collectives::gpu::{Areas, Sizes};
use doorbell_collectives::kernel::{F8E4M3, F8E5M2, bf16, f16};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::{Case, Number, input_element};
use doorbell_collectives::{Algorithm, Element, Rank, ReduceOp};
use doorbell_cuda::collective::CollectiveKernels;
use doorbell_cuda::{Context, DeviceMemory, Driver, Event, HostMemory, Memory as _, Stream};

/// Spare bytes of buffers, so that data can start at any offset.
const SPARE: usize = 256;

/// All ranks.
pub struct Rig {
    /// By rank.
    pub ranks: Vec<Member>,
    pub(super) sizes: Sizes,
}

/// One rank.
pub struct Member {
    /// Of its device.
    pub context: Context,
    /// Its stream.
    pub stream: Stream,
    /// Its kernels.
    pub executor: KernelExecutor,
    /// Its kernels for short operations.
    pub small: SmallExecutor,
    /// Start and end events.
    pub times: (Event, Event),
    pub(super) input: DeviceMemory,
    pub(super) output: DeviceMemory,
    host: HostMemory,
    stop: HostMemory,
    _arena: DeviceMemory,
    /// Kept, so that the next member of the device shares them.
    _kernels: Arc<CollectiveKernels>,
}

/// A variant of a case.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Whether peers store into outputs directly.
    pub direct: bool,
    /// In place.
    pub in_place: bool,
    /// The launch shape.
    pub shape: LaunchShape,
    /// Misalignment of input and output in bytes.
    pub skew: (usize, usize),
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LaunchShape {
            blocks,
            threads,
            slice,
            ll,
        } = self.shape;
        let staged = if self.direct { "direct" } else { "staged" };
        let place = if self.in_place { ", in place" } else { "" };
        let ll = if ll { ", lines" } else { "" };
        write!(
            f,
            "{}, {staged}{place}{ll}, {blocks} x {threads} threads, slices of {slice}, memory off by {:?}",
            self.algorithm, self.skew
        )
    }
}

impl Rig {
    /// `ranks` ranks on the driver's devices in rotation, with `bytes` of input and of output each;
    /// `ptx`: kernels of another build. Fails on devices without peer access.
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
            let common = CollectiveKernels::of(context);
            let other = ptx.map(|ptx| CollectiveKernels::with_ptx(context, ptx.to_owned()));
            let kernels = other.as_ref().unwrap_or(&common);
            let (word, rank) = (stop.device_ptr().0, Rank(rank as u32));
            members.push(Member {
                context: context.clone(),
                executor: KernelExecutor::new(kernels, rank, addresses.clone(), (&areas, blocks, true), word, true)?,
                small: SmallExecutor::new(&common, rank, addresses.clone(), &areas, word)?,
                times: (Event::timed(context)?, Event::timed(context)?),
                input: shared(context, bytes + SPARE)?,
                output: shared(context, bytes + SPARE)?,
                host: HostMemory::alloc(context, bytes.min(64 << 20) + SPARE)?,
                stop,
                stream,
                _arena: arena,
                _kernels: common,
            });
        }
        Ok(Self { ranks: members, sizes })
    }

    /// Sets or clears the abort word of all kernels, including those of later launches.
    pub fn stop(&self, all: bool) -> Result<()> {
        for member in &self.ranks {
            member
                .stop
                .atomic_u32(0)?
                .store(u32::from(all), std::sync::atomic::Ordering::Release);
        }
        Ok(())
    }

    /// Each rank's plan of a case; an error if it is not supported, or cannot be lowered.
    pub fn plans(&self, case: &Case, variant: Variant) -> Result<Vec<Plan>> {
        let order: Vec<Rank> = (0..case.ranks).map(Rank).collect();
        let schedule = variant.algorithm.schedule(case.collective, &order, case.root)?;
        if variant.in_place && !schedule.in_place() {
            return Err(NotInPlace(variant.algorithm, case.collective).into());
        }
        let direct = variant.direct && !variant.shape.ll;
        order
            .iter()
            .map(|&rank| {
                Ok(Plan::new(
                    &*schedule,
                    rank,
                    (direct, variant.shape.ll),
                    variant.in_place,
                )?)
            })
            .collect()
    }

    /// The addresses of each rank's input and output: in place, or misaligned by `skew`.
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

    /// Enqueues an operation on all ranks' streams.
    pub fn launch(
        &self,
        plans: &[Plan],
        case: &Case,
        variant: Variant,
        function: impl Fn(Rank) -> Function,
    ) -> Result<()> {
        for rank in 0..self.ranks.len() {
            self.launch_one(rank, plans, case, variant, function(Rank(rank as u32)))?;
        }
        Ok(())
    }

    /// Enqueues one rank's part on its stream.
    pub fn launch_one(
        &self,
        rank: usize,
        plans: &[Plan],
        case: &Case,
        variant: Variant,
        function: Function,
    ) -> Result<(), anyhow::Error> {
        let places = self.places(case, variant.in_place, variant.skew, function.data.bytes());
        let outputs: Vec<u64> = places.iter().map(|place| place.1).collect();
        let operation = Operation {
            input: places[rank].0,
            output: places[rank].1,
            outputs: variant.direct.then_some(&outputs[..]),
            count: case.count,
        };
        let member = &self.ranks[rank];
        let uses = [member.input.all(), member.output.all()];
        // SAFETY: the memories are long enough for the case, as `fits` ensures, and nothing else
        // uses them until the streams are synchronized.
        unsafe {
            member
                .executor
                .launch(&member.stream, &plans[rank], function, variant.shape, operation, &uses)?;
        }
        Ok(())
    }

    /// Runs a case `times` times in a row, with inputs from the seed, and verifies each result.
    pub fn check<T: Number>(
        &self,
        case: &Case,
        variant: Variant,
        op: Option<ReduceOp>,
        seed: u64,
        times: u64,
    ) -> Result<()> {
        let plans = self.plans(case, variant)?;
        let bytes = size_of::<T>();
        let places = self.places(case, variant.in_place, variant.skew, bytes);
        for round in 0..times {
            self.round::<T>(case, &places, op, seed + round, |function| {
                self.launch(&plans, case, variant, function)
            })?;
        }
        Ok(())
    }

    /// As [`check`](Self::check), with an operation that `launch` enqueues on memory at `places`.
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
            let inputs: Vec<T> = (0..case.input(rank)).map(|at| input_element(seed, rank, at)).collect();
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
            let wrong = case.count_wrong(op.unwrap_or(ReduceOp::Sum), rank, seed, &output);
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
        // SAFETY: elements are plain data, for which any bits are valid.
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

/// The maximum bytes of a rank's input or output in a case.
#[must_use]
pub fn fits(case: &Case, bytes: usize) -> usize {
    let most = (0..case.ranks)
        .map(|rank| case.input(Rank(rank)).max(case.output(Rank(rank))))
        .max()
        .unwrap_or(0);
    usize::try_from(most).unwrap_or(usize::MAX).saturating_mul(bytes)
}

/// Samples every n-th variant.
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

/// Verifies the sampled variants of a case; returns their number.
pub fn variants<T: Number>(
    rig: &Rig,
    case: &Case,
    ops: &[ReduceOp],
    launch_shapes: &[LaunchShape],
    sample: &mut Sample,
) -> Result<usize> {
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
        for &shape in launch_shapes {
            for in_place in [false, true] {
                for direct in [true, false] {
                    if direct && shape.ll {
                        continue;
                    }
                    for skew in [(0, 0), (3 * size_of::<T>(), size_of::<T>())] {
                        let variant = Variant {
                            algorithm,
                            direct,
                            in_place,
                            shape,
                            skew,
                        };
                        for &op in ops {
                            if !sample.takes() {
                                continue;
                            }
                            let found = rig.check::<T>(case, variant, op, seed, 2);
                            match found {
                                Ok(()) => done += 1,
                                Err(error) if is_refused(&error) => {}
                                Err(error) => {
                                    let op = op.map_or("", ReduceOp::name);
                                    return Err(error).with_context(|| {
                                        format!(
                                            "{} of {} {} {op} among {}, root {}: {variant}",
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

fn is_refused(error: &anyhow::Error) -> bool {
    error.is::<NotInPlace>()
        || matches!(error.downcast_ref(), Some(LowerError::Deadlock { .. }))
        || error.to_string().contains("are not supported by the LL protocol")
}

/// A variant that does not support in-place operation.
#[derive(Debug, thiserror::Error)]
#[error("{0} of {1} does not run in place")]
struct NotInPlace(Algorithm, Collective);

/// Verifies every variant with every element type, rotating operators; returns their number.
pub fn every_type(rig: &Rig, case: &Case, launch_shapes: &[LaunchShape], sample: &mut Sample) -> Result<usize> {
    use ReduceOp::{Avg, Max, Min, PreMulSum, Prod, Sum};
    if !case.collective.reduces() {
        return Ok(variants::<u8>(rig, case, &[], launch_shapes, sample)?
            + variants::<bf16>(rig, case, &[], launch_shapes, sample)?
            + variants::<f32>(rig, case, &[], launch_shapes, sample)?
            + variants::<u64>(rig, case, &[], launch_shapes, sample)?);
    }
    Ok(variants::<f32>(rig, case, &[Sum, PreMulSum], launch_shapes, sample)?
        + variants::<bf16>(rig, case, &[Sum, Avg], launch_shapes, sample)?
        + variants::<f16>(rig, case, &[Prod, PreMulSum], launch_shapes, sample)?
        + variants::<F8E4M3>(rig, case, &[Max], launch_shapes, sample)?
        + variants::<F8E5M2>(rig, case, &[Sum], launch_shapes, sample)?
        + variants::<f64>(rig, case, &[Avg], launch_shapes, sample)?
        + variants::<i8>(rig, case, &[Min, Avg], launch_shapes, sample)?
        + variants::<u8>(rig, case, &[Sum], launch_shapes, sample)?
        + variants::<i32>(rig, case, &[Avg], launch_shapes, sample)?
        + variants::<u32>(rig, case, &[Prod], launch_shapes, sample)?
        + variants::<i64>(rig, case, &[PreMulSum], launch_shapes, sample)?
        + variants::<u64>(rig, case, &[Max], launch_shapes, sample)?)
}

/// The cases for this many ranks.
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

/// Launch shapes of cases: Simple in one slice and in many, and LL.
#[must_use]
pub fn launch_shapes(quick: bool) -> Vec<LaunchShape> {
    let shape = |blocks, threads, slice, ll| LaunchShape {
        blocks,
        threads,
        slice,
        ll,
    };
    if quick {
        vec![shape(2, 64, 1024, false), shape(2, 64, 512, true)]
    } else {
        vec![
            shape(3, 512, 32 << 10, false),
            shape(16, 256, 2048, false),
            shape(4, 512, 4096, true),
        ]
    }
}
