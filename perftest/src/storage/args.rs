//! The arguments of `doorbell bw file`.

use std::path::PathBuf;

use clap::Args;
use doorbell_gpudirect::storage::StoragePath;

use crate::units::parse_bytes;

pub(crate) const NOTES: &str = "\
Each round measures, in turn, the same bytes of the file: the limits of the disk and of the GPU's bus, what programs do
without Doorbell, and Doorbell. FILE is only read. Writes are measured with a file that the command makes beside it and
removes; of a folder, reads too. --no-write measures reads alone.

Examples:
  doorbell bw file weights.safetensors       from the disk into host memory
  doorbell bw file --gpu 0 /mnt/nvme         into and from memory of a GPU, with a file of its own

Exit status: 0 done, 1 the test failed (wrong data, no space), 2 bad usage.";

/// The arguments.
#[derive(Args, Debug)]
pub(crate) struct FileArgs {
    /// The file to read, or a folder in which to make one
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
}
