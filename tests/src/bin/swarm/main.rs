//! Many processes on one address, every pair connected, and members killed at intervals.
//!
//! `swarm` starts the members, distributes their attributes, kills and evaluates ([`parent`]);
//! `swarm --member INDEX` is one ([`member`]), with a [`link`] to each other, controlled by lines
//! on stdin and stdout. Invariants: no byte is wrong, every queue pair to a killed member fails
//! within its timeout and retries, none to a live member does, and no descriptor, socket, file or
//! port is left.
//!
//! With `--minutes` it is a soak ([`soak`]): the killed are replaced, and there are datagrams, link
//! faults, stopped members, memory pressure, and numbers that wrap.

use std::net::IpAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

mod datagrams;
mod link;
mod member;
mod parent;
mod resources;
mod soak;

const USAGE: &str = "swarm [--processes N] [--bytes BYTES] [--kill-every MS] [--kills N] [--address IP] [--timeout EXPONENT] [--seed N] [--minutes M]";

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    processes: usize,
    /// Bytes that each member moves, over all kinds of requests.
    bytes: u64,
    kill_every: Duration,
    /// Minimum number of kills, even when all traffic is over.
    kills: usize,
    address: IpAddr,
    /// The queue pairs' timeout: 4.096 µs · 2^timeout.
    timeout: u8,
    /// Seed of sizes, kinds and victims.
    seed: u64,
    /// Of a soak.
    soak: Option<Duration>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            processes: 32,
            bytes: 1 << 30,
            kill_every: Duration::from_secs(1),
            kills: 3,
            address: IpAddr::from([127, 0, 32, 1]),
            timeout: 16,
            seed: 1,
            soak: None,
        }
    }
}

/// Retries of a request before its queue pair fails.
pub(crate) const RETRIES: u8 = 6;

impl Plan {
    /// Parses the options; also this process's index when it is a member.
    fn parse(mut args: impl Iterator<Item = String>) -> Result<(Self, Option<usize>)> {
        let (mut plan, mut member) = (Self::default(), None);
        while let Some(name) = args.next() {
            let value = args.next().with_context(|| format!("{name} needs a value"))?;
            let wrong = || format!("{name} {value}");
            match name.as_str() {
                "--processes" => plan.processes = value.parse().with_context(wrong)?,
                "--bytes" => plan.bytes = value.parse().with_context(wrong)?,
                "--kill-every" => plan.kill_every = Duration::from_millis(value.parse().with_context(wrong)?),
                "--kills" => plan.kills = value.parse().with_context(wrong)?,
                "--address" => plan.address = value.parse().with_context(wrong)?,
                "--timeout" => plan.timeout = value.parse().with_context(wrong)?,
                "--seed" => plan.seed = value.parse().with_context(wrong)?,
                "--minutes" => {
                    let minutes: f64 = value.parse().with_context(wrong)?;
                    plan.soak = Some(Duration::try_from_secs_f64(60.0 * minutes).with_context(wrong)?);
                }
                "--member" => member = Some(value.parse().with_context(wrong)?),
                _ => bail!("{name}: no such option"),
            }
        }
        if plan.processes < 2 || plan.kills + 2 > plan.processes || plan.timeout > 31 || plan.kill_every.is_zero() {
            bail!("two members must be left over, the timeout be at most 31, and some time lie between two deaths");
        }
        Ok((plan, member))
    }

    fn to_args(&self) -> Vec<String> {
        let minutes = self
            .soak
            .map(|soak| ("--minutes", (soak.as_secs_f64() / 60.0).to_string()));
        [
            ("--processes", self.processes.to_string()),
            ("--bytes", self.bytes.to_string()),
            ("--kills", self.kills.to_string()),
            ("--address", self.address.to_string()),
            ("--timeout", self.timeout.to_string()),
            ("--seed", self.seed.to_string()),
        ]
        .into_iter()
        .chain(minutes)
        .flat_map(|(name, value)| [name.to_owned(), value])
        .collect()
    }
}

fn main() -> ExitCode {
    let (plan, member) = match Plan::parse(std::env::args().skip(1)) {
        Ok(parsed) => parsed,
        Err(error) => {
            eprintln!("{error:#}\nusage: {USAGE}");
            return ExitCode::from(2);
        }
    };
    let result = match member {
        Some(index) => member::run(&plan, index),
        None => parent::run(&plan),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            match member {
                Some(index) => eprintln!("member {index}: {error:#}"),
                None => eprintln!("swarm: {error:#}"),
            }
            ExitCode::FAILURE
        }
    }
}

/// The bytes of a message: words that differ from those of any other message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern(u64);

impl Pattern {
    pub(crate) fn new(seed: u64, from: usize, to: usize, number: u64) -> Self {
        let mut mixed = seed ^ (from as u64) << 48 ^ (to as u64) << 32 ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self(mixed ^ mixed >> 31)
    }

    fn word(self, index: usize) -> [u8; 8] {
        (self.0 ^ (index as u64).wrapping_mul(0xd6e8_feb8_6659_fd93)).to_le_bytes()
    }

    pub(crate) fn fill(self, bytes: &mut [u8]) {
        for (index, chunk) in bytes.chunks_mut(8).enumerate() {
            chunk.copy_from_slice(&self.word(index)[..chunk.len()]);
        }
    }

    /// The position of the first wrong word.
    pub(crate) fn find_wrong(self, bytes: &[u8]) -> Option<usize> {
        let mut words = bytes.chunks(8).enumerate();
        words
            .find(|(index, chunk)| **chunk != self.word(*index)[..chunk.len()])
            .map(|(index, _)| index * 8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_byte_is_found() {
        let pattern = Pattern::new(1, 2, 3, 4);
        let mut bytes = vec![0; 1003];
        pattern.fill(&mut bytes);
        assert_eq!(pattern.find_wrong(&bytes), None);
        for at in [0, 500, 1002] {
            bytes[at] ^= 1;
            assert_eq!(pattern.find_wrong(&bytes), Some(at / 8 * 8));
            bytes[at] ^= 1;
        }
        assert_eq!(Pattern::new(1, 2, 3, 5).find_wrong(&bytes), Some(0));
    }

    #[test]
    fn the_plan_is_passed_to_a_member() {
        let parse = |args: Vec<String>| Plan::parse(args.into_iter());
        let args = |line: &str| line.split_whitespace().map(str::to_owned).collect();
        let (plan, _) = parse(args("--processes 5 --bytes 77 --address ::1 --seed 9 --minutes 0.5")).unwrap();
        let (parsed, member) = parse([plan.to_args(), args("--member 4")].concat()).unwrap();
        assert_eq!(
            (parsed.processes, parsed.bytes, parsed.seed, parsed.soak, member),
            (5, 77, 9, Some(Duration::from_secs(30)), Some(4))
        );
        for wrong in [
            "--processes 1",
            "--kills 31",
            "--bytes",
            "--size 3",
            "--timeout 32",
            "--minutes -1",
        ] {
            assert!(parse(args(wrong)).is_err(), "{wrong}");
        }
    }
}
