//! The arguments of `doorbell bw file`.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use clap::Args;
use doorbell_gpudirect::storage::StoragePath;

use crate::cli::SoftArgs;
use crate::units::parse_bytes;

pub(crate) const NOTES: &str = "\
Each round measures, in turn, the same bytes of the file: the limits of the disk and of the GPU's bus, what programs do
without Doorbell, and Doorbell. FILE is only read. Writes are measured with a file that the command makes beside it and
removes; of a folder, reads too. --no-write measures reads alone.

With --serve a process serves FILE, or the files below a folder, until Ctrl-C: it reads them past the page cache, and
its adapter WRITEs them into the memory of clients, which name them with --from. Clients are not authenticated.

Examples:
  doorbell bw file weights.safetensors       from the disk into host memory
  doorbell bw file --gpu 0 /mnt/nvme         into and from memory of a GPU, with a file of its own
  doorbell bw file --serve --bind 192.0.2.7 weights.safetensors   for other machines, and on one of them:
  doorbell bw file --from 192.0.2.7 --gpu 0 weights.safetensors   from that machine's disk into a GPU's memory

Exit status: 0 done, 1 the test failed (wrong data, no space), 2 bad usage.";

/// The arguments.
#[derive(Args, Debug, Clone)]
// fields: the options of the command
pub(crate) struct FileArgs {
    /// The file to read, or a folder in which to make one; with --from its name at the server
    pub(crate) file: PathBuf,
    /// Into and from memory of this GPU [default: host memory]
    #[arg(long, value_name = "N")]
    pub(crate) gpu: Option<usize>,
    /// Bytes read and written at once in each round [default: 256M, or the file's length]
    #[arg(short, long, value_name = "BYTES", value_parser = parse_bytes)]
    pub(crate) size: Option<u64>,
    /// Bytes of a request to the disk: a multiple of 64K
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "4M")]
    pub(crate) block: u64,
    /// Requests in flight
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) depth: u16,
    /// Rounds
    #[arg(short = 'n', long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) rounds: u16,
    /// Read and write by this path only: cufile, io_uring or pread [default: the best]
    #[arg(long, value_name = "PATH")]
    pub(crate) path: Option<StoragePath>,
    /// Measure reads alone
    #[arg(long)]
    pub(crate) no_write: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) remote: RemoteArgs,
    #[command(flatten)]
    pub(crate) soft: SoftArgs,
}

/// A served file.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Between processes")]
#[group(skip)]
pub(crate) struct RemoteArgs {
    /// Serve FILE, or the files below a folder, by queue pairs
    #[arg(long, conflicts_with_all = ["from", "gpu", "size", "block", "depth", "rounds", "path", "no_write", "json"])]
    pub(crate) serve: bool,
    /// Read FILE of the server on this host
    #[arg(long, value_name = "HOST", conflicts_with = "no_write")]
    pub(crate) from: Option<String>,
    /// Read this local file in turn with the served one, and compare their bytes
    #[arg(long, value_name = "FILE", requires = "from")]
    pub(crate) beside: Option<PathBuf>,
    /// Address to serve on
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST), requires = "serve")]
    pub(crate) bind: IpAddr,
    /// TCP port of the server
    #[arg(long, value_name = "PORT", default_value_t = 18517)]
    pub(crate) port: u16,
    /// RDMA device, from `doorbell devices` [default: the first active one, else soft0]
    #[arg(short, long, value_name = "NAME")]
    pub(crate) device: Option<String>,
}
