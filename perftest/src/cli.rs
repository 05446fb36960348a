//! The command line of `doorbell`, with its `--help` texts.
//!
//! Only single values are validated here; [`crate::plan`] validates their combinations.

mod connection;

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

use crate::coll::{CollArgs, NOTES};
use crate::compare::CompareArgs;
use crate::device::MemoryPlace;
use crate::dropin::PciAddress;
use crate::html::ReportArgs;
use crate::manual::{CompletionsArgs, ManArgs};
use crate::plan::Kind;
use crate::report::{Thresholds, column_help};
use crate::stats::ClockChoice;
use crate::storage::{self, FileArgs};
use crate::sweep::SweepArgs;
use crate::units::{parse_bandwidth, parse_bytes, parse_bytes_u32, parse_duration, parse_rate, parse_seconds};

pub(crate) use connection::{ConnectionArgs, LimitArgs, SoftArgs, Transport};

const EXAMPLES: &str = "\
Examples:
  doorbell bw write                         both ends here, on the userspace RoCEv2 device
  doorbell lat write -s 64 --json           latency as one JSON object
  doorbell bw send --server --bind 0.0.0.0  wait for a peer, then on the other machine:
  doorbell bw send 192.0.2.7 -d mlx5_0 -a   every size from 2 B to 8 MiB
  doorbell bw write --verify --drop 0.05    every byte checked while 5 % of the packets are lost
  doorbell bw send --transport ud -b        datagrams, in both directions at once
  doorbell sweep bw write -o write.json     every size, as one result;  doorbell report write.json -o report.html
  doorbell coll allreduce --ranks 4         collectives; each rank is a process
  doorbell bw write --gpu 0,1               from one GPU's memory into another's
  doorbell devices -v                       devices, GIDs and limits
  doorbell diagnose                         conditions that distort results, with advice
  doorbell bw file --gpu 0 weights.bin      a file into a GPU's memory, beside the disk's and the bus's limits
  doorbell gpu                              GPUs, and by which paths the devices reach their memory
  doorbell topo                             which adapter is near which GPU
  doorbell limits                           the machine's own limits, and how close the device comes
  doorbell run -- ibv_devinfo               any libibverbs program, on the userspace device

Exit status: 0 done, 1 the test failed (wrong data, peer lost), 2 bad usage.";

/// RDMA bandwidth and latency tests, on hardware, on the kernel's software devices and on a
/// userspace RoCEv2 device.
#[derive(Parser, Debug)]
#[command(name = "doorbell", version, after_help = EXAMPLES)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// A command line, parsed.
pub(crate) enum Invocation {
    Cli(Box<Cli>),
    /// `doorbell bw file`.
    File(Box<FileArgs>),
}

/// The command line: `bw file` shares no option with the other tests of `bw`, and so is a
/// subcommand in their place.
pub(crate) fn command_line() -> clap::Command {
    let file = FileArgs::augment_args(clap::Command::new("file"))
        .about("Measure reading and writing of files, from and to host or GPU memory")
        .after_help(storage::NOTES);
    Cli::command().mut_subcommand("bw", |bw| {
        bw.args_conflicts_with_subcommands(true)
            .subcommand_negates_reqs(true)
            .subcommand(file)
    })
}

impl Invocation {
    /// Parses the arguments of this process; ends it with a message where they are invalid.
    pub(crate) fn parse() -> Self {
        let mut command = command_line();
        let matches = command.get_matches_mut();
        let file = matches
            .subcommand_matches("bw")
            .and_then(|bw| bw.subcommand_matches("file"));
        let parsed = match file {
            Some(file) => FileArgs::from_arg_matches(file).map(|args| Self::File(Box::new(args))),
            None => Cli::from_arg_matches(&matches).map(|cli| Self::Cli(Box::new(cli))),
        };
        parsed.unwrap_or_else(|error| error.format(&mut command).exit())
    }
}

/// The commands.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// List the devices a test can use
    Devices(DevicesArgs),
    /// Check for conditions that distort results: frequency, NUMA, MTU, PCIe, GIDs, limits, noise;
    /// each with advice
    Diagnose(DiagnoseArgs),
    /// Show adapters, GPUs and NUMA nodes, their distances, and which GPUs NVLink connects
    Topo(TopoArgs),
    /// List the GPUs, and how each RDMA device reaches their memory, or why not
    Gpu(GpuArgs),
    /// Measure the machine's own limits, and how close the userspace device comes to them
    Limits(LimitsArgs),
    /// Measure bandwidth
    #[command(after_help = EXAMPLES, after_long_help = format!("{}\n\n{EXAMPLES}", column_help(Kind::Bw)))]
    Bw(Box<BwArgs>),
    /// Measure latency
    #[command(after_help = EXAMPLES, after_long_help = format!("{}\n\n{EXAMPLES}", column_help(Kind::Lat)))]
    Lat(Box<LatArgs>),
    /// Measure bandwidth or latency over sizes, queue pairs, depths and inline sizes
    #[command(after_help = crate::sweep::EXAMPLES)]
    Sweep(Box<SweepArgs>),
    /// Make charts of results: a page for a browser, or SVG
    #[command(after_help = crate::html::EXAMPLES)]
    Report(ReportArgs),
    /// Show what changed between two results, and whether it is more than noise
    #[command(after_help = crate::compare::NOTES)]
    Compare(CompareArgs),
    /// Measure collectives: nccl-tests' options and table
    #[command(after_help = NOTES)]
    Coll(Box<CollArgs>),
    /// Run any libibverbs program, and its child processes, on the userspace device
    #[command(after_help = RUN_NOTES)]
    Run(RunArgs),
    /// Print the variables that put every libibverbs program of a shell on the userspace device:
    /// eval "$(doorbell env)"
    Env(EnvArgs),
    /// Print the completions of a shell: source <(doorbell completions bash)
    Completions(CompletionsArgs),
    /// Write the manual pages of the command
    Man(ManArgs),
}

impl Command {
    /// Whether this process is a child that its parent reports for.
    pub(crate) fn is_child(&self) -> bool {
        match self {
            Command::Bw(args) => args.test.child,
            Command::Lat(args) => args.test.child,
            // Ranks of `coll` report their own failures.
            _ => false,
        }
    }
}

const RUN_NOTES: &str = "\
Exit status: the command's own; 127 when there is no such command, 126 when it cannot be started, 125 when doorbell itself fails, 2 bad usage.
Signals are forwarded. Programs that are linked statically or change their user cannot be served.";

/// The arguments of `doorbell run`.
#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) device: DropinArgs,
    /// Ranks that share each GPU: starts an MPS daemon for the command, without which they are
    /// time-sliced, and ends it with the command
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=48), requires = "nccl", help_heading = "GPUs")]
    pub(crate) ranks_per_gpu: Option<u8>,
    /// The command with its arguments
    #[arg(
        value_name = "CMD",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub(crate) command: Vec<OsString>,
}

/// The arguments of `doorbell env`.
#[derive(Args, Debug)]
pub(crate) struct EnvArgs {
    /// Print NAME=VALUE lines, as for $GITHUB_ENV, instead of shell commands
    #[arg(long)]
    pub(crate) plain: bool,
    #[command(flatten)]
    pub(crate) device: DropinArgs,
}

/// The userspace devices of unmodified programs.
#[derive(Args, Debug)]
#[command(next_help_heading = "Userspace device")]
pub(crate) struct DropinArgs {
    #[command(flatten)]
    pub(crate) soft: SoftArgs,
    /// Number of devices, soft0, soft1, …, at this address and the loopback addresses that follow
    /// it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=32))]
    pub(crate) rails: Option<u8>,
    /// Port of this device down from TIME on, for DURATION or for ever: soft1@3s+500ms
    #[arg(long, value_name = "DEV@TIME[+DURATION]")]
    pub(crate) down: Vec<String>,
    /// Speed at which this device sends, in bits per second: soft1=1Gb; may be given for each
    /// device
    #[arg(long, value_name = "DEV=RATE")]
    pub(crate) slow: Vec<String>,
    /// PCI device, such as a GPU, that it is next to in sysfs; one for each device
    #[arg(
        long,
        value_name = "PCI[,PCI]",
        value_delimiter = ',',
        num_args = 1,
        conflicts_with = "no_sysfs"
    )]
    pub(crate) near: Vec<PciAddress>,
    /// Do not present the device in /sys/class/infiniband, and do not set LD_PRELOAD
    #[arg(long)]
    pub(crate) no_sysfs: bool,
    /// Put Doorbell's libnccl.so.2 in the place of every other one, as PyTorch's: NCCL's C API over
    /// the collectives on GPU memory
    #[arg(long, help_heading = "GPUs", conflicts_with = "no_sysfs")]
    pub(crate) nccl: bool,
}

/// The arguments of `doorbell devices`.
#[derive(Args, Debug)]
pub(crate) struct DevicesArgs {
    /// Show every GID and the device's limits
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Show the nearest GPUs of each adapter
    #[arg(long)]
    pub(crate) gpu: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) soft: SoftArgs,
}

/// The arguments of `doorbell diagnose`.
#[derive(Args, Debug)]
pub(crate) struct DiagnoseArgs {
    /// Check only this device, which may be a userspace one [default: all devices of the system]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// Exit with 1 if there is a warning
    #[arg(long)]
    pub(crate) strict: bool,
    /// Ignore warnings with these codes
    #[arg(long, value_name = "CODE,…", value_delimiter = ',')]
    pub(crate) ignore: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Print each code with its check, its condition and the advice, and check nothing
    #[arg(long, conflicts_with_all = ["device", "strict", "ignore", "json"])]
    pub(crate) codes: bool,
    #[command(flatten)]
    pub(crate) soft: SoftArgs,
}

/// The arguments of `doorbell topo`.
#[derive(Args, Debug)]
pub(crate) struct TopoArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// sysfs, or a copy of another machine's (for which NVML is not used, unless
    /// DOORBELL_NVML_LIBRARY names one)
    #[arg(long, value_name = "FOLDER", default_value = "/sys")]
    pub(crate) sysfs: PathBuf,
}

/// The arguments of `doorbell gpu`.
#[derive(Args, Debug)]
pub(crate) struct GpuArgs {
    /// Show by which path this file is read into host memory and that of each GPU, and why not by
    /// better ones; the file is only read
    #[arg(long, value_name = "FILE")]
    pub(crate) storage: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) soft: SoftArgs,
}

/// The arguments of `doorbell limits`.
#[derive(Args, Debug)]
pub(crate) struct LimitsArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Duration of each test and of the limit before it, in seven rounds
    #[arg(short = 'D', long, value_name = "SECONDS", default_value = "1", value_parser = parse_seconds)]
    pub(crate) duration: f64,
    /// One round, and a short measurement of an idle device
    #[arg(short, long)]
    pub(crate) quick: bool,
    /// Explain each caveat of the figures, with advice, instead of naming all in one line
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Measure only these, by the names in the first column, and the limits they are compared with
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(crate) only: Vec<String>,
}

/// The operation that a test measures.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Operation {
    /// RDMA WRITE
    #[default]
    Write,
    /// RDMA READ
    Read,
    /// SEND and receive
    Send,
    /// 8-byte fetch-and-add or compare-and-swap
    Atomic,
}

impl Operation {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Operation::Write => "write",
            Operation::Read => "read",
            Operation::Send => "send",
            Operation::Atomic => "atomic",
        }
    }
}

/// The atomic operation.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AtomicOperation {
    /// Fetch and add
    #[default]
    FetchAdd,
    /// Compare and swap
    CompareSwap,
}

/// The arguments of `doorbell bw`.
#[derive(Args, Debug)]
pub(crate) struct BwArgs {
    #[command(flatten)]
    pub(crate) test: TestArgs,
    /// Queue pairs, served round-robin
    #[arg(short, long, value_name = "N", default_value_t = 1, help_heading = "Test", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) qps: u32,
    /// Post list: requests posted with one doorbell
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Test", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub(crate) post_list: u32,
    /// CQ moderation: one signaled request in N [default: 100, or what --tx-depth allows]
    #[arg(long, value_name = "N", help_heading = "Test", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub(crate) cq_mod: Option<u32>,
    /// tx depth: requests in flight per queue pair [default: 128]
    #[arg(long, value_name = "N", help_heading = "Test", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub(crate) tx_depth: Option<u32>,
    /// rx depth: receives posted per queue pair, for send [default: 512; of uc and ud as many as
    /// messages, up to 4096]
    #[arg(long, value_name = "N", help_heading = "Test", value_parser = clap::value_parser!(u32).range(2..=16384))]
    pub(crate) rx_depth: Option<u32>,
    /// Both ends send, read or do atomics at once; the figures are the sums of what each has
    /// measured
    #[arg(short, long, help_heading = "Test")]
    pub(crate) bidirectional: bool,
    /// Fail where the average of a size is below this, as 10Gb (bits), 1.2GB or 1GiB (bytes)
    #[arg(long, value_name = "PER_SECOND", value_parser = parse_bandwidth, conflicts_with = "server", help_heading = "Thresholds")]
    pub(crate) min_bw: Option<f64>,
    /// Fail where a size has fewer messages per second, as 20k or 1.5M
    #[arg(long, value_name = "PER_SECOND", value_parser = parse_rate, conflicts_with = "server", help_heading = "Thresholds")]
    pub(crate) min_msg_rate: Option<f64>,
}

impl BwArgs {
    pub(crate) fn thresholds(&self) -> Thresholds {
        Thresholds {
            min_bytes_per_s: self.min_bw,
            min_msg_per_s: self.min_msg_rate,
            max_p99: None,
        }
    }
}

/// The arguments of `doorbell lat`.
#[derive(Args, Debug)]
pub(crate) struct LatArgs {
    #[command(flatten)]
    pub(crate) test: TestArgs,
    /// Fail where the 99th percentile of a size is above this, as 12us
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, conflicts_with = "server", help_heading = "Thresholds")]
    pub(crate) max_p99: Option<Duration>,
}

impl LatArgs {
    pub(crate) fn thresholds(&self) -> Thresholds {
        Thresholds {
            max_p99: self.max_p99,
            ..Thresholds::default()
        }
    }
}

/// The arguments of both tests.
#[derive(Args, Debug)]
// fields: one per command line option
pub(crate) struct TestArgs {
    /// The operation to measure
    #[arg(value_enum)]
    pub(crate) operation: Operation,
    /// Host name or address of the server, where the same test runs with --server; without it both
    /// ends run here
    pub(crate) peer: Option<String>,
    /// Be the server: wait for a client, serve its test, and exit
    #[arg(long, conflicts_with = "peer")]
    pub(crate) server: bool,
    /// Serve one test after another until Ctrl-C, as sweeps need it
    #[arg(long, requires = "server")]
    pub(crate) forever: bool,
    /// Serve the process that started this one: announce the port on stdout, live as long as stdin
    /// is open
    #[arg(long, hide = true, requires = "server")]
    pub(crate) child: bool,

    /// Message size in bytes, as 64, 4K or 1M [default: 64K for bw, 2 for lat, 8 for atomic]
    #[arg(short, long, value_name = "BYTES", value_parser = parse_bytes, conflicts_with = "all", help_heading = "Test")]
    pub(crate) size: Option<u64>,
    /// Every power of two from 2 B to 8 MiB
    #[arg(short, long, help_heading = "Test")]
    pub(crate) all: bool,
    /// Iterations: messages measured per size and queue pair [default: 5000 for bw write, else
    /// 1000; fewer where that would be over 4 GiB]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "duration", help_heading = "Test")]
    pub(crate) iterations: Option<u64>,
    /// Run each size for a time instead of a number of iterations
    #[arg(short = 'D', long, value_name = "SECONDS", value_parser = parse_seconds, help_heading = "Test")]
    pub(crate) duration: Option<f64>,
    /// Warm-up messages before measuring starts [default: 100, at most a tenth of the iterations]
    #[arg(long, value_name = "N", help_heading = "Test")]
    pub(crate) warmup: Option<u64>,
    /// Rate limit in messages per second over all queue pairs, in an open loop: latency counts from
    /// when a message is due, so a stall shows in every message that it delays (no coordinated
    /// omission). As 5000, 20k or 1M
    #[arg(long, value_name = "PER_SECOND", value_parser = parse_rate, help_heading = "Test")]
    pub(crate) rate: Option<f64>,
    /// Repeat each size so often, each time on new queue pairs, and print the confidence interval
    /// of the mean
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000), help_heading = "Test")]
    pub(crate) repeat: u32,
    /// Clock to measure with
    #[arg(long, value_enum, value_name = "CLOCK", default_value_t = ClockChoice::Auto, help_heading = "Test")]
    pub(crate) clock: ClockChoice,
    /// Check every byte of every message
    #[arg(long, help_heading = "Test")]
    pub(crate) verify: bool,
    /// Inline size: messages up to this size are sent inline [default: 0 for bw, 220 for lat]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes_u32, help_heading = "Test")]
    pub(crate) inline: Option<u32>,
    /// Messages in private memory, as in most programs, at both ends [default: in shared memory up
    /// to 64 queue pairs, which the userspace device copies faster on one host]
    #[arg(long, help_heading = "Test")]
    pub(crate) private_memory: bool,
    /// Messages in the memory of this GPU, or host; when both ends run here a second one, after a
    /// comma, is the server's
    #[arg(
        long,
        value_name = "N[,N]",
        value_delimiter = ',',
        num_args = 1,
        help_heading = "Test"
    )]
    pub(crate) gpu: Vec<MemoryPlace>,
    /// Sleep until a completion event instead of polling, at both ends
    #[arg(long, help_heading = "Test")]
    pub(crate) events: bool,
    /// The atomic operation
    #[arg(long, value_enum, value_name = "OP", help_heading = "Test")]
    pub(crate) atomic_op: Option<AtomicOperation>,
    /// Seed of the payload, and of the faults
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Test")]
    pub(crate) seed: u64,

    /// Print one JSON object on stdout
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
    /// Also write the results as Prometheus metrics, atomically; - for stdout instead of the table
    #[arg(long, value_name = "FILE", conflicts_with = "server", help_heading = "Output")]
    pub(crate) prometheus: Option<PathBuf>,
    /// Show bandwidths in Gb/s (10^9 bits) instead of MiB/s
    #[arg(long, help_heading = "Output")]
    pub(crate) gbits: bool,
    /// Print a line every so many seconds while a size runs, of what this end has done since the
    /// last
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, conflicts_with = "server", help_heading = "Output")]
    pub(crate) interval: Option<f64>,
    /// Show the CPU time of this end, in user mode and in the kernel
    #[arg(long, help_heading = "Output")]
    pub(crate) cpu_util: bool,
    /// No progress bar
    #[arg(long, help_heading = "Output")]
    pub(crate) no_progress: bool,
    /// Explain each caveat of the figures, with advice, instead of naming all in one line
    #[arg(short, long, help_heading = "Output")]
    pub(crate) verbose: bool,

    /// Address the server listens on; 0.0.0.0 or :: accepts other machines
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1",
        requires = "server",
        help_heading = "Connection"
    )]
    pub(crate) bind: IpAddr,
    #[command(flatten)]
    pub(crate) limits: LimitArgs,
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(flatten)]
    pub(crate) soft: SoftArgs,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        command_line().debug_assert();
    }

    #[test]
    fn invalid_values_are_refused() {
        for line in [
            "doorbell",
            "doorbell bw",
            "doorbell bw scribble",
            "doorbell bw write -s 4X",
            "doorbell bw write -s 4K -a",
            "doorbell bw write -n 0",
            "doorbell bw write -n 5 -D 1",
            "doorbell bw write -q 0",
            "doorbell bw write --mtu 1500",
            "doorbell bw write --drop 1.5",
            "doorbell bw write --delay 5",
            "doorbell bw write --timeout 32",
            "doorbell bw write --dscp 64",
            "doorbell bw write --faults drop=0.1 --drop 0.1",
            "doorbell bw write --rate fast",
            "doorbell bw write --min-bw 10G",
            "doorbell bw write --max-p99 5us",
            "doorbell bw write --server --min-bw 10Gb",
            "doorbell bw write --transport xrc",
            "doorbell lat send --bidirectional",
            "doorbell bw write --interval 0",
            "doorbell lat write --max-p99 5",
            "doorbell lat write --server --prometheus x",
            "doorbell bw write --repeat 0",
            "doorbell lat write --clock sundial",
            "doorbell bw write peer --server",
            "doorbell bw write --bind 0.0.0.0",
            "doorbell bw write --gpu first",
            "doorbell bw file",
            "doorbell bw file x --path fast",
            "doorbell bw file x --depth 0",
            "doorbell bw file x -q 2",
            "doorbell bw -q 2 file x",
            "doorbell lat write -q 2",
            "doorbell run",
            "doorbell run --address localhost -- true",
            "doorbell run --udp-port 0 -- true",
            "doorbell env true",
            "doorbell tpoo",
        ] {
            let refused = command_line().try_get_matches_from(line.split(' ')).expect_err(line);
            assert!(refused.exit_code() == 2, "{line}");
        }
    }
}
