//! Queue pairs that share a receive queue, on any device, through the table of verbs: one end of a pair, or a partner for the stock `ibv_srq_pingpong`, whose
//! exchange over TCP it speaks.
//!
//! Both ends have a shared receive queue. Each sends to the other's in turn, over several queue pairs; every byte is verified, and that each queue pair keeps its
//! order. On the way the limit is reached, the queue runs empty (over RC the messages wait, over UD they are not sent), and a queue pair fails while the others go on.

mod end;

use std::process::ExitCode;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use doorbell_tests::interop::Role;
use doorbell_tests::program::{self, Place, Program};
use doorbell_tests::raw::{Rendezvous, Whereabouts, table};

use end::{End, Event};

/// Receives that are posted at first.
const FIRST: usize = 8;
/// The limit: reached when the first message but one has come.
const LIMIT: usize = 3;
/// Messages of the long part.
const STREAM: usize = 120;
/// As many messages of a datagram's stream are on the way at most: each finds a receive.
const LOT: usize = 4;

/// The stock program always says as many lines, whatever its number of queue pairs.
const STOCK_LINES: usize = 256;

/// Which transport.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Transport {
    Rc,
    Ud,
}

/// What an end is given.
#[derive(Clone, Debug)]
struct Config {
    place: Place,
    transport: Transport,
    /// Queue pairs on the queue.
    qps: usize,
    /// The peer is a stock ping-pong: so many messages each way.
    stock: Option<usize>,
}

/// Its options.
struct Shared {
    transport: Option<Transport>,
    qps: usize,
    stock: Option<usize>,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            transport: None,
            qps: 3,
            stock: None,
        }
    }
}

impl Program for Shared {
    const USAGE: &str =
        "shared --device NAME --address IP --transport rc|ud (--listen|--connect) IP:PORT [--qps N] [--stock ROUNDS]";

    fn option(&mut self, name: &str, value: &str) -> Result<bool> {
        match (name, value) {
            ("--transport", "rc") => self.transport = Some(Transport::Rc),
            ("--transport", "ud") => self.transport = Some(Transport::Ud),
            ("--qps", _) => self.qps = value.parse()?,
            ("--stock", _) => self.stock = Some(value.parse()?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn check(&self) -> Result<()> {
        ensure!(self.transport.is_some(), "--transport is missing");
        ensure!((2..=16).contains(&self.qps), "--qps {}: 2 to 16", self.qps);
        Ok(())
    }

    fn run(self, place: &Place) -> Result<()> {
        run(&Config {
            place: place.clone(),
            transport: self.transport.context("--transport is missing")?,
            qps: self.qps,
            stock: self.stock,
        })
    }
}

fn main() -> ExitCode {
    program::main::<Shared>()
}

fn run(config: &Config) -> Result<()> {
    let mut end = End::open(table(&config.place.device, config.place.address)?, config)?;
    let mut rendezvous = Rendezvous::open(config.place.role)?;
    let is_server = matches!(config.place.role, Role::Listen(_));
    if config.stock.is_some() {
        (0..end::DEPTH).try_for_each(|slot| end.post_receive(slot))?;
    }
    let lines = if config.stock.is_some() {
        STOCK_LINES
    } else {
        config.qps
    };
    connect(&mut end, &mut rendezvous, lines, is_server)?;
    if let Some(rounds) = config.stock {
        return ping_pong(&mut end, rounds, is_server);
    }
    let mut talk = Talk {
        end,
        rendezvous,
        transport: config.transport,
        step: 0,
        next: vec![0; config.qps],
        posted: 0,
    };
    for sends in [is_server, !is_server] {
        talk.next.fill(0);
        talk.few(sends).context("few messages")?;
        talk.empty(sends).context("an empty queue")?;
        talk.stream(sends).context("a stream")?;
    }
    for fails in [is_server, !is_server] {
        talk.failure(fails).context("a queue pair that fails")?;
    }
    println!(
        "{}: shared receive queue of {} queue pairs over {:?}: every byte verified",
        config.place.device, config.qps, config.transport
    );
    Ok(())
}

/// Each says where its queue pairs are, in so many lines.
fn connect(end: &mut End, rendezvous: &mut Rendezvous, lines: usize, is_server: bool) -> Result<()> {
    let mut ours = end.whereabouts();
    let nowhere = Whereabouts {
        qpn: 0,
        psn: 0,
        gid: [0; 16],
    };
    ours.resize(lines, nowhere);
    let say = |rendezvous: &mut Rendezvous| ours.iter().try_for_each(|one| rendezvous.say(one));
    if !is_server {
        say(rendezvous)?;
    }
    let theirs = ours.iter().map(|_| rendezvous.hear()).collect::<Result<Vec<_>>>()?;
    end.connect(&theirs[..end.qps()])?;
    if is_server {
        say(rendezvous)?;
        rendezvous.hear_done()
    } else {
        rendezvous.say_done()
    }
}

/// What the stock program does: a message on each queue pair goes to and fro.
fn ping_pong(end: &mut End, rounds: usize, is_server: bool) -> Result<()> {
    let message = vec![0x5a; end::SIZE];
    let mut sent = 0;
    if !is_server {
        for qp in 0..end.qps() {
            end.send(qp, &message)?;
            sent += 1;
        }
    }
    for round in 0..rounds {
        let received = end.receive().with_context(|| format!("message {round} of {rounds}"))?;
        ensure!(received.bytes.len() == end::SIZE, "{} bytes", received.bytes.len());
        end.post_receive(received.slot)?;
        if sent < rounds {
            end.send(received.qp, &message)?;
            sent += 1;
        }
    }
    end.wait_sent_or_left()?;
    // It counts its own messages by their acknowledgements, and may have sent some beyond the count.
    sleep(Duration::from_millis(500));
    println!("{rounds} messages each way with a stock ping-pong");
    Ok(())
}

/// A conversation of two of ours.
struct Talk {
    end: End,
    rendezvous: Rendezvous,
    transport: Transport,
    step: u32,
    /// By queue pair: the number of its next message in this direction.
    next: Vec<u64>,
    /// Receives posted on the way; each place of the buffer has its turn.
    posted: usize,
}

impl Talk {
    /// Waits until the other end is here too.
    fn barrier(&mut self) -> Result<()> {
        self.step += 1;
        let theirs = u32::from_be_bytes(self.rendezvous.swap(self.step.to_be_bytes())?);
        ensure!(theirs == self.step, "out of step: {} here, {theirs} there", self.step);
        Ok(())
    }

    fn post(&mut self, count: usize) -> Result<()> {
        for _ in 0..count {
            self.end.post_receive(self.posted % end::DEPTH)?;
            self.posted += 1;
        }
        Ok(())
    }

    /// Sends `count` messages, in turn over the queue pairs from `first` on.
    fn send(&mut self, count: usize, first: usize) -> Result<()> {
        for qp in (first..self.next.len()).cycle().take(count) {
            let bytes = message(self.transport, qp, self.next[qp]);
            self.end.send(qp, &bytes)?;
            self.next[qp] += 1;
        }
        Ok(())
    }

    /// Receives `count` messages, and verifies each; posts another receive for each when `again`.
    fn receive(&mut self, count: usize, again: bool) -> Result<()> {
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
            self.post(usize::from(again))?;
        }
        Ok(())
    }

    /// Some messages, until few receives are left and the limit is reached.
    fn few(&mut self, sends: bool) -> Result<()> {
        if !sends {
            self.post(FIRST)?;
            self.end.arm(LIMIT as u32)?;
        }
        self.barrier()?;
        let count = FIRST - LIMIT + 1;
        if sends {
            self.send(count, 0)?;
        } else {
            self.receive(count, false)?;
            let event = self.end.event()?;
            ensure!(event == Some(Event::Limit), "{event:?} instead of the limit's event");
        }
        self.barrier()
    }

    /// The rest of the receives; and over RC messages that find none, which wait.
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
            self.post(FIRST)?;
            self.receive(waiting, false)?;
            self.post(waiting)?;
        }
        self.barrier()
    }

    /// Many messages; receives come as they are used.
    fn stream(&mut self, sends: bool) -> Result<()> {
        let lot = match self.transport {
            Transport::Rc => STREAM,
            Transport::Ud => LOT,
        };
        for _ in 0..STREAM / lot {
            if sends {
                self.send(lot, 0)?;
            } else {
                self.receive(lot, true)?;
            }
            self.barrier()?;
        }
        Ok(())
    }

    /// A queue pair fails at one end; the receives stay, and the others go on.
    fn failure(&mut self, fails: bool) -> Result<()> {
        self.next.fill(0);
        if fails {
            self.end.fail(0)?;
        }
        self.barrier()?;
        if fails {
            self.receive(LOT, true)?;
        } else {
            self.send(LOT, 1)?;
        }
        self.barrier()
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
    // A multiplicative hash (Knuth, TAOCP vol 3, 6.4) of which message it is and the offset.
    let byte = |offset: usize| (seed << 24 | offset as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (0..len).map(|offset| byte(offset) as u8).collect()
}
