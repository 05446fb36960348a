//! `gpu-collective`: verifies and benchmarks the collectives' kernels among GPUs of one process.
//! Self-contained apart from the driver, so that it can be copied to another machine.

mod bench;
mod check;

use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use doorbell_cuda::Driver;
use doorbell_tests::gpu::tool;

const USAGE: &str = "\
Check and measure the kernels of collectives on the GPUs of this machine

Usage: gpu-collective [check | bench | small] [OPTIONS]

Without a word it does all three.

Options:
      --ranks N            ranks, by turns on the GPUs; as many as GPUs if not given
      --quick              check: few cases; bench: few sizes
      --blocks A,B..       blocks of threads to measure with
      --threads A,B..      threads of a block
      --slices A,B..       KiB of a slice
      --fifos MIB          memory for FIFOs; 256 if not given
      --most MIB           the largest size; 1024 if not given
      --ptx FILE           kernels built otherwise
  -h, --help               show this

Exit status: 0 if all results were right, 1 if one was wrong, 2 for a usage error or a failure, 77 without a GPU.
";

#[derive(Debug)]
pub(crate) struct Options {
    part: Option<Part>,
    pub(crate) ranks: Option<usize>,
    pub(crate) quick: bool,
    pub(crate) blocks: Vec<u32>,
    pub(crate) threads: Vec<u32>,
    pub(crate) slices: Vec<u32>,
    pub(crate) fifos: usize,
    pub(crate) max_mib: usize,
    pub(crate) ptx: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Check,
    Bench,
    Small,
}

fn main() -> ExitCode {
    tool::main("gpu-collective", USAGE, parse, run)
}

fn run(driver: Driver, options: &Options) -> Result<bool> {
    for device in driver.devices()? {
        println!("{device}: {}", device.name()?);
    }
    let does = |part| options.part.is_none_or(|only| only == part);
    if does(Part::Check) && !check::run(driver, options)? {
        return Ok(false);
    }
    if does(Part::Small) {
        bench::small(driver, options)?;
    }
    if does(Part::Bench) {
        bench::large(driver, options)?;
    }
    Ok(true)
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Options>> {
    let mut options = Options {
        part: None,
        ranks: None,
        quick: false,
        blocks: vec![32, 64, 128],
        threads: vec![512],
        slices: vec![32, 64, 128],
        fifos: 256,
        max_mib: 1024,
        ptx: None,
    };
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
        let list = |text: String| -> Result<Vec<u32>> {
            let numbers: Result<Vec<u32>, _> = text.split(',').map(str::parse).collect();
            numbers.with_context(|| format!("{text:?} is no list of numbers"))
        };
        match argument.as_str() {
            "check" => options.part = Some(Part::Check),
            "bench" => options.part = Some(Part::Bench),
            "small" => options.part = Some(Part::Small),
            "--quick" => options.quick = true,
            "--ranks" => options.ranks = Some(value()?.parse().context("--ranks needs a number")?),
            "--blocks" => options.blocks = list(value()?)?,
            "--threads" => options.threads = list(value()?)?,
            "--slices" => options.slices = list(value()?)?,
            "--fifos" => options.fifos = value()?.parse().context("--fifos needs a number")?,
            "--most" => options.max_mib = value()?.parse().context("--most needs a number")?,
            "--ptx" => {
                let path = value()?;
                options.ptx = Some(std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?);
            }
            "-h" | "--help" => return Ok(None),
            _ => bail!("{argument} is not understood; see --help"),
        }
    }
    Ok(Some(options))
}
