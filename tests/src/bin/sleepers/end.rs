//! One end: a thread for each conversation.
//!
//! It says `cards …`, is told those of the other end, says `ready`, and is told `go`. The near end says at last how many rounds there were, the slowest of them, and how many stalled.

use std::io::{self, Write as _};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::{
    Buffer, CompletionQueue, Endpoint, Library, Local, PreparedQueuePair, ProtectionDomain, QueuePair, Rc, Remote,
    RemoteWrite, Success, Write,
};

use crate::{Plan, Role};

/// Bytes of most messages; the first says whether it is the last.
const SHORT: usize = 64;
/// Bytes of the others: two of them fill a lane's bulk area, and whoever wants to send waits for room.
const LONG: usize = 512 << 10;
/// The timeout that most programs set, 14: what takes longer would cost them a retry. On a busy machine threads that are to run wait as long.
const USUAL: Duration = Duration::from_nanos(4096 << 14);
/// Longer than any stall that ends.
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest of most pauses: the progress thread spins for 200 µs.
const PAUSE: u64 = 400_000;
/// The longest of the others, in nanoseconds.
const LONG_PAUSE: u64 = 3_000_000;

/// What is known before the other end is.
struct Unconnected {
    prepared: PreparedQueuePair<Rc>,
    cq: CompletionQueue,
    inbox: Buffer<RemoteWrite>,
}

/// A conversation.
struct Conversation {
    qp: QueuePair,
    cq: CompletionQueue,
    /// Where the other end writes to, who may be asleep then.
    _inbox: Buffer<RemoteWrite>,
    theirs: Remote<Write>,
    /// What to send, unless it is under way.
    message: Option<Buffer<Local>>,
    /// What was received, until it is looked at.
    received: Option<Buffer<Local>>,
    random: u64,
}

/// What the near end saw.
#[derive(Clone, Copy, Default)]
struct Seen {
    rounds: u64,
    slowest: Duration,
    /// Took longer than [`USUAL`].
    late: u64,
    stalls: u64,
}

/// Is an end.
///
/// # Errors
/// When a request fails, a message is wrong, or the other end is not there.
pub(crate) fn run(plan: &Plan, role: Role) -> Result<()> {
    let [mut config] = <[DeviceConfig; 1]>::try_from(DeviceConfig::from_env()?)
        .map_err(|devices| anyhow::anyhow!("one device is enough, and not {}", devices.len()))?;
    config.address = Some(plan.address);
    configure(vec![config])?;
    let pd = Library::new(api()).open("soft0")?.protection_domain()?;
    let unconnected: Vec<_> = (0..plan.conversations)
        .map(|_| Unconnected::new(plan, &pd))
        .collect::<Result<_>>()?;
    let cards: Vec<_> = unconnected.iter().map(Unconnected::card).collect();
    say(&format!("cards {}", cards.join(" ")))?;
    let told = command()?;
    let cards = told.split(' ');
    let conversations: Vec<_> = (0..)
        .zip(unconnected.into_iter().zip(cards))
        .map(|(index, (one, card))| one.connect(plan, role, &pd, index, card))
        .collect::<Result<_>>()?;
    ensure!(conversations.len() == plan.conversations, "a card is missing");
    say("ready")?;
    ensure!(command()? == "go", "not told to go");
    let end = Instant::now() + plan.time;
    let results: Vec<Result<Seen>> = thread::scope(|scope| {
        let threads: Vec<_> = conversations
            .into_iter()
            .map(|mut one| {
                scope.spawn(move || match role {
                    Role::Near => one.ask(plan, end),
                    Role::Far => one.answer().map(|()| Seen::default()),
                })
            })
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .map(|result| result.unwrap_or_else(|_| bail!("a conversation panicked")))
            .collect()
    });
    let mut all = Seen::default();
    for seen in results {
        let seen = seen?;
        all.rounds += seen.rounds;
        all.slowest = all.slowest.max(seen.slowest);
        all.late += seen.late;
        all.stalls += seen.stalls;
    }
    if role == Role::Near {
        let Seen {
            rounds, late, stalls, ..
        } = all;
        let slowest = all.slowest.as_secs_f64() * 1e3;
        say(&format!(
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
        let builder = pd.queue_pair(&cq).send_depth(4).recv_depth(4).signal_all();
        let builder = builder.allow_remote_write().timeout(plan.timeout).retry_count(7);
        Ok(Self {
            prepared: builder.rc()?,
            cq,
            inbox: pd.register(vec![0; LONG], RemoteWrite)?,
        })
    }

    /// What the other end has to know, in hexadecimal.
    fn card(&self) -> String {
        let bytes = [
            &self.prepared.endpoint().to_bytes()[..],
            &self.inbox.remote().to_bytes()[..],
        ];
        bytes.concat().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn connect(self, plan: &Plan, role: Role, pd: &ProtectionDomain, index: u64, card: &str) -> Result<Conversation> {
        let bytes: Vec<u8> = (0..card.len() / 2)
            .map(|at| {
                card.get(2 * at..2 * at + 2)
                    .and_then(|digits| u8::from_str_radix(digits, 16).ok())
            })
            .collect::<Option<_>>()
            .context("a card that is not hexadecimal")?;
        let (endpoint, remote) = bytes.split_first_chunk().context("a card too short")?;
        let theirs = Remote::from_bytes(remote.try_into().context("a card of the wrong length")?)?;
        let mut qp = self.prepared.connect(&Endpoint::from_bytes(endpoint)?)?;
        qp.receive(buffer(pd)?)?;
        let side = if role == Role::Near { 1 } else { 2 };
        Ok(Conversation {
            qp,
            cq: self.cq,
            _inbox: self.inbox,
            theirs,
            message: Some(buffer(pd)?),
            received: None,
            // Never 0, of which nothing but 0 comes.
            random: (plan.seed << 16 | index << 2 | side).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        })
    }
}

impl Conversation {
    /// Begins rounds until the time is over, and says so in the last: a message that is answered, or a WRITE, of which the other end's application hears nothing.
    fn ask(&mut self, plan: &Plan, end: Instant) -> Result<Seen> {
        let mut seen = Seen::default();
        let mut last = false;
        while !last {
            self.pause();
            last = Instant::now() > end;
            let began = Instant::now();
            let mut message = self.message.take().context("no message is left")?;
            message[0] = u8::from(last);
            let len = self.draw_len();
            if last || !self.draw().is_multiple_of(3) {
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
            seen.rounds += 1;
            seen.slowest = seen.slowest.max(took);
            seen.late += u64::from(took > USUAL);
            if took > plan.stalled() {
                seen.stalls += 1;
                eprintln!("sleepers: round {} took {took:?}", seen.rounds);
            }
        }
        Ok(seen)
    }

    /// Answers until told that it was the last.
    fn answer(&mut self) -> Result<()> {
        let mut last = false;
        while !last {
            last = self.receive()?;
            self.pause();
            let mut answer = self.message.take().context("no message is left")?;
            answer[0] = u8::from(last);
            let len = self.draw_len();
            self.qp.post(|batch| drop(batch.send(answer.part(..len))))?;
            while self.message.is_none() {
                self.sleep()?;
            }
        }
        Ok(())
    }

    /// Sleeps until a message is there, and says whether it is the last.
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

    /// Sleeps until something completes. A message may come before what was posted is known to have gone.
    fn sleep(&mut self) -> Result<()> {
        let mut some = false;
        for mut done in self.cq.wait(PATIENCE)? {
            some = true;
            let success = done.result().map_err(|failure| anyhow::anyhow!("{failure}"))?;
            let buffer = done.take::<Local>().context("a completion without its buffer")?;
            let place = match success {
                Success::Receive { .. } => &mut self.received,
                _ => &mut self.message,
            };
            ensure!(place.replace(buffer).is_none(), "more completions than requests");
        }
        ensure!(some, "not woken for {PATIENCE:?}");
        Ok(())
    }

    /// None, one about as long as the progress thread spins, or a longer one; none of those that sleep is exact.
    fn pause(&mut self) {
        let pause = match self.draw() % 8 {
            0 | 1 => return,
            2..7 => self.draw() % PAUSE,
            _ => self.draw() % LONG_PAUSE,
        };
        thread::sleep(Duration::from_nanos(pause));
    }

    fn draw_len(&mut self) -> usize {
        if self.draw().is_multiple_of(16) { LONG } else { SHORT }
    }

    fn draw(&mut self) -> u64 {
        // xorshift64*.
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    }
}

fn buffer(pd: &ProtectionDomain) -> Result<Buffer<Local>> {
    Ok(pd.register(vec![0; LONG], Local)?)
}

fn command() -> Result<String> {
    let mut line = String::new();
    io::stdin().read_line(&mut line)?;
    Ok(line.trim().to_owned())
}

fn say(line: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
