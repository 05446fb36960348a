//! An all-reduce that survives the loss of a rank: the others agree on who is left, and go on.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 13_lost_rank -- --ranks 4
//! ```
//!
//! Ranks are processes. One is killed half-way. A round may then be complete on some ranks and have
//! failed on others, so that all go on from the first that failed anywhere.

#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{self, Child, Command, Stdio};
use std::{env, thread, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use doorbell::collectives::bootstrap::{BootstrapError, DEFAULT_TIMEOUT, Launch, Rendezvous};
use doorbell::prelude::*;

const USAGE: &str = "\
usage: 13_lost_rank [--device DEVICE] [--ranks N]
  --device DEVICE   soft0, soft?drop=0.02, or hardware such as mlx5_0; else DOORBELL_DEVICE, or soft0
  --ranks N         the number of ranks, from 2 up (default 4)";
const TIMEOUT: Duration = Duration::from_secs(30);
const ROUNDS: u64 = 20;
const ELEMENTS: u64 = 10_000;
/// The rank that is killed.
const VICTIM: Rank = Rank(1);

fn main() {
    let args: Vec<String> = env::args().skip(1).collect();
    if let Err(error) = run(&args.iter().map(String::as_str).collect::<Vec<_>>()) {
        eprintln!("13_lost_rank: {error}");
        process::exit(1);
    }
}

fn run(args: &[&str]) -> Result<()> {
    let (device, options) = match args {
        ["--device", device, options @ ..] => (Some(*device), options),
        options => (None, options),
    };
    let ranks = match *options {
        ["--help"] => {
            println!("{USAGE}");
            return Ok(());
        }
        [] => 4,
        ["--ranks", ranks] => ranks
            .parse()
            .with_context(|| format!("--ranks {ranks}: it should be a number"))?,
        _ => bail!("{}: no such option; see --help", args.join(" ")),
    };
    match Launch::from_env() {
        Err(BootstrapError::NotLaunched) if ranks < 2 => bail!("--ranks {ranks}: no rank would be left"),
        Err(BootstrapError::NotLaunched) => start(args, ranks),
        _ => rank(&device.map_or_else(doorbell::open_from_env, doorbell::open)?),
    }
}

/// The ranks; none is left when this is dropped.
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

/// Starts the ranks, kills one when it says that it is half-way, and waits for the others.
fn start(args: &[&str], ranks: u32) -> Result<()> {
    let rendezvous = Rendezvous::open(IpAddr::V4(Ipv4Addr::LOCALHOST), ranks)?.spawn(DEFAULT_TIMEOUT)?;
    let mut children = Ranks(Vec::new());
    for rank in (0..ranks).map(Rank) {
        let mut child = Command::new(env::current_exe()?);
        child.args(args).envs(Launch::variables(rendezvous.id(), rank, ranks));
        if rank == VICTIM {
            child.stdout(Stdio::piped());
        }
        children.0.push(child.spawn()?);
    }
    let victim = &mut children.0[VICTIM.index()];
    let said = victim.stdout.take().context("the rank has no output")?;
    BufReader::new(said).read_line(&mut String::new())?;
    victim.kill()?;
    for (rank, child) in (0..).map(Rank).zip(&mut children.0) {
        let status = child.wait()?;
        ensure!(status.success() || rank == VICTIM, "rank {rank} has failed");
    }
    Ok(rendezvous.wait()?)
}

fn rank(device: &Context) -> Result<()> {
    let mut comm = Communicator::from_env(device)?;
    let me = comm.rank();
    let mut left: Vec<u32> = (0..comm.size()).collect();
    let mut round = 0;
    while round < ROUNDS {
        if me == VICTIM && round == ROUNDS / 2 {
            println!("half-way");
            thread::sleep(TIMEOUT);
        }
        let mut sums: Vec<u64> = (0..ELEMENTS).map(|at| at * round + u64::from(me.0)).collect();
        if let Err(error) = comm.all_reduce(&mut sums, ReduceOp::Sum).wait() {
            eprintln!("{error}");
            comm = comm.shrink(TIMEOUT)?;
            left = vec![me.0; comm.size() as usize];
            comm.all_gather(&mut left).wait()?;
            let mut first = [round];
            comm.all_reduce(&mut first, ReduceOp::Min).wait()?;
            [round] = first;
            continue;
        }
        let (ranks, offset) = (left.len() as u64, u64::from(left.iter().sum::<u32>()));
        let right = (0..).zip(&sums).all(|(at, sum)| *sum == at * round * ranks + offset);
        ensure!(right, "round {round}: the sum is not that of ranks {left:?}");
        round += 1;
    }
    println!("rank {me} has finished with ranks {left:?}, every sum right");
    Ok(comm.destroy()?)
}
