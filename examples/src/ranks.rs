//! Ranks as processes, started by the example itself or by a launcher.

use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::process::{Child, Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use doorbell::Context;
use doorbell::collectives::Rank;
use doorbell::collectives::bootstrap::{BootstrapError, DEFAULT_TIMEOUT, Launch, Rendezvous};

use crate::{Error, report};

const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long ranks may continue after one has failed, to report the failure.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(15);

struct Options {
    ranks: Option<u32>,
    device: String,
}

/// Runs `rank` in each rank. Returns 0, 1 if one has failed, or 2 for bad usage.
pub fn run(about: &str, ranks: u32, rank: fn(&Context) -> Result<(), Error>) -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let (name, args) = args.split_first().map_or(("", &[][..]), |(name, rest)| (name, rest));
    let usage = format!(
        "\
usage: {} [--ranks N] [--device NAME]
{about}
  --ranks N       starts N ranks here (default {ranks}); without it the program is one rank where mpirun, srun or torchrun has started it
  --device NAME   soft0 (default), or a device of the system's such as mlx5_0 or rxe0
Soft devices are on loopback unless DOORBELL_SOFT_ADDR names another address of the machine.",
        name.rsplit('/').next().unwrap_or(name)
    );
    if args.iter().any(|arg| arg == "--help" || arg == "-h") {
        println!("{usage}");
        return ExitCode::SUCCESS;
    }
    let options = match parse(args) {
        Ok(options) => options,
        Err(what) => {
            eprintln!("{what}\n{usage}");
            return ExitCode::from(2);
        }
    };
    report(match (options.ranks, Launch::from_env()) {
        (Some(ranks), _) => start(ranks, &options.device),
        (None, Err(BootstrapError::NotLaunched)) => start(ranks, &options.device),
        (None, Err(error)) => Err(error.into()),
        (None, Ok(_)) => doorbell::open(&options.device)
            .map_err(Error::from)
            .and_then(|device| rank(&device)),
    })
}

fn parse(args: &[String]) -> Result<Options, String> {
    let mut options = Options {
        ranks: None,
        device: "soft0".to_owned(),
    };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--ranks" => {
                let ranks = value()?;
                let some = ranks.parse().ok().filter(|&ranks| ranks > 0);
                options.ranks = Some(some.ok_or_else(|| format!("--ranks {ranks}: it should be a number from 1 up"))?);
            }
            "--device" => value()?.clone_into(&mut options.device),
            _ => return Err(format!("{arg}: no such option")),
        }
    }
    Ok(options)
}

/// Child processes, killed when this is dropped.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            // Fails without effect for one that has exited.
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

/// Starts the ranks on this host with a local rendezvous, and waits until all have exited.
fn start(ranks: u32, device: &str) -> Result<(), Error> {
    let rendezvous = Rendezvous::open(IpAddr::V4(Ipv4Addr::LOCALHOST), ranks)?.spawn(DEFAULT_TIMEOUT)?;
    let program = std::env::current_exe()?;
    let mut children = Ranks(Vec::new());
    for rank in 0..ranks {
        let mut command = Command::new(&program);
        command.envs(Launch::variables(rendezvous.id(), Rank(rank), ranks));
        children.0.push(command.args(["--device", device]).spawn()?);
    }
    // No deadline while all is well: every operation of the ranks has one.
    let mut deadline = None;
    loop {
        let mut running = false;
        for child in &mut children.0 {
            match child.try_wait()? {
                None => running = true,
                Some(status) if !status.success() => {
                    deadline.get_or_insert_with(|| Instant::now() + DRAIN_TIMEOUT);
                }
                Some(_) => {}
            }
        }
        match deadline {
            Some(deadline) if !running || Instant::now() >= deadline => {
                return Err("not all ranks succeeded".into());
            }
            None if !running => return Ok(rendezvous.wait()?),
            _ => thread::sleep(POLL_INTERVAL),
        }
    }
}

/// The part of `total` items that is this rank's: equal parts, or one more for the first ranks.
#[must_use]
pub fn share(total: usize, ranks: u32, rank: Rank) -> Range<usize> {
    let start = |rank: usize| rank * (total / ranks as usize) + rank.min(total % ranks as usize);
    start(rank.index())..start(rank.index() + 1)
}
