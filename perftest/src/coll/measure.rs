//! The measurement, on all ranks together: for each size checks, warms up and measures, out of
//! place and in place.

use std::time::Instant;

use doorbell_collectives::communicator::{Call, Reduction};
use doorbell_collectives::kernel::{F8E4M3, F8E5M2, bf16, f16};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::{Case, Number, input_element};
use doorbell_collectives::tune::Choice;
use doorbell_collectives::{CollectiveError, CommBuffer, Communicator, DataType, PreMulSum, Rank, ReduceOp};

use super::CollArgs;
use super::table::{Measurement, Report, Row};
use super::traffic;
use crate::failure::{Failure, refused};
use crate::interrupt::Interrupt;
use crate::report::print_line;

/// Default duration of a size, seconds.
const SECONDS: f64 = 0.2;
/// Operations that are timed to choose the iterations.
pub(super) const TRIAL_OPERATIONS: u32 = 3;

/// One size, of one operator.
pub(super) struct Point<'a> {
    pub(super) args: &'a CollArgs,
    pub(super) case: Case,
    bytes: u64,
    pub(super) op: ReduceOp,
    /// The same out of place and in place; 0 until chosen.
    pub(super) iterations: u32,
}

struct Job<'a> {
    comm: &'a Communicator,
    point: Point<'a>,
}

/// # Errors
/// [`Failure::Test`] when an operation fails or a result is wrong; [`Failure::Interrupted`] when a
/// rank was requested to stop, after printing what was measured until then.
pub(super) fn run(args: &CollArgs, comm: &Communicator, interrupt: &Interrupt, report: Report) -> Result<(), Failure> {
    let row = |point, data| dispatch(data, &mut Job { comm, point }).map_err(refused);
    print(args, comm, interrupt, report, row)
}

/// As [`run`], with the function that measures one size.
pub(super) fn print<'a>(
    args: &'a CollArgs,
    comm: &Communicator,
    interrupt: &Interrupt,
    mut report: Report,
    row: impl FnMut(Point<'a>, DataType) -> Result<Row, Failure>,
) -> Result<(), Failure> {
    let first = comm.rank() == Rank(0);
    let table = first && !args.json;
    if table {
        report.print_head(comm.size())?;
    }
    let outcome = rows(args, comm, interrupt, row, |row| {
        let printed = if table { print_line(&row.line()) } else { Ok(()) };
        report.results.push(row);
        printed
    });
    if first && args.json {
        report.print()?;
    } else if table && matches!(outcome, Ok(()) | Err(Failure::Interrupted)) {
        report.print_foot()?;
    }
    outcome?;
    let wrong: u64 = report.results.iter().map(Row::wrong).sum();
    if wrong > 0 {
        return Err(Failure::test(format!("{wrong} elements are wrong")));
    }
    Ok(())
}

fn rows<'a>(
    args: &'a CollArgs,
    comm: &Communicator,
    interrupt: &Interrupt,
    mut row: impl FnMut(Point<'a>, DataType) -> Result<Row, Failure>,
    mut done: impl FnMut(Row) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let ops: &[ReduceOp] = if args.collective().reduces() {
        &args.op.0
    } else {
        &[ReduceOp::Sum]
    };
    for &data in args.dtypes() {
        for &op in ops {
            for bytes in args.sizes() {
                let point = Point {
                    args,
                    case: traffic::case(args.collective(), comm.size(), Rank(args.root), bytes, data),
                    bytes,
                    op,
                    iterations: 0,
                };
                // All ranks stop at the same size.
                let requested = f64::from(u8::from(interrupt.requested()));
                if all_values(comm, requested)
                    .map_err(refused)?
                    .iter()
                    .any(|&requested| requested > 0.0)
                {
                    return Err(Failure::Interrupted);
                }
                done(row(point, data)?)?;
            }
        }
    }
    Ok(())
}

/// A generic operation on elements of a type.
pub(super) trait TypedJob {
    type Out;

    fn with<T: Number>(&mut self) -> Self::Out;
}

pub(super) fn dispatch<J: TypedJob>(data: DataType, job: &mut J) -> J::Out {
    match data {
        DataType::I8 => job.with::<i8>(),
        DataType::U8 => job.with::<u8>(),
        DataType::I32 => job.with::<i32>(),
        DataType::U32 => job.with::<u32>(),
        DataType::I64 => job.with::<i64>(),
        DataType::U64 => job.with::<u64>(),
        DataType::F16 => job.with::<f16>(),
        DataType::Bf16 => job.with::<bf16>(),
        DataType::F32 => job.with::<f32>(),
        DataType::F64 => job.with::<f64>(),
        DataType::F8E4M3 => job.with::<F8E4M3>(),
        DataType::F8E5M2 => job.with::<F8E5M2>(),
    }
}

impl TypedJob for Job<'_> {
    type Out = Result<Row, CollectiveError>;

    fn with<T: Number>(&mut self) -> Self::Out {
        let (comm, case) = (self.comm, self.point.case);
        let measurement = self.measurement(Buffers::<T>::apart(comm, &case)?)?;
        let in_place = if case.collective.runs_in_place() {
            Some(self.measurement(Buffers::<T>::in_place(comm, &case)?)?)
        } else {
            None
        };
        let element = T::TYPE.bytes() as u64;
        let moved = case.count * element * traffic::parts(case.collective, case.ranks);
        let choice = comm.explain(case.collective, case.root, T::TYPE, moved)?.choice;
        Ok(self.point.row(T::TYPE, measurement, in_place).chosen_by(&choice))
    }
}

impl Job<'_> {
    fn measurement<T: Number>(&mut self, mut buffers: Buffers<T>) -> Result<Measurement, CollectiveError> {
        let comm = self.comm;
        let Point { args, case, op, .. } = self.point;
        let rank = comm.rank();
        let reduction = self.point.reduction::<T>(rank);
        let mut wrong = 0;
        for check in 0..u64::from(args.check) {
            let seed = args.seed ^ check << 32;
            buffers.fill(&case, rank, seed);
            buffers.run(comm, &case, &reduction, None)?;
            wrong += case.count_wrong(op, rank, seed, buffers.output(&case, rank));
        }
        let wrong = all_values(comm, wrong as f64)?.iter().sum::<f64>() as u64;
        // Repeated in-place reductions would overflow; zeros stay zeros.
        buffers.clear();
        let mut run = || buffers.run(comm, &case, &reduction, None);
        if self.point.iterations == 0 {
            self.point.iterations = iterations::<CollectiveError>(args, comm, || {
                run()?;
                let began = Instant::now();
                for _ in 0..TRIAL_OPERATIONS {
                    run()?;
                }
                Ok(began.elapsed().as_secs_f64())
            })?;
        }
        let iterations = self.point.iterations;
        for _ in 0..args.warmup.unwrap_or(iterations / 10 + 2) {
            run()?;
        }
        comm.barrier().wait()?;
        let began = Instant::now();
        for _ in 0..iterations {
            run()?;
        }
        let mine = began.elapsed().as_secs_f64() / f64::from(iterations);
        summary(args, comm, &case, T::TYPE, mine, wrong)
    }
}

impl Point<'_> {
    pub(super) fn reduction<T: Number>(&self, rank: Rank) -> Reduction {
        match self.op {
            ReduceOp::PreMulSum => PreMulSum(T::scalar(rank)).into(),
            op => Reduction::from(op),
        }
    }

    /// The row, but for how the operation was done.
    pub(super) fn row(&self, data: DataType, measurement: Measurement, in_place: Option<Measurement>) -> Row {
        let case = &self.case;
        Row {
            bytes: self.bytes,
            count: case.count,
            dtype: data.name(),
            op: if case.collective.reduces() {
                self.op.name()
            } else {
                "none"
            },
            root: self.args.root().map_or(-1, i64::from),
            algorithm: "",
            protocol: "",
            channels: 0,
            ranks: case.ranks,
            iterations: self.iterations,
            measurement,
            in_place,
        }
    }
}

/// The number of iterations: the one given, or the same on all ranks by the slowest, from the
/// seconds of [`TRIAL_OPERATIONS`].
pub(super) fn iterations<E: From<CollectiveError>>(
    args: &CollArgs,
    comm: &Communicator,
    trial: impl FnOnce() -> Result<f64, E>,
) -> Result<u32, E> {
    if let Some(iterations) = args.iterations {
        return Ok(iterations);
    }
    let mine = trial()? / f64::from(TRIAL_OPERATIONS);
    let slowest = all_values(comm, mine)?.into_iter().fold(1e-9, f64::max);
    Ok(((SECONDS / slowest) as u32).clamp(10, 5000))
}

/// The result of all ranks, of which this one took `mine` seconds for an operation.
pub(super) fn summary(
    args: &CollArgs,
    comm: &Communicator,
    case: &Case,
    data: DataType,
    mine: f64,
    wrong: u64,
) -> Result<Measurement, CollectiveError> {
    let all = all_values(comm, mine)?;
    let mean = all.iter().sum::<f64>() / all.len() as f64;
    let (algorithm, bus) = traffic::bandwidths(case, data, mean);
    Ok(Measurement {
        time_us: mean * 1e6,
        algbw_bytes_per_s: algorithm,
        busbw_bytes_per_s: bus,
        wrong: (args.check > 0).then_some(wrong),
    })
}

pub(super) fn all_values(comm: &Communicator, mine: f64) -> Result<Vec<f64>, CollectiveError> {
    let mut all = vec![0.0; comm.size() as usize];
    comm.all_gather_into(&[mine], &mut all).wait()?;
    Ok(all)
}

fn with_choice<'c, B>(call: Call<'c, B>, choice: Option<&Choice>) -> Call<'c, B> {
    match choice {
        None => call,
        Some(choice) => call
            .algorithm(choice.algorithm)
            .protocol(choice.protocol)
            .channels(choice.channels)
            .slice(choice.slice_bytes),
    }
}

/// Offsets in elements of input and output in one buffer, in place.
pub(super) fn own_offsets(case: &Case, rank: Rank) -> [usize; 2] {
    let part = rank.index() * case.count as usize;
    match case.collective {
        Collective::AllGather => [part, 0],
        Collective::Gather if rank == case.root => [part, 0],
        Collective::ReduceScatter => [0, part],
        Collective::Scatter if rank == case.root => [0, part],
        _ => [0, 0],
    }
}

pub(super) enum Buffers<T: Number> {
    OutOfPlace {
        input: CommBuffer<T>,
        output: CommBuffer<T>,
        /// Elements to and from each rank, of all-to-all-v.
        parts: [Vec<usize>; 2],
    },
    InPlace(CommBuffer<T>),
}

impl<T: Number> Buffers<T> {
    pub(super) fn apart(comm: &Communicator, case: &Case) -> Result<Self, CollectiveError> {
        let rank = comm.rank();
        let all = || (0..case.ranks).map(Rank);
        Ok(Self::OutOfPlace {
            input: comm.alloc(case.input(rank) as usize)?,
            output: comm.alloc(case.output(rank) as usize)?,
            parts: [
                all().map(|to| case.part(rank, to) as usize).collect(),
                all().map(|from| case.part(from, rank) as usize).collect(),
            ],
        })
    }

    fn in_place(comm: &Communicator, case: &Case) -> Result<Self, CollectiveError> {
        let rank = comm.rank();
        Ok(Self::InPlace(
            comm.alloc(case.input(rank).max(case.output(rank)) as usize)?,
        ))
    }

    /// Fills the input with its pattern, and the output with wrong values.
    fn fill(&mut self, case: &Case, rank: Rank, seed: u64) {
        let wrong_value: T = input_element(!seed, rank, u64::MAX);
        let input = match self {
            Self::OutOfPlace { input, output, .. } => {
                output.fill(wrong_value);
                &mut input[..]
            }
            Self::InPlace(memory) => {
                memory.fill(wrong_value);
                let first = own_offsets(case, rank)[0];
                &mut memory[first..first + case.input(rank) as usize]
            }
        };
        for (index, element) in (0..).zip(input) {
            *element = input_element(seed, rank, index);
        }
    }

    fn output(&self, case: &Case, rank: Rank) -> &[T] {
        match self {
            Self::OutOfPlace { output, .. } => output,
            Self::InPlace(memory) => {
                let first = own_offsets(case, rank)[1];
                &memory[first..first + case.output(rank) as usize]
            }
        }
    }

    fn clear(&mut self) {
        if let Self::InPlace(memory) = self {
            memory.fill(T::ZERO);
        }
    }

    pub(super) fn run(
        &mut self,
        comm: &Communicator,
        case: &Case,
        op: &Reduction,
        choice: Option<&Choice>,
    ) -> Result<(), CollectiveError> {
        let root = case.root;
        match self {
            Self::OutOfPlace { input, output, parts } => {
                let call: Call<'_, (&CommBuffer<T>, &mut CommBuffer<T>)> = match case.collective {
                    Collective::AllReduce => comm.all_reduce_into(&*input, output, op.clone()),
                    Collective::AllGather => comm.all_gather_into(&*input, output),
                    Collective::ReduceScatter => comm.reduce_scatter_into(&*input, output, op.clone()),
                    Collective::Broadcast => comm.broadcast_into(&*input, output, root),
                    Collective::Reduce => comm.reduce_into(&*input, output, op.clone(), root),
                    Collective::Gather => comm.gather_into(&*input, output, root),
                    Collective::Scatter => comm.scatter_into(&*input, output, root),
                    Collective::AllToAll => comm.all_to_all(&*input, output),
                    Collective::AllToAllV => comm.all_to_all_v(&*input, &parts[0], output, &parts[1]),
                    Collective::SendRecv => comm.send_receive(&*input, output),
                    Collective::Barrier => return comm.barrier().wait(),
                };
                with_choice(call, choice).wait()
            }
            Self::InPlace(memory) => with_choice(
                match case.collective {
                    Collective::AllReduce => comm.all_reduce(memory, op.clone()),
                    Collective::AllGather => comm.all_gather(memory),
                    Collective::ReduceScatter => comm.reduce_scatter(memory, op.clone()),
                    Collective::Reduce => comm.reduce(memory, op.clone(), root),
                    Collective::Gather => comm.gather(memory, root),
                    Collective::Scatter => comm.scatter(memory, root),
                    // The others do not run in place, and have no such buffers.
                    _ => comm.broadcast(memory, root),
                },
                choice,
            )
            .wait(),
        }
    }
}
