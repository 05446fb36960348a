//! A ping-pong over UC or UD on any device, through the table of verbs: one end of a pair, or a partner for the stock `ibv_uc_pingpong` and
//! `ibv_ud_pingpong`, whose exchange over TCP it speaks.
//!
//! The client sends a message that differs in every round and at every offset; the server, ours or a stock one, sends back what it has received; and the
//! client verifies every byte. So both directions are seen. Between two of ours, `--write` has UC use RDMA WRITE with immediate instead of SEND. The
//! transports repeat nothing: a message lost fails the run, after some seconds.

mod side;

use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use doorbell_tests::interop::Role;
use doorbell_tests::program::{self, Place, Program};
use doorbell_tests::raw::{Rendezvous, table};

use side::{Side, Target};

/// Which transport.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Transport {
    Uc,
    Ud,
}

/// What an end is given.
#[derive(Clone, Debug)]
struct Config {
    place: Place,
    transport: Transport,
    /// Bytes of a message.
    size: usize,
    rounds: u32,
    /// UC: RDMA WRITE with immediate instead of SEND.
    write: bool,
}

/// Its options.
struct Unreliable {
    transport: Option<Transport>,
    size: usize,
    rounds: u32,
    write: bool,
}

impl Default for Unreliable {
    fn default() -> Self {
        Self {
            transport: None,
            size: 1000,
            rounds: 100,
            write: false,
        }
    }
}

impl Program for Unreliable {
    const USAGE: &str = "unreliable --device NAME --address IP --transport uc|ud (--listen|--connect) IP:PORT [--size BYTES] [--rounds N] [--write yes]";

    fn option(&mut self, name: &str, value: &str) -> Result<bool> {
        match (name, value) {
            ("--transport", "uc") => self.transport = Some(Transport::Uc),
            ("--transport", "ud") => self.transport = Some(Transport::Ud),
            ("--size", _) => self.size = value.parse()?,
            ("--rounds", _) => self.rounds = value.parse()?,
            ("--write", "yes") => self.write = true,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn check(&self) -> Result<()> {
        let transport = self.transport.context("--transport is missing")?;
        ensure!(!self.write || transport == Transport::Uc, "UD has no RDMA WRITE");
        Ok(())
    }

    fn run(self, place: &Place) -> Result<()> {
        run(&Config {
            place: place.clone(),
            transport: self.transport.context("--transport is missing")?,
            size: self.size,
            rounds: self.rounds,
            write: self.write,
        })
    }
}

fn main() -> ExitCode {
    program::main::<Unreliable>()
}

fn run(config: &Config) -> Result<()> {
    let mut side = Side::open(table(&config.place.device, config.place.address)?, config)?;
    let mut rendezvous = Rendezvous::open(config.place.role)?;
    let is_server = matches!(config.place.role, Role::Listen(_));
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
        config.place.device,
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
