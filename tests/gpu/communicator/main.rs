//! `gpu-communicator`: communicators between processes, each with a GPU, on the soft device: memory
//! allocated elsewhere, many communicators, a killed rank. Self-contained apart from the driver, so
//! that it can be copied to another machine.

mod check;
#[path = "../../../collectives/tests/gpu/gpus.rs"]
mod gpus;
mod kill;
mod leaks;

use std::net::{IpAddr, Ipv4Addr};
use std::process::{Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use doorbell_collectives::bootstrap::{DEFAULT_TIMEOUT, Launch, Rendezvous, RendezvousServer};
use doorbell_collectives::gpu::GpuOptions;
use doorbell_collectives::{Communicator, Rank};
use doorbell_cuda::Driver;
use doorbell_tests::gpu::ranks::{Ranks, soft_device};

const USAGE: &str = "\
Check communicators of GPUs between processes

Usage: gpu-communicator [check | leaks | kill] [OPTIONS]

Without a word it does all three, among as many processes as --ranks says, each with a GPU of its own where there are so many.

  check                    every collective on memory that cuMemAlloc has made, on such and other memory at once, and on parts of one allocation, registered with the other ranks
  leaks                    what is left of many communicators, one after another: memory of the GPUs, descriptors, mappings
  kill                     a rank is killed under load, and while others' kernels and copies wait for it

Options:
      --ranks N            how many processes: as many as GPUs, and 2 at least, if not given
      --communicators N    leaks: how many; 1000 if not given
      --use-every N        leaks: of how many communicators one does something; 1, all, if not given
      --quick              few cases, 50 communicators
      --limit SECONDS      when a part is given up: 120, if not given
  -h, --help               show this

Exit status: 0 if all checks passed, 1 if one failed, 2 for a usage error or a failure, 77 without a GPU.
";

#[derive(Debug, Clone)]
pub(crate) struct Options {
    parts: Vec<Part>,
    pub(crate) ranks: u32,
    pub(crate) communicators: u32,
    pub(crate) use_every: u32,
    pub(crate) quick: bool,
    pub(crate) limit: Duration,
    /// For a rank of [`Part::Kill`].
    kill_mode: Option<kill::KillMode>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Check,
    Leaks,
    Kill,
}

impl Part {
    const ALL: [Self; 3] = [Self::Check, Self::Leaks, Self::Kill];

    fn name(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Leaks => "leaks",
            Self::Kill => "kill",
        }
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(status) => status,
        Err(error) => {
            println!("FAIL {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(mut options) = parse(&arguments)? else {
        print!("{USAGE}");
        return Ok(ExitCode::SUCCESS);
    };
    if std::env::var_os("DOORBELL_RANK").is_some() {
        rank(&options)?;
        return Ok(ExitCode::SUCCESS);
    }
    let driver = match Driver::load() {
        Ok(driver) => driver,
        Err(absent) => {
            println!("nothing to do: {absent}");
            return Ok(ExitCode::from(77));
        }
    };
    if options.ranks == 0 {
        options.ranks = u32::try_from(driver.device_count())?.clamp(2, 8);
    }
    let name = driver.device(0)?.name()?;
    println!("{} ranks, {} GPUs, {name}", options.ranks, driver.device_count());
    let mut right = true;
    for part in &options.parts {
        right &= match part {
            Part::Kill => kill::run(&options)?,
            part => report_exits(part.name(), options.limit, start(&options, part.name(), |_, _| ())?)?,
        };
    }
    Ok(ExitCode::from(u8::from(!right)))
}

/// Starts all ranks of a part, each configured by `set`; also returns their rendezvous.
pub(crate) fn start(
    options: &Options,
    part: &str,
    set: impl Fn(u32, &mut Command),
) -> Result<(Ranks, RendezvousServer)> {
    let serving = Rendezvous::open(IpAddr::V4(Ipv4Addr::LOCALHOST), options.ranks)?.spawn(DEFAULT_TIMEOUT)?;
    let ranks = Ranks::start(options.ranks, |rank, command| {
        command
            .arg(part)
            .args(["--ranks", &options.ranks.to_string()])
            .args(["--communicators", &options.communicators.to_string()])
            .args(["--use-every", &options.use_every.to_string()])
            .args(options.quick.then_some("--quick"))
            .envs(Launch::variables(serving.id(), Rank(rank), options.ranks));
        set(rank, command);
    })?;
    Ok((ranks, serving))
}

/// Waits for ranks that should all succeed, and reports their exit statuses.
fn report_exits(part: &str, limit: Duration, (ranks, _serving): (Ranks, RendezvousServer)) -> Result<bool> {
    let started = Instant::now();
    let ended = ranks.wait(limit)?;
    let right = ended.iter().all(|status| status.is_some_and(|status| status.success()));
    if right {
        println!("PASS {part}: {:.1} s", started.elapsed().as_secs_f64());
    } else {
        println!("FAIL {part}: {}", exit_statuses(&ended));
    }
    Ok(right)
}

pub(crate) fn exit_statuses(ended: &[Option<ExitStatus>]) -> String {
    let exit_statuses = ended.iter().enumerate().map(|(rank, ended)| match ended {
        Some(status) => format!("rank {rank}: {status}"),
        None => format!("rank {rank}: did not end in time"),
    });
    exit_statuses.collect::<Vec<_>>().join(", ")
}

fn rank(options: &Options) -> Result<()> {
    let driver = Driver::load()?;
    let launch = Launch::from_env()?;
    let context = gpus::gpu(driver, launch.rank);
    let device = soft_device()?;
    let host = doorbell_collectives::Options {
        calibrate: false,
        deadline: kill::DEADLINE,
        ..doorbell_collectives::Options::default()
    };
    let comm = Communicator::from_env_with(&[device], host)?;
    match (options.parts.first(), options.kill_mode) {
        (Some(Part::Check), _) => check::run(options, comm, &context),
        (Some(Part::Leaks), _) => leaks::run(options, &comm, &context),
        (Some(Part::Kill), Some(kill_mode)) => kill::rank(options, comm, &context, kill_mode),
        _ => bail!("a rank has a part"),
    }
}

/// The default options except for the executor; little memory for quick runs.
pub(crate) fn gpu_options(options: &Options) -> GpuOptions {
    if options.quick {
        gpus::small()
    } else {
        GpuOptions::default()
    }
}

fn parse(arguments: &[String]) -> Result<Option<Options>> {
    let mut options = Options {
        parts: Vec::new(),
        ranks: 0,
        communicators: 1000,
        use_every: 1,
        quick: false,
        limit: Duration::from_secs(120),
        kill_mode: None,
    };
    let mut left = arguments.iter().map(String::as_str);
    while let Some(word) = left.next() {
        let mut value = || left.next().with_context(|| format!("{word} wants a value"));
        match word {
            "--ranks" => options.ranks = value()?.parse()?,
            "--communicators" => options.communicators = value()?.parse()?,
            "--use-every" => options.use_every = value()?.parse()?,
            "--quick" => (options.quick, options.communicators) = (true, options.communicators.min(50)),
            "--limit" => options.limit = Duration::from_secs(value()?.parse()?),
            "--fate" => options.kill_mode = Some(value()?.parse()?),
            "-h" | "--help" => return Ok(None),
            _ => match Part::ALL.into_iter().find(|part| part.name() == word) {
                Some(part) => options.parts.push(part),
                None => bail!("{word} is no option; see --help"),
            },
        }
    }
    ensure!(options.ranks == 0 || (2..=8).contains(&options.ranks), "2 to 8 ranks");
    ensure!(options.use_every > 0, "--use-every is 1 at least");
    if options.parts.is_empty() {
        options.parts.extend(Part::ALL);
    }
    Ok(Some(options))
}
