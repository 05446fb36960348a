//! `gpu-verbs`: the soft device with GPU memory through its C ABI: every combination of host and
//! GPUs, in one process and between two; and benchmarks. Self-contained apart from the driver, for
//! copying to other machines.

mod bench;
mod check;
mod end;
mod full_queue;
mod memory;
mod remote;

use std::net::{IpAddr, Ipv4Addr};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use doorbell_cuda::Driver;

const USAGE: &str = "\
Check and measure memory of GPUs on the soft device

Usage: gpu-verbs [check | bench] [OPTIONS]

Without a command it does both. GPU 0 is the local end's and the last of --gpus the remote end's in the measurements.

Options:
      --gpus N             how many GPUs take part; 2, or as many as there are, if not given
      --largest N          the longest message in MiB; 1024 if not given
      --quick              few sizes, 4 MiB at most, few iterations
      --one-process        check: both ends in one process only
      --two-processes      check: the remote end in a process of its own only
      --only PART          check: mixes, lists, inline, order, over, raw, key, atomic, full, deregister or kill alone
  -h, --help               show this

DOORBELL_LINK=udp sends everything over UDP. GPU_VERBS_MEMORY=older allocates GPU memory by cuMemAlloc, like PyTorch, which is shared by IPC handle.
Exit status: 0 if all checks passed, 1 if one failed, 2 for a usage error or a failure, 77 without a GPU.
";

#[derive(Debug, Clone)]
pub(crate) struct Options {
    check: bool,
    bench: bool,
    gpus: usize,
    largest: usize,
    quick: bool,
    one: bool,
    two: bool,
    only: Option<String>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [word, address, len, gpus] = &arguments[..]
        && word == "far"
    {
        return end(far_end(address, len, gpus).map(|()| true));
    }
    let mut options = match parse(arguments.into_iter()) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(error) => return end(Err(error)),
    };
    let driver = match Driver::load() {
        Ok(driver) => driver,
        Err(absent) => {
            println!("nothing to do: {absent}");
            return ExitCode::from(77);
        }
    };
    options.gpus = options.gpus.min(driver.device_count());
    end(run(&options))
}

fn end(result: Result<bool>) -> ExitCode {
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("gpu-verbs: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(options: &Options) -> Result<bool> {
    let address = own_address();
    end::set_up(address)?;
    let mut right = true;
    if options.check {
        right &= check::run(options, address)?;
    }
    if options.bench {
        bench::run(options, address)?;
    }
    Ok(right)
}

/// An address that no other run uses.
fn own_address() -> IpAddr {
    let pid = std::process::id();
    IpAddr::V4(Ipv4Addr::new(
        127,
        100 + (pid >> 16) as u8 % 100,
        (pid >> 8) as u8,
        pid as u8 | 1,
    ))
}

fn far_end(address: &str, len: &str, gpus: &str) -> Result<()> {
    remote::run(address.parse()?, len.parse()?, gpus.parse()?)
}

fn parse(arguments: impl Iterator<Item = String>) -> Result<Option<Options>> {
    let mut options = Options {
        check: false,
        bench: false,
        gpus: 2,
        largest: 1 << 30,
        quick: false,
        one: true,
        two: true,
        only: None,
    };
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} wants a value"));
        let mut number = || -> Result<usize> {
            let value = value()?;
            value.parse().with_context(|| format!("{argument} {value}"))
        };
        match argument.as_str() {
            "check" => options.check = true,
            "bench" => options.bench = true,
            "--gpus" => options.gpus = number()?,
            "--largest" => options.largest = number()? << 20,
            "--quick" => options.quick = true,
            "--only" => {
                let part = value()?;
                let is_one = check::PARTS.iter().any(|(name, ..)| *name == part);
                ensure!(is_one, "no part {part}: see --help");
                options.only = Some(part);
            }
            "--one-process" => options.two = false,
            "--two-processes" => options.one = false,
            "-h" | "--help" => return Ok(None),
            _ => bail!("what is {argument}? See --help"),
        }
    }
    ensure!(
        (1 << 20..=1 << 30).contains(&options.largest),
        "--largest is from 1 to 1024"
    );
    if options.quick {
        options.largest = options.largest.min(4 << 20);
    }
    if !options.check && !options.bench {
        (options.check, options.bench) = (true, true);
    }
    Ok(Some(options))
}
