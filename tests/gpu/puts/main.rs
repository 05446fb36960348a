//! `gpu-puts`: verifies and benchmarks puts by kernels and in stream order between processes with
//! GPUs, on the soft device. Self-contained but for the driver, for copying to other machines.

mod bench;
mod check;
mod rank;

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use doorbell_cuda::Driver;
use doorbell_tests::gpu::ranks::Ranks;

const USAGE: &str = "\
Check and measure puts by kernels and in the order of streams

Usage: gpu-puts [check | bench] [OPTIONS]

Without a word it does both, between as many processes as --ranks says, each with a GPU of its own where there are so many.

Options:
      --ranks N            how many processes: 2, if not given; figures are of ranks 0 and 1
      --quick              small sizes and few repeats
      --limit SECONDS      when all of it is given up: 120, if not given
  -h, --help               show this

Exit status: 0 if all checks passed, 1 if one failed, 2 for a usage error or a failure, 77 without a GPU.
";

#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) check: bool,
    pub(crate) bench: bool,
    pub(crate) quick: bool,
    pub(crate) ranks: u32,
    limit: Duration,
    /// This rank, and the address of rank 0; `None` in the parent.
    rank: Option<(u32, SocketAddr)>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let options = match parse(&arguments) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("gpu-puts: {error:#}");
            return ExitCode::from(2);
        }
    };
    let done = match options.rank {
        None => {
            if let Err(absent) = Driver::load() {
                println!("nothing to do: {absent}");
                return ExitCode::from(77);
            }
            start(&options, &arguments)
        }
        Some((rank, address)) => rank::run(&options, rank, address),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            println!("FAIL {error:#}");
            ExitCode::from(2)
        }
    }
}

fn parse(arguments: &[String]) -> Result<Option<Options>> {
    let mut options = Options {
        check: false,
        bench: false,
        quick: false,
        ranks: 2,
        limit: Duration::from_secs(120),
        rank: None,
    };
    let mut left = arguments.iter().map(String::as_str);
    while let Some(word) = left.next() {
        let mut value = || left.next().with_context(|| format!("{word} wants a value"));
        match word {
            "check" => options.check = true,
            "bench" => options.bench = true,
            "--quick" => options.quick = true,
            "--ranks" => options.ranks = value()?.parse()?,
            "--limit" => options.limit = Duration::from_secs(value()?.parse()?),
            "--rank" => options.rank = Some((value()?.parse()?, value()?.parse()?)),
            "-h" | "--help" => return Ok(None),
            _ => bail!("{word} is no option; see --help"),
        }
    }
    ensure!((2..=8).contains(&options.ranks), "2 to 8 ranks");
    if !options.check && !options.bench {
        (options.check, options.bench) = (true, true);
    }
    Ok(Some(options))
}

fn start(options: &Options, arguments: &[String]) -> Result<bool> {
    // Another program could take the port before rank 0 listens there, which is unlikely.
    let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
    let ranks = Ranks::start(options.ranks, |rank, command| {
        command
            .args(arguments)
            .args(["--rank", &rank.to_string(), &address.to_string()]);
    })?;
    let ended = ranks.wait(options.limit)?;
    let late = ended.iter().filter(|ended| ended.is_none()).count();
    if late > 0 {
        println!("FAIL given up after {:?}, {late} ranks are not done", options.limit);
        return Ok(false);
    }
    let right = ended.iter().flatten().all(|status| status.success());
    println!("{}", if right { "PASS all" } else { "FAIL not all was right" });
    Ok(right)
}
