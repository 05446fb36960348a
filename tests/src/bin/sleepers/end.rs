//! One end: a thread for each conversation. It prints `endpoints …`, reads the peer's, prints
//! `ready` and reads `go`; the initiator finally reports the rounds, the slowest, and how many
//! stalled.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_tests::attributes::{decode, encode, print_line};
use doorbell_verbs::{
    Buffer, CompletionQueue, Library, Local, PeerWrite, PreparedQueuePair, ProtectionDomain, QueuePair,
    ReliableConnection, Remote, Success, WriteAccess,
};

use crate::{Plan, Role};

/// Bytes of most messages; the first byte marks the last message.
const SHORT: usize = 64;
/// Two fill a shm ring's bulk area, so that a sender waits for free space.
const LONG: usize = 512 << 10;
/// The timeout that most programs set, 14: a slower round would cost them a retry. On a busy
/// machine runnable threads wait as long.
const DEFAULT_TIMEOUT: Duration = Duration::from_nanos(4096 << 14);
const TIMEOUT: Duration = Duration::from_secs(60);
/// The longest of most pauses, in nanoseconds: the progress thread spins for 200 µs.
const SHORT_PAUSE: u64 = 400_000;
const LONG_PAUSE: u64 = 3_000_000;

struct Unconnected {
    prepared: PreparedQueuePair<ReliableConnection>,
    cq: CompletionQueue,
    inbox: Buffer<PeerWrite>,
}

struct Conversation {
    qp: QueuePair,
    cq: CompletionQueue,
    /// The peer writes here, even while this end sleeps.
    _inbox: Buffer<PeerWrite>,
    theirs: Remote<WriteAccess>,
    /// The message to send, unless it is in flight.
    message: Option<Buffer<Local>>,
    received: Option<Buffer<Local>>,
    rng: u64,
}

#[derive(Clone, Copy, Default)]
struct Statistics {
    rounds: u64,
    slowest: Duration,
    /// Rounds longer than [`DEFAULT_TIMEOUT`].
    late: u64,
    stalls: u64,
}

/// Runs an end; fails when a request fails, a message is wrong, or the peer is gone.
pub(crate) fn run(plan: &Plan, role: Role) -> Result<()> {
    let [mut config] = <[DeviceConfig; 1]>::try_from(DeviceConfig::from_env()?)
        .map_err(|devices| anyhow::anyhow!("one device is enough, and not {}", devices.len()))?;
    config.address = Some(plan.address);
    configure(vec![config])?;
    let pd = Library::new(api()).open("soft0")?.protection_domain()?;
    let unconnected: Vec<_> = (0..plan.conversations)
        .map(|_| Unconnected::new(plan, &pd))
        .collect::<Result<_>>()?;
    let endpoints: Vec<_> = unconnected.iter().map(Unconnected::endpoint_info).collect();
    print_line(&format!("endpoints {}", endpoints.join(" ")))?;
    let line = read_line()?;
    let endpoints = line.split(' ');
    let conversations: Vec<_> = (0..)
        .zip(unconnected.into_iter().zip(endpoints))
        .map(|(index, (one, endpoint_info))| one.connect(plan, role, &pd, index, endpoint_info))
        .collect::<Result<_>>()?;
    ensure!(
        conversations.len() == plan.conversations,
        "endpoint information is missing"
    );
    print_line("ready")?;
    ensure!(read_line()? == "go", "expected go");
    let end = Instant::now() + plan.time;
    let results: Vec<Result<Statistics>> = thread::scope(|scope| {
        let threads: Vec<_> = conversations
            .into_iter()
            .map(|mut one| {
                scope.spawn(move || match role {
                    Role::Initiator => one.initiate(plan, end),
                    Role::Responder => one.respond().map(|()| Statistics::default()),
                })
            })
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .map(|result| result.unwrap_or_else(|_| bail!("a conversation panicked")))
            .collect()
    });
    let mut all = Statistics::default();
    for statistics in results {
        let statistics = statistics?;
        all.rounds += statistics.rounds;
        all.slowest = all.slowest.max(statistics.slowest);
        all.late += statistics.late;
        all.stalls += statistics.stalls;
    }
    if role == Role::Initiator {
        let Statistics {
            rounds, late, stalls, ..
        } = all;
        let slowest = all.slowest.as_secs_f64() * 1e3;
        print_line(&format!(
            "rounds {rounds}, slowest {slowest:.1} ms, {late} beyond 67 ms, {stalls} stalls"
        ))?;
    }
    Ok(())
}

impl Unconnected {
    fn new(plan: &Plan, pd: &ProtectionDomain) -> Result<Self> {
        let context = pd.context();
        let channel = context.completion_channel()?;
        let cq = context.completion_queue_on(&channel, 16)?;
        let builder = pd.queue_pair(&cq).max_send_wr(4).max_recv_wr(4).signal_all();
        let builder = builder.allow_remote_write().timeout(plan.timeout).retry_count(7);
        Ok(Self {
            prepared: builder.rc()?,
            cq,
            inbox: pd.register(vec![0; LONG], PeerWrite)?,
        })
    }

    fn endpoint_info(&self) -> String {
        encode(&self.prepared.endpoint(), &self.inbox.remote())
    }

    fn connect(
        self,
        plan: &Plan,
        role: Role,
        pd: &ProtectionDomain,
        index: u64,
        endpoint_info: &str,
    ) -> Result<Conversation> {
        let (peer, theirs) = decode(endpoint_info)?;
        let mut qp = self.prepared.connect(&peer)?;
        qp.receive(buffer(pd)?)?;
        let side = if role == Role::Initiator { 1 } else { 2 };
        Ok(Conversation {
            qp,
            cq: self.cq,
            _inbox: self.inbox,
            theirs,
            message: Some(buffer(pd)?),
            received: None,
            // Never 0: xorshift stays at 0.
            rng: (plan.seed << 16 | index << 2 | side).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        })
    }
}

impl Conversation {
    /// A round is a message that is answered, or a WRITE, which is not; the last one is marked.
    fn initiate(&mut self, plan: &Plan, end: Instant) -> Result<Statistics> {
        let mut statistics = Statistics::default();
        let mut last = false;
        while !last {
            self.pause();
            last = Instant::now() > end;
            let began = Instant::now();
            let mut message = self.message.take().context("no message is left")?;
            message[0] = u8::from(last);
            let len = self.random_len();
            if last || !self.random().is_multiple_of(3) {
                self.qp.post(|batch| drop(batch.send(message.part(..len))))?;
                ensure!(self.receive()? == last, "an answer to something else");
            } else {
                let to = self.theirs.slice(0, len as u64).context("the inbox is too short")?;
                self.qp.post(|batch| drop(batch.write(message.part(..len), to)))?;
            }
            while self.message.is_none() {
                self.sleep()?;
            }
            let took = began.elapsed();
            statistics.rounds += 1;
            statistics.slowest = statistics.slowest.max(took);
            statistics.late += u64::from(took > DEFAULT_TIMEOUT);
            if took > plan.stalled() {
                statistics.stalls += 1;
                eprintln!("sleepers: round {} took {took:?}", statistics.rounds);
            }
        }
        Ok(statistics)
    }

    fn respond(&mut self) -> Result<()> {
        let mut last = false;
        while !last {
            last = self.receive()?;
            self.pause();
            let mut answer = self.message.take().context("no message is left")?;
            answer[0] = u8::from(last);
            let len = self.random_len();
            self.qp.post(|batch| drop(batch.send(answer.part(..len))))?;
            while self.message.is_none() {
                self.sleep()?;
            }
        }
        Ok(())
    }

    /// Sleeps until a message has arrived; returns whether it is the last.
    fn receive(&mut self) -> Result<bool> {
        loop {
            if let Some(buffer) = self.received.take() {
                let last = buffer[0] == 1;
                self.qp.receive(buffer)?;
                return Ok(last);
            }
            self.sleep()?;
        }
    }

    /// Sleeps until something completes. A message may arrive before our own send completes.
    fn sleep(&mut self) -> Result<()> {
        let mut some = false;
        for mut done in self.cq.wait(TIMEOUT)? {
            some = true;
            let success = done.result().map_err(|failure| anyhow::anyhow!("{failure}"))?;
            let buffer = done.take::<Local>().context("a completion without its buffer")?;
            let destination = match success {
                Success::Receive { .. } => &mut self.received,
                _ => &mut self.message,
            };
            ensure!(destination.replace(buffer).is_none(), "more completions than requests");
        }
        ensure!(some, "not woken for {TIMEOUT:?}");
        Ok(())
    }

    /// No pause, one about as long as the progress thread spins, or longer; sleeps are inexact.
    fn pause(&mut self) {
        let pause = match self.random() % 8 {
            0 | 1 => return,
            2..7 => self.random() % SHORT_PAUSE,
            _ => self.random() % LONG_PAUSE,
        };
        thread::sleep(Duration::from_nanos(pause));
    }

    fn random_len(&mut self) -> usize {
        if self.random().is_multiple_of(16) { LONG } else { SHORT }
    }

    fn random(&mut self) -> u64 {
        // xorshift64*.
        self.rng ^= self.rng >> 12;
        self.rng ^= self.rng << 25;
        self.rng ^= self.rng >> 27;
        self.rng.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    }
}

fn buffer(pd: &ProtectionDomain) -> Result<Buffer<Local>> {
    Ok(pd.register(vec![0; LONG], Local)?)
}

fn read_line() -> Result<String> {
    let mut line = String::new();
    io::stdin().read_line(&mut line)?;
    Ok(line.trim().to_owned())
}
