//! A ping-pong over UC or UD on any device, through the verbs table: one end of a pair. The server
//! echoes messages that differ at every offset; the client verifies them. `--write` uses RDMA WRITE
//! with immediate on UC. A lost message fails the run after some seconds.

mod end;

use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use doorbell_tests::interop::{Channel, Role};
use doorbell_tests::program::{self, EndOptions, Program};
use doorbell_tests::raw::api_for;

use end::{End, Target};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Transport {
    Uc,
    Ud,
}

#[derive(Clone, Debug)]
struct Config {
    options: EndOptions,
    transport: Transport,
    size: usize,
    rounds: u32,
    /// UC: RDMA WRITE with immediate instead of SEND.
    write: bool,
}

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

    fn run(self, options: &EndOptions) -> Result<()> {
        run(&Config {
            options: options.clone(),
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
    let api = api_for(&config.options.device, Some(config.options.address))?;
    let mut end = End::open(api, config)?;
    let mut channel = Channel::open(config.options.role)?;
    let is_server = matches!(config.options.role, Role::Listen(_));
    channel.exchange_addresses(is_server, &[end.address()], |theirs| end.connect(&theirs[0]))?;
    let target = if config.write {
        Some(Target::from_bytes(channel.exchange(end.target().to_bytes())?))
    } else {
        None
    };
    for round in 0..config.rounds {
        let exchanged = if is_server {
            pong(&mut end, target)
        } else {
            ping(&mut end, target, round)
        };
        exchanged.with_context(|| format!("round {round} of {}", config.rounds))?;
    }
    println!(
        "{}: {} messages of {} bytes over {:?} each way{}",
        config.options.device,
        config.rounds,
        config.size,
        config.transport,
        if is_server { "" } else { ", every byte verified" }
    );
    Ok(())
}

fn ping(end: &mut End, target: Option<Target>, round: u32) -> Result<()> {
    let sent: Vec<u8> = (0..end.size()).map(|offset| pattern(round, offset)).collect();
    end.send(&sent, target)?;
    let received = end.receive()?;
    let wrong = sent.iter().zip(&received).position(|(sent, received)| sent != received);
    match wrong {
        None if sent.len() == received.len() => Ok(()),
        None => bail!("{} bytes came back of {}", received.len(), sent.len()),
        Some(at) => bail!("byte {at} is {:#04x} instead of {:#04x}", received[at], sent[at]),
    }
}

fn pong(end: &mut End, target: Option<Target>) -> Result<()> {
    let received = end.receive()?;
    end.send(&received, target)
}

/// A multiplicative hash (Knuth, TAOCP vol 3, 6.4) of round and offset.
fn pattern(round: u32, offset: usize) -> u8 {
    let mixed = (u64::from(round) << 32 | offset as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 40) as u8
}
