//! Queue pairs that share a receive queue, on any device, through the verbs table: one end of a
//! pair.
//!
//! Each end sends to the other's in order over several queue pairs; every byte and each order is
//! verified. The limit is reached, the queue runs empty (over RC the messages wait), and a queue
//! pair fails while the others continue.

mod end;

use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use doorbell_tests::interop::{Channel, Role};
use doorbell_tests::program::{self, EndOptions, Program};
use doorbell_tests::raw::api_for;

use end::{End, Event};

const INITIAL_RECEIVES: usize = 8;
/// The limit, reached when all but one of the first messages have arrived.
const LIMIT: usize = 3;
const STREAM_MESSAGES: usize = 120;
/// Datagrams in flight at most, so that each finds a receive.
const BATCH: usize = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Transport {
    Rc,
    Ud,
}

#[derive(Clone, Debug)]
struct Config {
    options: EndOptions,
    transport: Transport,
    qps: usize,
}

struct Shared {
    transport: Option<Transport>,
    qps: usize,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            transport: None,
            qps: 3,
        }
    }
}

impl Program for Shared {
    const USAGE: &str = "shared --device NAME --address IP --transport rc|ud (--listen|--connect) IP:PORT [--qps N]";

    fn option(&mut self, name: &str, value: &str) -> Result<bool> {
        match (name, value) {
            ("--transport", "rc") => self.transport = Some(Transport::Rc),
            ("--transport", "ud") => self.transport = Some(Transport::Ud),
            ("--qps", _) => self.qps = value.parse()?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn check(&self) -> Result<()> {
        ensure!(self.transport.is_some(), "--transport is missing");
        ensure!((2..=16).contains(&self.qps), "--qps {}: 2 to 16", self.qps);
        Ok(())
    }

    fn run(self, options: &EndOptions) -> Result<()> {
        run(&Config {
            options: options.clone(),
            transport: self.transport.context("--transport is missing")?,
            qps: self.qps,
        })
    }
}

fn main() -> ExitCode {
    program::main::<Shared>()
}

fn run(config: &Config) -> Result<()> {
    let api = api_for(&config.options.device, Some(config.options.address))?;
    let mut end = End::open(api, config)?;
    let mut channel = Channel::open(config.options.role)?;
    let is_server = matches!(config.options.role, Role::Listen(_));
    channel.exchange_addresses(is_server, &end.addresses(), |theirs| end.connect(theirs))?;
    let mut conversation = Conversation {
        end,
        channel,
        transport: config.transport,
        next: vec![0; config.qps],
        posted: 0,
    };
    for sends in [is_server, !is_server] {
        conversation.next.fill(0);
        conversation.few(sends).context("few messages")?;
        conversation.empty(sends).context("an empty queue")?;
        conversation.stream(sends).context("a stream")?;
    }
    for fails in [is_server, !is_server] {
        conversation.failure(fails).context("a queue pair that fails")?;
    }
    println!(
        "{}: shared receive queue of {} queue pairs over {:?}: every byte verified",
        config.options.device, config.qps, config.transport
    );
    Ok(())
}

struct Conversation {
    end: End,
    channel: Channel,
    transport: Transport,
    /// By queue pair: the number of its next message in this direction.
    next: Vec<u64>,
    /// Receives posted so far; the slots are used round-robin.
    posted: usize,
}

impl Conversation {
    fn post(&mut self, count: usize) -> Result<()> {
        for _ in 0..count {
            self.end.post_receive(self.posted % end::DEPTH)?;
            self.posted += 1;
        }
        Ok(())
    }

    /// Sends `count` messages, round-robin over the queue pairs from `first` on.
    fn send(&mut self, count: usize, first: usize) -> Result<()> {
        for qp in (first..self.next.len()).cycle().take(count) {
            let bytes = message(self.transport, qp, self.next[qp]);
            self.end.send(qp, &bytes)?;
            self.next[qp] += 1;
        }
        Ok(())
    }

    /// Receives and verifies `count` messages; posts another receive for each when `repost`.
    fn receive(&mut self, count: usize, repost: bool) -> Result<()> {
        for _ in 0..count {
            let received = self.end.receive()?;
            let (qp, number) = (received.qp, self.next[received.qp]);
            let expected = message(self.transport, qp, number);
            ensure!(
                received.bytes.len() == expected.len(),
                "message {number} of queue pair {qp} has {} bytes instead of {}",
                received.bytes.len(),
                expected.len()
            );
            let wrong = received
                .bytes
                .iter()
                .zip(&expected)
                .position(|(one, other)| one != other);
            ensure!(
                wrong.is_none(),
                "message {number} of queue pair {qp}: byte {wrong:?} is wrong"
            );
            self.next[qp] += 1;
            self.post(usize::from(repost))?;
        }
        Ok(())
    }

    /// Some messages, until few receives are left and the limit is reached.
    fn few(&mut self, sends: bool) -> Result<()> {
        if !sends {
            self.post(INITIAL_RECEIVES)?;
            self.end.arm(LIMIT as u32)?;
        }
        self.channel.barrier()?;
        let count = INITIAL_RECEIVES - LIMIT + 1;
        if sends {
            self.send(count, 0)?;
        } else {
            self.receive(count, false)?;
            let event = self.end.event()?;
            ensure!(event == Some(Event::Limit), "{event:?} instead of the limit's event");
        }
        self.channel.barrier()
    }

    /// The rest of the receives; and over RC messages without a receive, which wait.
    fn empty(&mut self, sends: bool) -> Result<()> {
        let waiting = match self.transport {
            Transport::Rc => self.next.len(),
            Transport::Ud => 0,
        };
        if sends {
            self.send(LIMIT - 1 + waiting, 0)?;
        } else {
            self.receive(LIMIT - 1, false)?;
            sleep(Duration::from_millis(100));
            ensure!(self.end.poll()?.is_none(), "a message without a receive");
            self.post(INITIAL_RECEIVES)?;
            self.receive(waiting, false)?;
            self.post(waiting)?;
        }
        self.channel.barrier()
    }

    /// Many messages; used receives are reposted.
    fn stream(&mut self, sends: bool) -> Result<()> {
        let batch = match self.transport {
            Transport::Rc => STREAM_MESSAGES,
            Transport::Ud => BATCH,
        };
        for _ in 0..STREAM_MESSAGES / batch {
            if sends {
                self.send(batch, 0)?;
            } else {
                self.receive(batch, true)?;
            }
            self.channel.barrier()?;
        }
        Ok(())
    }

    /// A queue pair fails at one end; the receives stay, and the others continue.
    fn failure(&mut self, fails: bool) -> Result<()> {
        self.next.fill(0);
        if fails {
            self.end.fail(0)?;
        }
        self.channel.barrier()?;
        if fails {
            self.receive(BATCH, true)?;
        } else {
            self.send(BATCH, 1)?;
        }
        self.channel.barrier()
    }
}

/// A message: over RC of one packet or several, at a path MTU of 1024 bytes.
fn message(transport: Transport, qp: usize, number: u64) -> Vec<u8> {
    let lengths: &[usize] = match transport {
        Transport::Rc => &[1, 1024, 0, 1025, end::SIZE, 700, 2048],
        Transport::Ud => &[1, 1024, 0, 1023, 700],
    };
    let len = lengths[number as usize % lengths.len()];
    let seed = number << 8 | qp as u64;
    // A multiplicative hash (Knuth, TAOCP vol 3, 6.4) of the message's identity and the offset.
    let byte = |offset: usize| (seed << 24 | offset as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (0..len).map(|offset| byte(offset) as u8).collect()
}
