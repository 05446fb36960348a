//! The command line of `doorbell`: what may be asked, how `--help` explains it, and which values make sense on their own.
//!
//! Only single values are judged here; whether they go together is for [`crate::plan`] to say.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::coll::{CollArgs, NOTES};
use crate::compare::CompareArgs;
use crate::device::Place;
use crate::html::ReportArgs;
use crate::plan::Kind;
use crate::report::{Thresholds, column_help};
use crate::stats::ClockChoice;
use crate::sweep::SweepArgs;
use crate::units::{
    parse_bandwidth, parse_bytes, parse_bytes_u32, parse_duration, parse_fraction, parse_rate, parse_seconds,
};

const EXAMPLES: &str = "\
Examples:
  doorbell bw write                         both ends here, on the userspace RoCEv2 device
  doorbell lat write -s 64 --json           latency as one JSON object
  doorbell bw send --server --bind 0.0.0.0  wait for a peer, then on the other machine:
  doorbell bw send 192.0.2.7 -d mlx5_0 -a   every size from 2 B to 8 MiB
  doorbell bw write --verify --drop 0.05    every byte checked while 5 % of the packets are lost
  doorbell sweep bw write -o write.json     every size, as one result;  doorbell report write.json -o report.html
  doorbell coll allreduce --ranks 4         collectives; each rank is a process
  doorbell bw write --gpu 0,1               from one GPU's memory into another's
  doorbell devices -v                       what is here
  doorbell diagnose                         what would make its figures wrong, and what to do
  doorbell gpu                              GPUs, and by which paths the devices reach their memory
  doorbell topo                             which adapter is near which GPU
  doorbell limits                           how far this machine itself could go, and how far the device does
  doorbell run -- ibv_devinfo               any libibverbs program, on the userspace device

Exit status: 0 done, 1 the test failed (wrong data, peer lost), 2 bad usage.";

/// RDMA bandwidth and latency tests, on hardware, on the kernel's software devices and on a userspace RoCEv2 device.
#[derive(Parser, Debug)]
#[command(name = "doorbell", version, after_help = EXAMPLES, disable_help_subcommand = true)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// List the devices a test can use
    Devices(DevicesArgs),
    /// Look for what would cast doubt on figures: frequency, NUMA, MTU, PCIe, GIDs, limits, noise; each with what to do
    Diagnose(DiagnoseArgs),
    /// Show adapters, GPUs and NUMA nodes, how near they are to one another, and which GPUs NVLink joins
    Topo(TopoArgs),
    /// List the GPUs, and how each RDMA device reaches their memory, or why not
    Gpu(GpuArgs),
    /// Measure what this machine itself allows, and how near the userspace device comes to it
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
    /// Make charts of results: a page to look at, SVG or PNG
    #[command(after_help = crate::html::EXAMPLES)]
    Report(ReportArgs),
    /// Say what changed between two results, and whether it is more than noise
    #[command(after_help = crate::compare::NOTES)]
    Compare(CompareArgs),
    /// Measure collectives: nccl-tests' options and table
    #[command(after_help = NOTES)]
    Coll(Box<CollArgs>),
    /// Run any libibverbs program, and what it starts, on the userspace device
    #[command(after_help = RUN_NOTES)]
    Run(RunArgs),
    /// Print what a shell has to set for every libibverbs program to be on the userspace device: eval "$(doorbell env)"
    Env(EnvArgs),
}

impl Command {
    /// Whether another process of this program started this one and reports for it.
    pub(crate) fn is_child(&self) -> bool {
        match self {
            // Ranks say for themselves what is wrong.
            Command::Coll(_) => false,
            Command::Devices(_)
            | Command::Diagnose(_)
            | Command::Sweep(_)
            | Command::Report(_)
            | Command::Compare(_)
            | Command::Topo(_)
            | Command::Gpu(_)
            | Command::Limits(_)
            | Command::Run(_)
            | Command::Env(_) => false,
            Command::Bw(args) => args.test.child,
            Command::Lat(args) => args.test.child,
        }
    }
}

const RUN_NOTES: &str = "\
Exit status: the command's own; 127 when there is no such command, 126 when it cannot be started, 125 when doorbell itself fails, 2 bad usage.
Signals are passed on. Programs that are linked statically or change their user cannot be served.";

/// What `doorbell run` takes.
#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) device: DropinArgs,
    /// The command with its arguments
    #[arg(
        value_name = "CMD",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub(crate) command: Vec<OsString>,
}

/// What `doorbell env` takes.
#[derive(Args, Debug)]
pub(crate) struct EnvArgs {
    /// Print NAME=VALUE lines, as for $GITHUB_ENV, and not commands of a shell
    #[arg(long)]
    pub(crate) plain: bool,
    #[command(flatten)]
    pub(crate) device: DropinArgs,
}

/// The userspace device of programs that know nothing of it.
#[derive(Args, Debug)]
#[command(next_help_heading = "Userspace device")]
pub(crate) struct DropinArgs {
    /// Address it binds to; each one after a comma is a device more [default: 127.0.0.1]
    #[arg(long, value_name = "IP[,IP]", value_delimiter = ',', num_args = 1)]
    pub(crate) address: Vec<IpAddr>,
    /// UDP port of the wire; both ends need the same
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: Option<u16>,
    /// How processes of one host reach each other: udp or local, that alone [default: local where it can be]
    #[arg(long, value_name = "LINK")]
    pub(crate) link: Option<String>,
    /// What to do to the packets sent, as drop=0.01,seed=7
    #[arg(long, value_name = "FAULTS")]
    pub(crate) faults: Option<String>,
    /// Leave /sys/class/infiniband as it is, and with it LD_PRELOAD
    #[arg(long)]
    pub(crate) no_sysfs: bool,
}

/// What `doorbell devices` takes.
#[derive(Args, Debug)]
pub(crate) struct DevicesArgs {
    /// Show every GID and the device's limits
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Show which GPUs are nearest to each adapter
    #[arg(long)]
    pub(crate) gpu: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) soft: SoftArgs,
}

/// What `doorbell diagnose` takes.
#[derive(Args, Debug)]
pub(crate) struct DiagnoseArgs {
    /// Look at this device only, which may be a userspace one [default: each that the system has]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// Exit with 1 if there is anything to say
    #[arg(long)]
    pub(crate) strict: bool,
    /// Say nothing of what has these codes
    #[arg(long, value_name = "CODE,…", value_delimiter = ',')]
    pub(crate) ignore: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Print each code, with what is looked at, when it warns and what to do, and look at nothing
    #[arg(long, conflicts_with_all = ["device", "strict", "ignore", "json"])]
    pub(crate) codes: bool,
    #[command(flatten)]
    pub(crate) soft: SoftArgs,
}

/// What `doorbell topo` takes.
#[derive(Args, Debug)]
pub(crate) struct TopoArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Where sysfs is, or a copy of another machine's (of which NVML is not asked, unless DOORBELL_NVML_LIBRARY names one)
    #[arg(long, value_name = "FOLDER", default_value = "/sys")]
    pub(crate) sysfs: PathBuf,
}

/// What `doorbell gpu` takes.
#[derive(Args, Debug)]
pub(crate) struct GpuArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) soft: SoftArgs,
}

/// What `doorbell limits` takes.
#[derive(Args, Debug)]
pub(crate) struct LimitsArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// How long to measure each line, in seven rounds
    #[arg(short = 'D', long, value_name = "SECONDS", default_value = "1", value_parser = parse_seconds)]
    pub(crate) duration: f64,
    /// One round, and a short look at what a device at rest uses
    #[arg(short, long)]
    pub(crate) quick: bool,
    /// Measure only these, by the names in the first column, and what they are held against
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(crate) only: Vec<String>,
}

/// The operation that a test measures.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Operation {
    /// RDMA WRITE
    Write,
    /// RDMA READ
    Read,
    /// SEND and receive
    Send,
    /// 8-byte fetch-and-add or compare-and-swap
    Atomic,
}

impl Operation {
    /// It as the command line has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Operation::Write => "write",
            Operation::Read => "read",
            Operation::Send => "send",
            Operation::Atomic => "atomic",
        }
    }
}

/// Which of the two atomics.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AtomicOperation {
    /// Fetch and add
    #[default]
    FetchAdd,
    /// Compare and swap
    CompareSwap,
}

/// What `doorbell bw` takes.
#[derive(Args, Debug)]
pub(crate) struct BwArgs {
    #[command(flatten)]
    pub(crate) test: TestArgs,
    /// Queue pairs, driven in turn
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) qps: u32,
    /// Requests handed over with one doorbell
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub(crate) post_list: u32,
    /// Ask for a completion once in N requests [default: 100, or what --tx-depth allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub(crate) cq_mod: Option<u32>,
    /// Requests in flight per queue pair [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub(crate) tx_depth: Option<u32>,
    /// Receives kept posted per queue pair, for send [default: 512]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=16384))]
    pub(crate) rx_depth: Option<u32>,
    /// Fail where the average of a size is below this, as 10Gb (bits), 1.2GB or 1GiB (bytes)
    #[arg(long, value_name = "PER_SECOND", value_parser = parse_bandwidth, conflicts_with = "server", help_heading = "Thresholds")]
    pub(crate) min_bw: Option<f64>,
    /// Fail where a size has fewer messages per second, as 20k or 1.5M
    #[arg(long, value_name = "PER_SECOND", value_parser = parse_rate, conflicts_with = "server", help_heading = "Thresholds")]
    pub(crate) min_msg_rate: Option<f64>,
}

impl BwArgs {
    /// What is asked of every size.
    pub(crate) fn thresholds(&self) -> Thresholds {
        Thresholds {
            min_bytes_per_s: self.min_bw,
            min_msg_per_s: self.min_msg_rate,
            max_p99: None,
        }
    }
}

/// What `doorbell lat` takes.
#[derive(Args, Debug)]
pub(crate) struct LatArgs {
    #[command(flatten)]
    pub(crate) test: TestArgs,
    /// Fail where the 99th percentile of a size is above this, as 12us
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, conflicts_with = "server", help_heading = "Thresholds")]
    pub(crate) max_p99: Option<Duration>,
}

impl LatArgs {
    /// What is asked of every size.
    pub(crate) fn thresholds(&self) -> Thresholds {
        Thresholds {
            max_p99: self.max_p99,
            ..Thresholds::default()
        }
    }
}

/// What both tests take.
#[derive(Args, Debug)]
pub(crate) struct TestArgs {
    /// The operation to measure
    #[arg(value_enum)]
    pub(crate) operation: Operation,
    /// Host name or address of the machine where the same test waits with --server; without it both ends run here
    pub(crate) peer: Option<String>,
    /// Wait for a peer, serve its test, and exit
    #[arg(long, conflicts_with = "peer")]
    pub(crate) server: bool,
    /// Serve one test after another until Ctrl-C, as sweeps need it
    #[arg(long, requires = "server")]
    pub(crate) forever: bool,
    /// Serve the process that started this one: announce the port on stdout, live as long as stdin is open
    #[arg(long, hide = true, requires = "server")]
    pub(crate) child: bool,

    /// Message size in bytes, as 64, 4K or 1M [default: 64K for bw, 2 for lat, 8 for atomic]
    #[arg(short, long, value_name = "BYTES", value_parser = parse_bytes, conflicts_with = "all", help_heading = "Test")]
    pub(crate) size: Option<u64>,
    /// Every power of two from 2 B to 8 MiB
    #[arg(short, long, help_heading = "Test")]
    pub(crate) all: bool,
    /// Messages measured per size and queue pair [default: 5000 for bw write, else 1000; fewer where that would be over 4 GiB]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "duration", help_heading = "Test")]
    pub(crate) iterations: Option<u64>,
    /// Run each size for a time instead of a number of messages
    #[arg(short = 'D', long, value_name = "SECONDS", value_parser = parse_seconds, help_heading = "Test")]
    pub(crate) duration: Option<f64>,
    /// Messages sent before measuring starts [default: 100, at most a tenth of the iterations]
    #[arg(long, value_name = "N", help_heading = "Test")]
    pub(crate) warmup: Option<u64>,
    /// Messages per second over all queue pairs, each started when it is due: latency counts from there, so a stall shows in every message that it held up. As 5000, 20k or 1M
    #[arg(long, value_name = "PER_SECOND", value_parser = parse_rate, help_heading = "Test")]
    pub(crate) rate: Option<f64>,
    /// Measure each size so often, each time on new queue pairs, and say how well the mean is known
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000), help_heading = "Test")]
    pub(crate) repeat: u32,
    /// Where time is read
    #[arg(long, value_enum, value_name = "CLOCK", default_value_t = ClockChoice::Auto, help_heading = "Test")]
    pub(crate) clock: ClockChoice,
    /// Check every byte of every message
    #[arg(long, help_heading = "Test")]
    pub(crate) verify: bool,
    /// Copy messages up to this size into the request itself [default: 0 for bw, 220 for lat]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes_u32, help_heading = "Test")]
    pub(crate) inline: Option<u32>,
    /// Messages in private memory, as most programs have them, at both ends [default: in shared memory up to 64 queue pairs, which the userspace device copies faster on one host]
    #[arg(long, help_heading = "Test")]
    pub(crate) private_memory: bool,
    /// Messages in the memory of this GPU, or host; when both ends run here a second one, after a comma, is the other end's
    #[arg(
        long,
        value_name = "N[,N]",
        value_delimiter = ',',
        num_args = 1,
        help_heading = "Test"
    )]
    pub(crate) gpu: Vec<Place>,
    /// Which atomic
    #[arg(long, value_enum, value_name = "OP", help_heading = "Test")]
    pub(crate) atomic_op: Option<AtomicOperation>,
    /// Seed of the payload, and of the faults
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Test")]
    pub(crate) seed: u64,

    /// Print one JSON object on stdout
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
    /// Write the results as Prometheus metrics too, whole or not at all; - for stdout instead of the table
    #[arg(long, value_name = "FILE", conflicts_with = "server", help_heading = "Output")]
    pub(crate) prometheus: Option<PathBuf>,
    /// Show the processor time of this end, the kernel's part with it
    #[arg(long, help_heading = "Output")]
    pub(crate) cpu_util: bool,
    /// No progress bar
    #[arg(long, help_heading = "Output")]
    pub(crate) no_progress: bool,

    /// Address the server listens on; 0.0.0.0 or :: lets other machines in
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1",
        requires = "server",
        help_heading = "Connection"
    )]
    pub(crate) bind: IpAddr,
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(flatten)]
    pub(crate) soft: SoftArgs,
}

/// How the two ends find each other, and how their queue pairs are set up.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Connection")]
pub(crate) struct ConnectionArgs {
    /// Device to use, from `doorbell devices` [default: soft0 when both ends run here, else the first active one]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// TCP port where the two ends agree on the test
    #[arg(long, value_name = "PORT", default_value_t = 18515)]
    pub(crate) port: u16,
    /// Path MTU: 256, 512, 1024, 2048 or 4096 [default: the port's]
    #[arg(long, value_name = "BYTES", value_parser = parse_mtu)]
    pub(crate) mtu: Option<u32>,
    /// Index in the port's GID table [default: the first RoCEv2 entry]
    #[arg(long, value_name = "INDEX", value_parser = clap::value_parser!(u8))]
    pub(crate) gid_index: Option<u8>,
    /// Local ACK timeout code: 4.096 us * 2^CODE, 0 for never
    #[arg(long, value_name = "CODE", default_value_t = 14, value_parser = clap::value_parser!(u8).range(0..=31))]
    pub(crate) timeout: u8,
    /// Retries before a queue pair gives its peer up
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u8).range(0..=7))]
    pub(crate) retry: u8,
}

/// The userspace device: its address, and the faults it can be asked to add.
#[derive(Args, Debug, Clone, Default)]
#[command(next_help_heading = "Userspace device")]
pub(crate) struct SoftArgs {
    /// Address it binds to; with both ends here a second one, after a comma, is the other end's [default: 127.0.0.1]
    #[arg(long, value_name = "IP[,IP]", value_delimiter = ',', num_args = 1)]
    pub(crate) soft_address: Vec<IpAddr>,
    /// UDP port of the wire; both ends need the same
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) soft_port: Option<u16>,
    /// Fraction of the packets sent that are lost
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction)]
    pub(crate) drop: Option<f64>,
    /// Fraction of the packets sent that arrive twice
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction)]
    pub(crate) duplicate: Option<f64>,
    /// Fraction of the packets sent that are overtaken by later ones
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction)]
    pub(crate) reorder: Option<f64>,
    /// Fraction of the packets sent in which a bit flips
    #[arg(long, value_name = "FRACTION", value_parser = parse_fraction)]
    pub(crate) corrupt: Option<f64>,
    /// Time by which packets sent are held back, as 100us
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub(crate) delay: Option<Duration>,
    /// Capture the packets of this end, for wireshark
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,
}

fn parse_mtu(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(mtu @ (256 | 512 | 1024 | 2048 | 4096)) => Ok(mtu),
        _ => Err(format!("'{text}' is not a path MTU: give 256, 512, 1024, 2048 or 4096")),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn values_that_make_no_sense_are_refused() {
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
            "doorbell bw write --retry 8",
            "doorbell bw write --rate fast",
            "doorbell bw write --min-bw 10G",
            "doorbell bw write --max-p99 5us",
            "doorbell bw write --server --min-bw 10Gb",
            "doorbell lat write --max-p99 5",
            "doorbell lat write --server --prometheus x",
            "doorbell bw write --repeat 0",
            "doorbell lat write --clock sundial",
            "doorbell bw write peer --server",
            "doorbell bw write --bind 0.0.0.0",
            "doorbell bw write --gpu first",
            "doorbell lat write -q 2",
            "doorbell run",
            "doorbell run --address localhost -- true",
            "doorbell run --port 0 -- true",
            "doorbell env true",
            "doorbell tpoo",
        ] {
            let refused = Cli::try_parse_from(line.split(' ')).expect_err(line);
            assert!(refused.exit_code() == 2, "{line}");
        }
    }
}
