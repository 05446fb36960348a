//! A ping-pong over UC or UD on any device, through the table of verbs: one end of a pair, or a partner for the stock `ibv_uc_pingpong` and
//! `ibv_ud_pingpong`, whose exchange over TCP it speaks.
//!
//! The client sends a message that differs in every round and at every offset; the server, ours or a stock one, sends back what it has received; and the
//! client verifies every byte. So both directions are seen. Between two of ours, `--write` has UC use RDMA WRITE with immediate instead of SEND. The
//! transports repeat nothing: a message lost fails the run, after some seconds.

mod side;

use std::net::IpAddr;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use doorbell_tests::interop::Role;
use doorbell_tests::raw::{Rendezvous, table};

use side::{Side, Target};

const USAGE: &str = "unreliable --device NAME --address IP --transport uc|ud (--listen|--connect) IP:PORT [--size BYTES] [--rounds N] [--write yes]";

/// Which transport.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Transport {
    Uc,
    Ud,
}

/// What an end is given.
#[derive(Clone, Debug)]
struct Config {
    /// Its device; one whose name begins with `soft` is made here, any other is the system's.
    device: String,
    /// The address of the GID to use. A soft device is bound to it.
    address: IpAddr,
    transport: Transport,
    role: Role,
    /// Bytes of a message.
    size: usize,
    rounds: u32,
    /// UC: RDMA WRITE with immediate instead of SEND.
    write: bool,
}

fn main() -> ExitCode {
    let config = match parse(std::env::args().skip(1)) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("{error:#}\nusage: {USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(&config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error:#}", config.device);
            ExitCode::FAILURE
        }
    }
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Config> {
    let (mut device, mut address, mut transport, mut role) = (None, None, None, None);
    let (mut size, mut rounds, mut write) = (1000, 100, false);
    while let Some(name) = args.next() {
        let value = args.next().with_context(|| format!("{name} needs a value"))?;
        let wrong = || format!("{name} {value}");
        match (name.as_str(), value.as_str()) {
            ("--device", _) => device = Some(value),
            ("--address", _) => address = Some(value.parse().with_context(wrong)?),
            ("--transport", "uc") => transport = Some(Transport::Uc),
            ("--transport", "ud") => transport = Some(Transport::Ud),
            ("--listen", _) => role = Some(Role::Listen(value.parse().with_context(wrong)?)),
            ("--connect", _) => role = Some(Role::Connect(value.parse().with_context(wrong)?)),
            ("--size", _) => size = value.parse().with_context(wrong)?,
            ("--rounds", _) => rounds = value.parse().with_context(wrong)?,
            ("--write", "yes") => write = true,
            _ => bail!("{name} {value}: no such option"),
        }
    }
    let config = Config {
        device: device.context("--device is missing")?,
        address: address.context("--address is missing")?,
        transport: transport.context("--transport is missing")?,
        role: role.context("--listen or --connect is missing")?,
        size,
        rounds,
        write,
    };
    ensure!(!write || config.transport == Transport::Uc, "UD has no RDMA WRITE");
    Ok(config)
}

fn run(config: &Config) -> Result<()> {
    let mut side = Side::open(table(&config.device, config.address)?, config)?;
    let mut rendezvous = Rendezvous::open(config.role)?;
    let is_server = matches!(config.role, Role::Listen(_));
    if is_server {
        let theirs = rendezvous.hear()?;
        side.connect(&theirs)?;
        rendezvous.say(&side.whereabouts())?;
        rendezvous.hear_done()?;
    } else {
        rendezvous.say(&side.whereabouts())?;
        let theirs = rendezvous.hear()?;
        side.connect(&theirs)?;
        rendezvous.say_done()?;
    }
    let target = if config.write {
        Some(Target::from_bytes(rendezvous.swap(side.target().to_bytes())?))
    } else {
        None
    };
    for round in 0..config.rounds {
        let exchanged = if is_server {
            answer(&mut side, target)
        } else {
            ask(&mut side, target, round)
        };
        exchanged.with_context(|| format!("round {round} of {}", config.rounds))?;
    }
    println!(
        "{}: {} messages of {} bytes over {:?} each way{}",
        config.device,
        config.rounds,
        config.size,
        config.transport,
        if is_server { "" } else { ", every byte verified" }
    );
    Ok(())
}

fn ask(side: &mut Side, target: Option<Target>, round: u32) -> Result<()> {
    let sent: Vec<u8> = (0..side.size()).map(|offset| pattern(round, offset)).collect();
    side.send(&sent, target)?;
    let received = side.receive()?;
    let wrong = sent.iter().zip(&received).position(|(sent, received)| sent != received);
    match wrong {
        None if sent.len() == received.len() => Ok(()),
        None => bail!("{} bytes came back of {}", received.len(), sent.len()),
        Some(at) => bail!("byte {at} is {:#04x} instead of {:#04x}", received[at], sent[at]),
    }
}

fn answer(side: &mut Side, target: Option<Target>) -> Result<()> {
    let received = side.receive()?;
    side.send(&received, target)
}

/// A multiplicative hash (Knuth, TAOCP vol 3, 6.4) of round and offset.
fn pattern(round: u32, offset: usize) -> u8 {
    let mixed = (u64::from(round) << 32 | offset as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 40) as u8
}
