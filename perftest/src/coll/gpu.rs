//! `doorbell coll --gpu`: the same test on GPU memory. Ranks take the host's GPUs one after
//! another, and share them where there are fewer. Times are between two events of a stream.

use doorbell_collectives::gpu::{GpuCall, GpuCommunicator, GpuError, GpuMessage, GpuOptions, as_bytes, as_bytes_mut};
use doorbell_collectives::moe::MoeError;
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::{Case, Number, input_element};
use doorbell_collectives::{CollectiveError, Communicator, Rank};
use doorbell_cuda::{Context, DeviceMemory, Driver, Event, Graph, HostMemory, Memory, Span, Stream};

use super::CollArgs;
use super::measure::{
    Point, TRIAL_OPERATIONS, TypedJob, all_values, dispatch, iterations, own_offsets, print, summary,
};
use super::moe::{self, MoeRow, Part};
use super::table::{Measurement, Report, Row};
use crate::failure::{Failure, one_line, refused};
use crate::interrupt::Interrupt;
use crate::report::LinkKind;

/// Operations in a graph.
const GRAPH_OPERATIONS: u32 = 20;
/// Bytes copied between the host and a GPU at a time.
pub(super) const CHUNK: usize = 16 << 20;

/// Why a size could not be measured.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Stop(String);

macro_rules! stops {
    ($($error:ty)*) => {
        $(impl From<$error> for Stop {
            fn from(error: $error) -> Self {
                Self(error.to_string())
            }
        })*
    };
}

stops! { GpuError CollectiveError MoeError doorbell_cuda::Error }

/// Refuses options that do not go with GPUs.
pub(super) fn check_options(args: &CollArgs) -> Result<(), Failure> {
    if args.graph && !args.gpu {
        return Err(Failure::usage("--graph is for GPUs: give --gpu too"));
    }
    if !args.gpu {
        return Ok(());
    }
    if args.group && !matches!(args.collective(), Collective::SendRecv | Collective::AllToAll) {
        return Err(Failure::usage("--group is for sendrecv and alltoall"));
    }
    let one = [
        (args.explain, "--explain"),
        (args.simulate, "--simulate"),
        (args.deterministic, "--deterministic"),
    ];
    match one.iter().find(|(is_given, _)| *is_given) {
        Some((_, what)) => Err(Failure::usage(format!(
            "{what} is for memory of the host: leave out --gpu"
        ))),
        None => Ok(()),
    }
}

/// # Errors
/// [`Failure::Usage`] where there is none.
pub(super) fn context(comm: &Communicator) -> Result<Context, Failure> {
    let driver = Driver::load().map_err(|e| Failure::usage(one_line(&e.to_string())))?;
    let me = comm.rank().index();
    let host = &comm.members()[me].host;
    let before = comm.members()[..me]
        .iter()
        .filter(|member| member.host == *host)
        .count();
    let device = driver.device(before % driver.device_count()).map_err(refused)?;
    device.context().map_err(refused)
}

struct Job<'a> {
    gpu: &'a GpuCommunicator,
    stream: &'a Stream,
    memories: &'a [DeviceMemory; 2],
    point: Point<'a>,
}

/// # Errors
/// [`Failure::Test`] when an operation fails or a result is wrong; [`Failure::Interrupted`] when a
/// rank was requested to stop.
pub(super) fn run(
    args: &CollArgs,
    comm: Communicator,
    interrupt: &Interrupt,
    mut report: Report,
) -> Result<(), Failure> {
    let gpu = join(comm, &mut report)?;
    measure(args, &gpu, interrupt, report)?;
    gpu.destroy().map_err(refused)
}

/// As [`run`], of dispatch or combine.
pub(super) fn run_moe(
    args: &CollArgs,
    part: Part,
    comm: Communicator,
    interrupt: &Interrupt,
    mut report: Report<MoeRow>,
) -> Result<(), Failure> {
    let gpu = join(comm, &mut report)?;
    moe::run(args, part, moe::Ranks::OnGpus(&gpu), interrupt, report)?;
    gpu.destroy().map_err(refused)
}

/// The communicator of the ranks' GPUs, which the report names.
fn join<R>(comm: Communicator, report: &mut Report<R>) -> Result<GpuCommunicator, Failure> {
    let context = context(&comm)?;
    let options = GpuOptions::from_env().map_err(|e| Failure::usage(one_line(&e.to_string())))?;
    let gpu = GpuCommunicator::new(comm, &context, options).map_err(refused)?;
    let name = context.device().name().map_err(refused)?;
    match gpu.staged_reason() {
        Some(reason) => {
            report.memory = "staged";
            if gpu.rank() == Rank(0) {
                eprintln!("doorbell: warning: operations go through memory of the host: {reason}");
            }
        }
        None => {
            report.memory = "peer";
            report.link = if std::env::var_os("DOORBELL_CUDA_LIBRARY").is_some() {
                LinkKind::SoftLocal
            } else {
                LinkKind::Hardware
            };
        }
    }
    if gpu.ranks_per_gpu() > 1 && gpu.rank() == Rank(0) {
        eprintln!("doorbell: warning: {}", sharing(&gpu));
    }
    report.device = name;
    Ok(gpu)
}

fn sharing(gpu: &GpuCommunicator) -> String {
    let ranks = gpu.ranks_per_gpu();
    let how = match gpu.is_time_sliced() {
        true => ", time-sliced: with doorbell run --nccl --ranks-per-gpu N they are not",
        false => "",
    };
    format!("{ranks} ranks share a GPU{how}")
}

fn measure(args: &CollArgs, gpu: &GpuCommunicator, interrupt: &Interrupt, report: Report) -> Result<(), Failure> {
    let most = usize::try_from(args.last_size()).unwrap_or(usize::MAX).max(8);
    // The parts of all-to-all-v have up to half more than their average.
    let most = match args.collective() {
        Collective::AllToAllV => most.saturating_add(most / 2).saturating_add(1 << 12),
        _ => most,
    };
    let memory = || DeviceMemory::alloc(gpu.context(), most);
    let memories = [memory().map_err(refused)?, memory().map_err(refused)?];
    for memory in &memories {
        gpu.register(memory).map_err(refused)?;
    }
    let stream = Stream::new(gpu.context()).map_err(refused)?;
    let row = |point, data| {
        let mut job = Job {
            gpu,
            stream: &stream,
            memories: &memories,
            point,
        };
        dispatch(data, &mut job).map_err(refused)
    };
    print(args, gpu.host(), interrupt, report, row)
}

impl TypedJob for Job<'_> {
    type Out = Result<Row, Stop>;

    fn with<T: Number>(&mut self) -> Self::Out {
        let measurement = self.measurement::<T>(false)?;
        let Point { args, case, .. } = self.point;
        let in_place = match case.collective.runs_in_place() {
            true => Some(self.measurement::<T>(true)?),
            false => None,
        };
        // A group has the executor of all-to-all-v.
        let collective = match args.group {
            true => Collective::AllToAllV,
            false => case.collective,
        };
        let (executor, algorithm) = self.gpu.selection(collective, T::TYPE, case.count as usize, true);
        Ok(Row {
            algorithm: algorithm.map_or("auto", |algorithm| algorithm.name()),
            protocol: executor.name(),
            channels: 1,
            ..self.point.row(T::TYPE, measurement, in_place)
        })
    }
}

/// Nothing is no operand.
fn span(memory: &DeviceMemory, start: usize, len: usize) -> Result<Option<Span<'_>>, doorbell_cuda::Error> {
    (len > 0).then(|| memory.span(start..start + len)).transpose()
}

struct Operands<'a> {
    input: Option<Span<'a>>,
    output: Option<Span<'a>>,
}

impl Job<'_> {
    fn operands<T: Number>(&self, in_place: bool) -> Result<Operands<'_>, Stop> {
        let (case, rank) = (&self.point.case, self.gpu.rank());
        let bytes = |elements: u64| elements as usize * size_of::<T>();
        let (gives, gets) = (bytes(case.input(rank)), bytes(case.output(rank)));
        let [first, second] = self.memories;
        let (target, [input, output]) = match in_place {
            true => (first, own_offsets(case, rank).map(|elements| elements * size_of::<T>())),
            false => (second, [0, 0]),
        };
        Ok(Operands {
            input: span(first, input, gives)?,
            output: span(target, output, gets)?,
        })
    }

    fn measurement<T: Number>(&mut self, in_place: bool) -> Result<Measurement, Stop> {
        let Point { args, case, op, .. } = self.point;
        let rank = self.gpu.rank();
        let mut wrong = 0;
        for check in 0..u64::from(args.check) {
            let seed = args.seed ^ check << 32;
            let operands = self.operands::<T>(in_place)?;
            self.fill::<T>(&operands, seed)?;
            self.enqueue::<T>(&operands)?;
            let output = self.read::<T>(&operands)?;
            wrong += case.count_wrong(op, rank, seed, &output);
        }
        let wrong = all_values(self.gpu.host(), wrong as f64)?.iter().sum::<f64>() as u64;
        // Repeated in-place reductions would overflow; zeros stay zeros.
        for memory in self.memories {
            self.stream.fill(memory.all(), 0)?;
        }
        if self.point.iterations == 0 {
            self.point.iterations = iterations::<Stop>(args, self.gpu.host(), || {
                let operands = self.operands::<T>(in_place)?;
                self.enqueue::<T>(&operands)?;
                let (began, ended) = (Event::timed(self.gpu.context())?, Event::timed(self.gpu.context())?);
                self.stream.record(&began)?;
                for _ in 0..TRIAL_OPERATIONS {
                    self.enqueue::<T>(&operands)?;
                }
                self.stream.record(&ended)?;
                self.stream.synchronize()?;
                Ok(ended.since(&began)?.as_secs_f64())
            })?;
        }
        let iterations = self.point.iterations;
        let graph = self.graph::<T>(in_place)?;
        let each = if graph.is_some() { GRAPH_OPERATIONS } else { 1 };
        let exec = graph.as_ref().map(Graph::instantiate).transpose()?;
        let go = |times: u32| -> Result<(), Stop> {
            let operands = self.operands::<T>(in_place)?;
            for _ in 0..times.div_ceil(each) {
                match &exec {
                    Some(exec) => exec.launch(self.stream)?,
                    None => self.enqueue::<T>(&operands)?,
                }
            }
            Ok(())
        };
        go(args.warmup.unwrap_or(iterations / 10 + 2))?;
        self.stream.synchronize()?;
        all_values(self.gpu.host(), 0.0)?;
        let (began, ended) = (Event::timed(self.gpu.context())?, Event::timed(self.gpu.context())?);
        self.stream.record(&began)?;
        go(iterations)?;
        self.stream.record(&ended)?;
        self.stream.synchronize()?;
        self.gpu.check()?;
        let mine = ended.since(&began)?.as_secs_f64() / f64::from(iterations.div_ceil(each) * each);
        Ok(summary(args, self.gpu.host(), &case, T::TYPE, mine, wrong)?)
    }

    fn graph<T: Number>(&self, in_place: bool) -> Result<Option<Graph>, Stop> {
        if !self.point.args.graph {
            return Ok(None);
        }
        let operands = self.operands::<T>(in_place)?;
        // Prepares everything and empties all ranks' streams before the capture.
        self.enqueue::<T>(&operands)?;
        self.stream.synchronize()?;
        let graph = self.gpu.capture(self.stream, || {
            (0..GRAPH_OPERATIONS).try_for_each(|_| self.operation::<T>(&operands))
        })?;
        Ok(Some(graph))
    }

    fn call<'p, T: Number>(&self, operands: &Operands<'p>) -> GpuCall<'p> {
        GpuCall {
            collective: self.point.case.collective,
            root: self.point.case.root,
            data: T::TYPE,
            count: self.point.case.count as usize,
            reduction: self.point.reduction::<T>(self.gpu.rank()),
            input: operands.input,
            output: operands.output,
        }
    }

    fn enqueue<T: Number>(&self, operands: &Operands<'_>) -> Result<(), Stop> {
        Ok(self.operation::<T>(operands)?)
    }

    fn operation<T: Number>(&self, operands: &Operands<'_>) -> Result<(), GpuError> {
        let (case, rank) = (&self.point.case, self.gpu.rank());
        match (case.collective, operands.input, operands.output) {
            (Collective::AllToAllV, Some(input), Some(output)) => {
                let all = || (0..case.ranks).map(Rank);
                let send: Vec<_> = all().map(|to| case.part(rank, to) as usize).collect();
                let receive: Vec<_> = all().map(|from| case.part(from, rank) as usize).collect();
                self.gpu
                    .all_to_all_v((input, &send), (output, &receive), T::TYPE, self.stream)
            }
            (Collective::AllToAllV, ..) => Ok(()),
            (_, Some(input), Some(output)) if self.point.args.group => self.group(input, output),
            _ => self.gpu.enqueue(&self.call::<T>(operands), self.stream),
        }
    }

    /// The operation as sends and receives.
    fn group(&self, input: Span<'_>, output: Span<'_>) -> Result<(), GpuError> {
        let Case { ranks, collective, .. } = self.point.case;
        let rank = self.gpu.rank().0;
        if collective == Collective::SendRecv {
            let (next, before) = (Rank((rank + 1) % ranks), Rank((rank + ranks - 1) % ranks));
            let messages = [GpuMessage::send(input, next), GpuMessage::receive(output, before)];
            return self.gpu.group(&messages, self.stream);
        }
        let part = input.len() / ranks as usize;
        let mut messages = Vec::with_capacity(2 * ranks as usize);
        for peer in 0..ranks {
            let start = peer as usize * part;
            messages.push(GpuMessage::send(input.span(start..start + part)?, Rank(peer)));
            messages.push(GpuMessage::receive(output.span(start..start + part)?, Rank(peer)));
        }
        self.gpu.group(&messages, self.stream)
    }

    /// Fills the input with its pattern, and the rest with wrong values.
    fn fill<T: Number>(&self, operands: &Operands<'_>, seed: u64) -> Result<(), Stop> {
        for memory in self.memories {
            self.stream.fill(memory.all(), 0x5a)?;
        }
        let Some(input) = operands.input else { return Ok(()) };
        let host = HostMemory::alloc(self.gpu.context(), CHUNK.min(input.len()))?;
        for start in (0..input.len()).step_by(CHUNK) {
            let len = CHUNK.min(input.len() - start);
            let first = (start / size_of::<T>()) as u64;
            let drawn =
                (first..first + (len / size_of::<T>()) as u64).map(|index| input_element(seed, self.gpu.rank(), index));
            let drawn: Vec<T> = drawn.collect();
            host.copy_in(0, as_bytes(&drawn))?;
            self.stream.copy(input.span(start..start + len)?, host.span(..len)?)?;
            self.stream.synchronize()?;
        }
        Ok(())
    }

    /// Reads the output, after the stream has completed.
    fn read<T: Number>(&self, operands: &Operands<'_>) -> Result<Vec<T>, Stop> {
        let Some(output) = operands.output else {
            self.stream.synchronize()?;
            return Ok(Vec::new());
        };
        let host = HostMemory::alloc(self.gpu.context(), CHUNK.min(output.len()))?;
        let mut all = vec![T::ZERO; output.len() / size_of::<T>()];
        copy_out(self.stream, &host, output, as_bytes_mut(&mut all))?;
        Ok(all)
    }
}

/// Copies to memory of a GPU through `host`, behind what the stream does, and waits.
pub(super) fn copy_in(stream: &Stream, host: &HostMemory, into: Span<'_>, bytes: &[u8]) -> Result<(), Stop> {
    let chunk = CHUNK.min(host.len());
    for (at, part) in bytes.chunks(chunk).enumerate() {
        host.copy_in(0, part)?;
        let into = into.span(at * chunk..at * chunk + part.len())?;
        stream.copy(into, host.span(..part.len())?)?;
        stream.synchronize()?;
    }
    Ok(())
}

/// Copies from memory of a GPU through `host`, behind what the stream does, and waits.
pub(super) fn copy_out(stream: &Stream, host: &HostMemory, from: Span<'_>, bytes: &mut [u8]) -> Result<(), Stop> {
    let chunk = CHUNK.min(host.len());
    for (at, part) in bytes.chunks_mut(chunk).enumerate() {
        let from = from.span(at * chunk..at * chunk + part.len())?;
        stream.copy(host.span(..part.len())?, from)?;
        stream.synchronize()?;
        host.copy_out(0, part)?;
    }
    Ok(())
}
