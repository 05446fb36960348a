//! `gpu-moe`: dispatch and combine of expert parallelism between GPUs, checked against the plain
//! reference and measured beside copies and all-to-alls of the same bytes. The ranks are threads.
//! Self-contained apart from the driver, so that it can be copied to another machine.

mod bench;
mod check;
#[path = "../../../collectives/tests/gpu/experts/rig.rs"]
mod rig;

use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use doorbell_collectives::bootstrap::Group;
use doorbell_collectives::gpu::{GpuCommunicator, GpuOptions};
use doorbell_collectives::{Communicator, Options as HostOptions};
use doorbell_cuda::Driver;
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_tests::gpu::tool;
use doorbell_verbs::Library;

const USAGE: &str = "\
Check and measure dispatch and combine of expert parallelism on the GPUs of this machine

Usage: gpu-moe [check | bench] [OPTIONS]

Without a word it does both. Ranks are threads of this process, by turns on the GPUs.

Options:
      --ranks N            ranks; as many as GPUs, and 2 at least, if not given
      --experts N          experts of all ranks; 256 if not given
      --blocks N           thread blocks of a launch, at most
      --quick              small shapes
      --limit SECONDS      when it is given up; 170 if not given
  -h, --help               show this

Exit status: 0 if all results were right, 1 if one was wrong or it did not end, 2 for a usage error or a failure, 77 without a GPU.
";

#[derive(Debug)]
pub(crate) struct Options {
    part: Option<Part>,
    ranks: Option<u32>,
    pub(crate) experts: u32,
    blocks: Option<u32>,
    pub(crate) quick: bool,
    limit: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Check,
    Bench,
}

/// How many queues of a GPU streams have, when a context is made.
const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

fn main() -> ExitCode {
    // Ranks of one GPU wait for each other, and must not be behind one another in a queue.
    if std::env::var_os(QUEUES).is_none() {
        let error = std::env::current_exe().map(|program| {
            let arguments = std::env::args_os().skip(1);
            Command::new(program).args(arguments).env(QUEUES, "32").exec()
        });
        println!("FAIL it cannot start itself with {QUEUES}=32: {error:?}");
        return ExitCode::from(2);
    }
    tool::main("gpu-moe", USAGE, parse, run)
}

fn run(driver: Driver, options: &Options) -> Result<bool> {
    let limit = options.limit;
    // A kernel that waits for ever cannot be ended otherwise.
    thread::spawn(move || {
        thread::sleep(limit);
        println!("FAIL not done within {limit:?}");
        std::process::exit(1);
    });
    for device in driver.devices()? {
        println!("{device}: {}", device.name()?);
    }
    let ranks = options.ranks.unwrap_or_else(|| (driver.device_count() as u32).max(2));
    ensure!(
        options.experts.is_multiple_of(ranks),
        "--experts is a multiple of the ranks"
    );
    println!("{ranks} ranks");
    let does = |part| options.part.is_none_or(|only| only == part);
    let barrier = Barrier::new(ranks as usize);
    let shared = bench::Shared::default();
    as_ranks(driver, ranks, options, |gpu| {
        if does(Part::Check) {
            check::run(gpu, options)?;
        }
        if does(Part::Bench) {
            bench::run(gpu, options, &barrier, &shared)?;
        }
        Ok(())
    })?;
    Ok(true)
}

/// Runs `work` as each rank, each in a thread; the first failure aborts the others.
fn as_ranks(
    driver: Driver,
    ranks: u32,
    options: &Options,
    work: impl Fn(&GpuCommunicator) -> Result<()> + Sync,
) -> Result<()> {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    configure(vec![DeviceConfig {
        address: Some(IpAddr::V4(Ipv4Addr::new(127, 112 + high % 8, low, 5))),
        ..DeviceConfig::new("soft0".to_owned())
    }])?;
    let groups = Group::local(ranks)?;
    let rank = |group: Group| -> Result<()> {
        let host = HostOptions {
            calibrate: false,
            ..HostOptions::default()
        };
        let comm = Communicator::new(&[Library::new(api()).open("soft0")?], group, host)?;
        let device = driver.device(comm.rank().index() % driver.device_count())?;
        let gpu_options = GpuOptions {
            blocks: options.blocks,
            ..GpuOptions::default()
        };
        let gpu = GpuCommunicator::new(comm, &device.context()?, gpu_options)?;
        if let Some(reason) = gpu.staged_reason() {
            bail!("the GPUs do not reach each other: {reason}");
        }
        work(&gpu).inspect_err(|error| gpu.abort(&format!("{error:#}")))?;
        gpu.destroy()?;
        Ok(())
    };
    thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(move || rank(group)))
            .collect();
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        for (rank, ended) in ended.into_iter().enumerate() {
            match ended {
                Ok(ended) => ended.with_context(|| format!("rank {rank}"))?,
                Err(_) => bail!("rank {rank} found a wrong result"),
            }
        }
        Ok(())
    })
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Options>> {
    let mut options = Options {
        part: None,
        ranks: None,
        experts: 256,
        blocks: None,
        quick: false,
        limit: Duration::from_secs(170),
    };
    while let Some(argument) = arguments.next() {
        let mut value = || {
            let value = arguments.next().with_context(|| format!("{argument} needs a value"))?;
            value
                .parse::<u32>()
                .with_context(|| format!("{argument} needs a number"))
        };
        match argument.as_str() {
            "check" => options.part = Some(Part::Check),
            "bench" => options.part = Some(Part::Bench),
            "--ranks" => options.ranks = Some(value()?),
            "--experts" => options.experts = value()?,
            "--blocks" => options.blocks = Some(value()?),
            "--quick" => options.quick = true,
            "--limit" => options.limit = Duration::from_secs(value()?.into()),
            "-h" | "--help" => return Ok(None),
            _ => bail!("{argument} is not understood; see --help"),
        }
    }
    ensure!(
        options.ranks.is_none_or(|ranks| (1..=16).contains(&ranks)),
        "1 to 16 ranks"
    );
    Ok(Some(options))
}
