//! `gpu-reduce`: verifies the reduction kernels on a GPU bit for bit against the CPU's, and
//! benchmarks them. Self-contained apart from the driver, for copying to other machines.

mod bench;
mod check;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use doorbell_cuda::{Attribute, Context, Driver};
use doorbell_tests::gpu::sweep::Extent;
use doorbell_tests::gpu::tool;

const USAGE: &str = "\
Check and measure the reduction kernels on a GPU

Usage: gpu-reduce [check | bench] [OPTIONS]

Without a word it does both.

Options:
      --device N           the GPU's number; 0 if not given
      --quick              few cases and no large memory, for compute-sanitizer; bench: the sizes that are judged, alone
      --ptx FILE:UNROLL    kernels built otherwise, as `cargo xtask kernels --unroll 4` does, measured beside our own; may be given several times
      --json FILE          write what was measured there, too
  -h, --help               show this

Exit status: 0 if all results were right, 1 if one was wrong, 2 for a usage error or a failure, 77 without a GPU.
";

#[derive(Debug, Default)]
pub(crate) struct Options {
    only: Option<Part>,
    device: usize,
    quick: bool,
    ptx: Vec<(PathBuf, u32)>,
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Check,
    Bench,
}

fn main() -> ExitCode {
    tool::main("gpu-reduce", USAGE, parse, run)
}

fn run(driver: Driver, options: &Options) -> Result<bool> {
    let device = driver.device(options.device)?;
    let context = device.context()?;
    let (driver, minor) = (driver.version() / 1000, driver.version() % 1000 / 10);
    let multiprocessors = device.attribute(Attribute::MultiprocessorCount)?;
    println!(
        "{device}: {}, {multiprocessors} multiprocessors, CUDA {driver}.{minor}",
        device.name()?
    );
    if options.only != Some(Part::Bench) {
        let extent = if options.quick { Extent::Quick } else { Extent::Full };
        if !check::run(&context, extent)? {
            return Ok(false);
        }
    }
    if options.only != Some(Part::Check) {
        bench::run(&context, options)?;
    }
    Ok(true)
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Options>> {
    let mut options = Options::default();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "check" => options.only = Some(Part::Check),
            "bench" => options.only = Some(Part::Bench),
            "--quick" => options.quick = true,
            "--device" => options.device = value()?.parse().context("--device needs a number")?,
            "--ptx" => {
                let value = value()?;
                let (file, unroll) = value.rsplit_once(':').context("--ptx needs FILE:UNROLL")?;
                options
                    .ptx
                    .push((file.into(), unroll.parse().context("--ptx needs FILE:UNROLL")?));
            }
            "--json" => options.json = Some(value()?.into()),
            "-h" | "--help" => return Ok(None),
            _ => bail!("{argument} is not understood; see --help"),
        }
    }
    Ok(Some(options))
}

pub(crate) fn free_bytes(context: &Context) -> Result<usize> {
    Ok(context.memory_info()?.0)
}
