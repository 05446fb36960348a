//! `doorbell coll moe-dispatch` and `moe-combine`: expert parallelism, measured beside an
//! all-to-all-v and a put of the same bytes.
//!
//! `routing` draws the experts, and `job` what each rank sends and has to receive; `host` and `gpu`
//! are the operations on either memory, which `measure` times and checks; `table` has the results.

mod gpu;
mod host;
mod job;
mod measure;
mod routing;
mod table;

use doorbell_collectives::gpu::GpuCommunicator;
use doorbell_collectives::moe::{Mode, MoeOptions, Payload, Shape};
use doorbell_collectives::{Communicator, DataType, Rank};

use self::gpu::OnGpu;
use self::host::OnHost;
use self::job::Job;
use self::routing::Routings;
pub(super) use self::table::MoeRow;
use self::table::head;
use super::CollArgs;
use super::args::{Choices, Operation};
use super::measure::all_values;
use super::table::Report;
use crate::classic::test_end::available_memory;
use crate::failure::{Failure, refused};
use crate::interrupt::Interrupt;
use crate::report::print_line;

/// Which of the two operations is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    Dispatch,
    Combine,
}

impl Part {
    pub(crate) const ALL: [Self; 2] = [Self::Dispatch, Self::Combine];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "moe-dispatch",
            Self::Combine => "moe-combine",
        }
    }
}

/// How tokens choose their experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Skew {
    Uniform,
    Zipf,
    OneExpert,
}

impl Skew {
    fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
            Self::OneExpert => "one-expert",
        }
    }
}

/// What one row is of.
#[derive(Clone, Copy, Debug)]
struct Layer {
    shape: Shape,
    payload: Payload,
    mode: Mode,
    skew: Skew,
    seed: u64,
}

impl Layer {
    fn options(&self, routings: &Routings) -> MoeOptions {
        MoeOptions {
            shape: self.shape,
            payload: self.payload,
            mode: self.mode,
            // What is known not to be received needs no memory.
            capacity: Some(routings.most_received().max(1)),
        }
    }
}

/// # Errors
/// [`Failure::Usage`] for options that do not apply, impossible dimensions, and what does not fit
/// in memory.
pub(super) fn check_options(args: &CollArgs) -> Result<(), Failure> {
    let Operation::Moe(part) = args.operation else {
        return only_moe(args);
    };
    let name = part.name();
    let given = [
        ("--explain", args.explain),
        ("--simulate", args.simulate),
        ("--algorithm", args.algorithm.0.is_some()),
        ("--protocol", args.protocol.0.is_some()),
        ("-e", args.max_bytes.is_some()),
        ("-f", args.step_factor.is_some()),
        ("--graph", args.graph),
        ("--group", args.group),
    ];
    if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
        return Err(Failure::usage(format!(
            "{option} is not of {name}: it has one way, and its sizes are --tokens, --hidden, --top-k and --experts"
        )));
    }
    let Some(ranks) = args.ranks else { return Ok(()) };
    layers(args, ranks)?
        .iter()
        .try_for_each(|layer| if args.gpu { Ok(()) } else { check_memory(layer, ranks) })
}

/// Refuses the options of dispatch and combine for other operations.
fn only_moe(args: &CollArgs) -> Result<(), Failure> {
    let given = [
        ("--tokens", !args.tokens.is_empty()),
        ("--hidden", args.hidden.is_some()),
        ("--top-k", args.top_k.is_some()),
        ("--experts", args.experts.is_some()),
        ("--mode", args.mode.is_some()),
        ("--skew", args.skew.is_some()),
    ];
    match given.iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((option, _)) => Err(Failure::usage(format!(
            "{option} is of moe-dispatch and moe-combine alone"
        ))),
    }
}

fn layers(args: &CollArgs, ranks: u32) -> Result<Vec<Layer>, Failure> {
    let mode = args.mode.unwrap_or(Mode::HighThroughput);
    let payload = match args.dtype.as_ref().map(|Choices(all)| &all[..]) {
        None | Some([DataType::Bf16]) => Payload::Bf16,
        Some([DataType::F8E4M3]) => Payload::Fp8,
        Some(_) => return Err(Failure::usage("-d: tokens are sent as bf16 or fp8")),
    };
    let default = match mode {
        Mode::LowLatency => 128,
        Mode::HighThroughput => 4096,
    };
    let tokens = if args.tokens.is_empty() {
        &[default][..]
    } else {
        &args.tokens
    };
    let layer = |&tokens: &u32| {
        let (experts, top_k) = (args.experts.unwrap_or(256), args.top_k.unwrap_or(8));
        let shape = Shape::new(ranks, experts, top_k, args.hidden.unwrap_or(7168), tokens)?;
        shape.supports(payload)?;
        Ok(Layer {
            shape,
            payload,
            mode,
            skew: args.skew.unwrap_or(Skew::Uniform),
            seed: args.seed,
        })
    };
    let all: Result<_, doorbell_collectives::moe::ShapeError> = tokens.iter().map(layer).collect();
    all.map_err(|e| Failure::usage(e.to_string()))
}

/// Refuses what the memory of this host has no room for, with so many of the ranks here.
fn check_memory(layer: &Layer, here: u32) -> Result<(), Failure> {
    let routings = Routings::draw(layer);
    let elements = u64::from(layer.shape.max_tokens()) * u64::from(layer.shape.hidden());
    // Sent and received by all-to-all-v and by puts, which is as much as combine's bf16; tokens,
    // given and combined.
    let row = Payload::Bf16.row_bytes(layer.shape.hidden()) as u64;
    let beside = 2 * (routings.most_received() + layer.shape.max_pairs()) as u64 * row + 2 * elements * 2;
    let each = layer.options(&routings).memory_bytes() + beside;
    let needed = each.saturating_mul(u64::from(here));
    match available_memory() {
        Some(available) if needed > available => Err(Failure::usage(format!(
            "{here} ranks with {} tokens each need {} MiB of memory, and this host has {} MiB left: fewer --tokens, --hidden or ranks",
            layer.shape.max_tokens(),
            needed >> 20,
            available >> 20
        ))),
        _ => Ok(()),
    }
}

/// The ranks, by the memory that tokens are in.
#[derive(Clone, Copy)]
pub(super) enum Ranks<'a> {
    OnHosts(&'a Communicator),
    OnGpus(&'a GpuCommunicator),
}

impl<'a> Ranks<'a> {
    fn comm(self) -> &'a Communicator {
        match self {
            Self::OnHosts(comm) => comm,
            Self::OnGpus(gpu) => gpu.host(),
        }
    }
}

/// # Errors
/// [`Failure::Test`] when an operation fails or a result is wrong; [`Failure::Interrupted`].
pub(super) fn run(
    args: &CollArgs,
    part: Part,
    ranks: Ranks<'_>,
    interrupt: &Interrupt,
    mut report: Report<MoeRow>,
) -> Result<(), Failure> {
    let comm = ranks.comm();
    let first = comm.rank() == Rank(0);
    let table = first && !args.json;
    if table {
        report.print_title(comm.size(), &head())?;
    }
    let outcome = rows(args, part, ranks, interrupt, |row| {
        let printed = if table { print_line(&row.line()) } else { Ok(()) };
        report.results.push(row);
        printed
    });
    if first && args.json {
        report.print()?;
    }
    outcome?;
    match report.results.iter().filter_map(|row| row.wrong).sum() {
        0 => Ok(()),
        wrong => Err(Failure::test(format!("{wrong} results of {} are wrong", part.name()))),
    }
}

fn rows(
    args: &CollArgs,
    part: Part,
    ranks: Ranks<'_>,
    interrupt: &Interrupt,
    mut done: impl FnMut(MoeRow) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let comm = ranks.comm();
    let hosts = comm.hosts();
    let own = hosts[comm.rank().index()];
    let here = hosts.iter().filter(|host| **host == own).count() as u32;
    for layer in layers(args, comm.size())? {
        // All ranks stop at the same row.
        let requested = f64::from(u8::from(interrupt.requested()));
        let requested = all_values(comm, requested).map_err(refused)?;
        if requested.iter().any(|&requested| requested > 0.0) {
            return Err(Failure::Interrupted);
        }
        let routings = Routings::draw(&layer);
        let job = Job {
            part,
            layer: &layer,
            routings: &routings,
            rank: comm.rank(),
        };
        let row = match ranks {
            Ranks::OnHosts(comm) => {
                check_memory(&layer, here)?;
                OnHost::new(job, comm).and_then(|mut bench| measure::row(args, job, comm, &mut bench))
            }
            Ranks::OnGpus(gpu) => OnGpu::new(job, gpu).and_then(|mut bench| measure::row(args, job, comm, &mut bench)),
        };
        done(row.map_err(refused)?)?;
    }
    Ok(())
}
