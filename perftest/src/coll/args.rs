//! The arguments of `doorbell coll`: nccl-tests' options by their letters, and Doorbell's own.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use doorbell_collectives::moe::Mode;
use doorbell_collectives::plan::Collective;
use doorbell_collectives::{Algorithm, DataType, Protocol, ReduceOp};

use super::bind::Bind;
use super::moe::{Part, Skew};
use crate::cli::SoftArgs;
use crate::units::{parse_bytes, parse_duration};

pub(crate) const NOTES: &str = "\
Examples:
  doorbell coll allreduce --ranks 4                    four processes here, on the userspace device
  doorbell coll allreduce --ranks 2 -b 8 -e 64M -f 2   a table over sizes
  mpirun -n 8 doorbell coll alltoall --device mlx5_0   ranks of a launcher: mpirun, srun, torchrun
  doorbell coll allreduce --ranks 4 --gpu -b 8 -e 1G -f 8   on GPUs, a process each
  doorbell coll moe-dispatch --ranks 4 --mode low-latency   tokens to experts, at the shapes of DeepSeek-V3
  doorbell coll allreduce --ranks 8 -b 1M --explain    the choice of the algorithm, and the plan
  doorbell coll allreduce --ranks 4096 --simulate      time by algorithm on a modeled fabric
  doorbell coll allreduce --ranks 2 -b 8 -e 64M -f 8 --simulate --measure   predictions beside measurements

Columns and formulas are nccl-tests': size is the requested one, rounded down to a multiple of the ranks; count the elements of the whole of \
allreduce, broadcast, reduce and sendrecv, else of one rank's part; algbw is size / time; busbw is algbw times the share that a link carries: 2(p-1)/p for \
allreduce, 1 for broadcast, reduce and sendrecv, (p-1)/p for the others. Of nccl-tests' options there are -b -e -i -f -o -d -r -n -w and -c; the time is the \
mean over the ranks, as with its -a 1.

Environment: DOORBELL_ALGORITHM, DOORBELL_PROTOCOL, DOORBELL_CHANNELS, DOORBELL_SLICE and DOORBELL_TUNING (a file) choose where options do not; \
DOORBELL_LINK=udp|local is for the userspace device. Of --gpu: DOORBELL_GPU has settings, as executor=copies,slice=1048576: executor (kernel, small, copies, \
split or staged), slice, cut, staging and fifos (bytes), copiers (1 to 4), blocks (1 to 256), share (percent of the elements by copies).

Exit status: 0 done, 1 the test failed (wrong data, rank lost), 2 bad usage.";

/// The arguments of `doorbell coll`.
#[derive(Args, Debug, Clone)]
// fields: one per command line option
pub(crate) struct CollArgs {
    /// The operation to measure
    #[arg(value_parser = operations())]
    pub(crate) operation: Operation,
    /// Start this many ranks here, a process each; without it this process is a rank of a launcher
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) ranks: Option<u32>,
    /// Be this rank, started by the process at the other end of stdin
    #[arg(long, hide = true, requires = "ranks")]
    pub(crate) rank: Option<u32>,

    /// Smallest size in bytes, as 8, 4K or 1M
    #[arg(short = 'b', long, value_name = "BYTES", value_parser = parse_bytes, default_value = "32M", help_heading = "Sizes", visible_alias = "minbytes")]
    pub(crate) min_bytes: u64,
    /// Largest size [default: the smallest, or 32M]
    #[arg(short = 'e', long, value_name = "BYTES", value_parser = parse_bytes, help_heading = "Sizes", visible_alias = "maxbytes")]
    pub(crate) max_bytes: Option<u64>,
    /// Step between sizes, added
    #[arg(short = 'i', long, value_name = "BYTES", value_parser = parse_bytes, default_value = "1M", conflicts_with = "step_factor", help_heading = "Sizes", visible_alias = "stepbytes")]
    pub(crate) step_bytes: u64,
    /// Step between sizes, as a factor
    #[arg(short = 'f', long, value_name = "FACTOR", value_parser = clap::value_parser!(u64).range(2..), help_heading = "Sizes", visible_alias = "stepfactor")]
    pub(crate) step_factor: Option<u64>,

    /// Operator: sum, prod, min, max, avg, premulsum, or all of them
    #[arg(short = 'o', long, value_name = "OP", value_parser = parse_ops, default_value = "sum", help_heading = "Operation")]
    pub(crate) op: Choices<ReduceOp>,
    /// Type of the elements: i8 u8 i32 u32 i64 u64 f16 bf16 f32 f64 f8e4m3 f8e5m2 (or nccl-tests'
    /// names of them), or all of them [default: f32]; of moe-dispatch and moe-combine bf16 or fp8
    /// [default: bf16]
    #[arg(short = 'd', long, value_name = "TYPE", value_parser = parse_types, help_heading = "Operation", visible_alias = "datatype")]
    pub(crate) dtype: Option<Choices<DataType>>,
    /// The root of broadcast, reduce, gather and scatter
    #[arg(
        short = 'r',
        long,
        value_name = "RANK",
        default_value_t = 0,
        help_heading = "Operation"
    )]
    pub(crate) root: u32,

    /// Tokens of each rank, one row for each number [default: 4096; of low-latency 128]
    #[arg(long, value_name = "N[,N]", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..), help_heading = "moe-dispatch, moe-combine")]
    pub(crate) tokens: Vec<u32>,
    /// Elements of a token [default: 7168]
    #[arg(long, value_name = "N", help_heading = "moe-dispatch, moe-combine")]
    pub(crate) hidden: Option<u32>,
    /// Experts that each token chooses [default: 8]
    #[arg(long, value_name = "K", help_heading = "moe-dispatch, moe-combine")]
    pub(crate) top_k: Option<u32>,
    /// Experts of all ranks [default: 256]
    #[arg(long, value_name = "N", help_heading = "moe-dispatch, moe-combine")]
    pub(crate) experts: Option<u32>,
    /// low-latency or high-throughput [default: high-throughput]
    #[arg(long, value_name = "MODE", help_heading = "moe-dispatch, moe-combine")]
    pub(crate) mode: Option<Mode>,
    /// How tokens choose: uniform, zipf (expert e in proportion to 1/(e+1)) or one-expert (the
    /// first choice of all is one expert) [default: uniform]
    #[arg(long, value_name = "NAME", value_enum, help_heading = "moe-dispatch, moe-combine")]
    pub(crate) skew: Option<Skew>,

    /// Iterations: operations measured per size [default: for about a tenth of a second, from 10 to
    /// 5000]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Test", visible_alias = "iters")]
    pub(crate) iterations: Option<u32>,
    /// Warm-up operations before that [default: a tenth of as many, and two]
    #[arg(
        short = 'w',
        long,
        value_name = "N",
        help_heading = "Test",
        alias = "warmup_iters",
        visible_alias = "warmup-iters"
    )]
    pub(crate) warmup: Option<u32>,
    /// Operations whose results are checked on every rank; 0 for none
    #[arg(short = 'c', long, value_name = "N", default_value_t = 1, help_heading = "Test")]
    pub(crate) check: u32,
    /// Deadline of an operation, after which it fails on all ranks
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "30s", help_heading = "Test")]
    pub(crate) deadline: Duration,
    /// Seed of the data, and of the faults
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Test")]
    pub(crate) seed: u64,

    /// ring, tree, double-binary-tree, recursive-doubling, halving-doubling, bruck, full-mesh,
    /// one-shot or auto
    #[arg(long, value_name = "NAME", value_parser = parse_choice::<Algorithm>, default_value = "auto", help_heading = "How it is done")]
    pub(crate) algorithm: Choice<Algorithm>,
    /// simple, ll, ll128 or auto
    #[arg(long, value_name = "NAME", value_parser = parse_choice::<Protocol>, default_value = "auto", help_heading = "How it is done")]
    pub(crate) protocol: Choice<Protocol>,
    /// Channels: copies of the plan that run in parallel, on queue pairs of their own
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), help_heading = "How it is done")]
    pub(crate) channels: Option<u32>,
    /// Only algorithms whose results have the same bits however the data is chunked
    #[arg(long, help_heading = "How it is done")]
    pub(crate) deterministic: bool,

    /// What ranks started here are bound to
    #[arg(
        long,
        value_name = "WHAT",
        value_enum,
        default_value_t = Bind::Processor,
        requires = "ranks",
        help_heading = "How it is done"
    )]
    pub(crate) bind: Bind,

    /// Memory of GPUs: the ranks of a host take one after another, and share them where there are
    /// fewer. Times are between events of a stream
    #[arg(long, help_heading = "GPU")]
    pub(crate) gpu: bool,
    /// Measure launches of a graph of 20 operations
    #[arg(long, help_heading = "GPU")]
    pub(crate) graph: bool,
    /// Do sendrecv or alltoall as a group of sends and receives, as alltoallv always is
    #[arg(long, requires = "gpu", help_heading = "GPU")]
    pub(crate) group: bool,

    /// Print one JSON object on stdout
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
    /// Explain each caveat of the figures, with advice, instead of naming all in one line
    #[arg(short, long, help_heading = "Output")]
    pub(crate) verbose: bool,
    /// Measure nothing: show the choice for each size with its reasons, and draw the plan of the
    /// smallest size
    #[arg(long, help_heading = "Output", conflicts_with = "simulate")]
    pub(crate) explain: bool,
    /// Start nothing: print the simulated time by algorithm
    #[arg(long, help_heading = "Output", requires = "ranks")]
    pub(crate) simulate: bool,
    /// With --simulate: also start the ranks and measure every algorithm and protocol at each size,
    /// beside the predictions from costs measured at the start
    #[arg(long, help_heading = "Output", requires = "simulate", conflicts_with_all = ["svg", "deterministic"])]
    pub(crate) measure: bool,
    /// Draw the plan (--explain) or the chart (--simulate) into this file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) svg: Option<PathBuf>,

    /// Ranks per host, each with an adapter of its own
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096), help_heading = "Simulated fabric")]
    pub(crate) per_host: u32,
    /// Hosts per leaf switch; without it the network is never congested
    #[arg(long, value_name = "HOSTS", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Simulated fabric")]
    pub(crate) leaf: Option<u32>,
    /// Oversubscription of a leaf's uplinks, as a factor
    #[arg(long, value_name = "TIMES", value_parser = parse_times, default_value = "1", requires = "leaf", help_heading = "Simulated fabric")]
    pub(crate) oversubscription: f64,

    /// Devices to use, from `doorbell devices`: connections are spread over them [default: soft0
    /// with --ranks, else the first active one]
    #[arg(long, value_name = "NAME[,NAME]", value_delimiter = ',', help_heading = "Device")]
    pub(crate) device: Vec<String>,
    #[command(flatten)]
    pub(crate) soft: SoftArgs,
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Operation {
    Collective(Collective),
    Moe(Part),
}

impl Operation {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Collective(collective) => collective.name(),
            Self::Moe(part) => part.name(),
        }
    }
}

impl CollArgs {
    /// The collective; dispatch and combine are measured beside all-to-all-v.
    pub(crate) fn collective(&self) -> Collective {
        match self.operation {
            Operation::Collective(collective) => collective,
            Operation::Moe(_) => Collective::AllToAllV,
        }
    }

    pub(crate) fn dtypes(&self) -> &[DataType] {
        self.dtype.as_ref().map_or(&[DataType::F32], |given| &given.0)
    }

    pub(crate) fn root(&self) -> Option<u32> {
        self.collective().has_root().then_some(self.root)
    }

    pub(crate) fn sizes(&self) -> Vec<u64> {
        if self.collective() == Collective::Barrier {
            return vec![0];
        }
        let (first, last) = (self.min_bytes, self.last_size());
        let mut sizes = vec![first];
        let next = |size: u64| match self.step_factor {
            // 0 would stay 0.
            Some(factor) => size.max(1).checked_mul(factor),
            None => size.checked_add(self.step_bytes),
        };
        while let Some(size) = sizes.last().and_then(|&size| next(size)).filter(|&size| size <= last) {
            sizes.push(size);
        }
        sizes
    }

    pub(crate) fn last_size(&self) -> u64 {
        self.max_bytes.unwrap_or(self.min_bytes.max(32 << 20))
    }
}

/// One value, or auto.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Choice<T>(pub(crate) Option<T>);

/// One value, or all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Choices<T>(pub(crate) Vec<T>);

/// The names of operations, those of nccl-tests' programs among them.
fn operations() -> impl TypedValueParser<Value = Operation> {
    let all = || {
        let collectives = Collective::ALL.iter().copied().map(Operation::Collective);
        collectives.chain(Part::ALL.map(Operation::Moe))
    };
    let named = |one: Operation| PossibleValue::new(one.name()).aliases(aliases(one));
    PossibleValuesParser::new(all().map(named)).try_map(move |text| {
        let is_it = |one: &Operation| one.name() == text || aliases(*one).contains(&text.as_str());
        all().find(is_it).ok_or("no operation")
    })
}

fn aliases(one: Operation) -> &'static [&'static str] {
    let Operation::Collective(one) = one else {
        return &[];
    };
    match one {
        Collective::AllReduce => &["all_reduce", "all-reduce"],
        Collective::AllGather => &["all_gather", "all-gather"],
        Collective::ReduceScatter => &["reduce_scatter", "reducescatter"],
        Collective::AllToAll => &["all_to_all", "all-to-all"],
        _ => &[],
    }
}

fn parse_choice<T: std::str::FromStr<Err = doorbell_collectives::UnknownName>>(
    text: &str,
) -> Result<Choice<T>, String> {
    match text {
        "auto" => Ok(Choice(None)),
        name => name
            .parse()
            .map(|one| Choice(Some(one)))
            .map_err(|e| format!("{e}, or auto")),
    }
}

fn parse_ops(text: &str) -> Result<Choices<ReduceOp>, String> {
    let all = || ReduceOp::ALL.to_vec();
    let name = if text == "mulsum" { "premulsum" } else { text };
    several(name, all)
}

fn parse_types(text: &str) -> Result<Choices<DataType>, String> {
    let name = match text {
        "int8" | "char" => "i8",
        "uint8" => "u8",
        "int32" | "int" => "i32",
        "uint32" => "u32",
        "int64" => "i64",
        "uint64" => "u64",
        "half" => "f16",
        "bfloat16" => "bf16",
        "float" => "f32",
        "double" => "f64",
        "fp8" | "fp8_e4m3" | "f8_e4m3" => "f8e4m3",
        "fp8_e5m2" | "f8_e5m2" => "f8e5m2",
        other => other,
    };
    several(name, || DataType::ALL.to_vec())
}

fn several<T: std::str::FromStr<Err = doorbell_collectives::UnknownName>>(
    name: &str,
    all: impl Fn() -> Vec<T>,
) -> Result<Choices<T>, String> {
    match name {
        "all" => Ok(Choices(all())),
        name => name
            .parse()
            .map(|one| Choices(vec![one]))
            .map_err(|e| format!("{e}, or all")),
    }
}

fn parse_times(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(times) if (1.0..=1000.0).contains(&times) => Ok(times),
        _ => Err(format!(
            "'{text}' is not an oversubscription: give a number from 1 to 1000"
        )),
    }
}
