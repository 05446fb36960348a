//! One member: its device, and a link to each other member.
//!
//! It says `cards …`, is told `peers …`, says `ready`, is told `go`; says `lost PEER STATUS` of each peer that no longer answers and `done BYTES` when all its traffic is over, and goes on
//! asking every peer now and then whether it lives. `quiet` and `leave` end that in step, so that nobody takes who leaves for dead; at last it says `left DESCRIPTORS`: how many more it has than
//! before it opened the device.

use std::io::{self, BufRead as _, Write as _};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::{CompletionQueue, Failure, Library, ProtectionDomain, Queue, Status};

use crate::link::{DEPTH, ENTRIES, Link, Lost, Unconnected};
use crate::{Plan, RETRIES};

/// How often a peer that is sent nothing else is asked whether it lives.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// Runs member `index`.
///
/// # Errors
/// When a byte is wrong, or anything fails that has nothing to do with a dead peer.
pub(crate) fn run(plan: &Plan, index: usize) -> Result<()> {
    let lines = commands();
    let before = descriptors()?;
    live(plan, index, &lines)?;
    say(&format!("left {}", descriptors()? as i64 - before as i64))
}

fn live(plan: &Plan, index: usize, lines: &Receiver<String>) -> Result<()> {
    let [mut config] = <[DeviceConfig; 1]>::try_from(DeviceConfig::from_env()?)
        .map_err(|devices| anyhow::anyhow!("one device is enough, and not {}", devices.len()))?;
    config.address = Some(plan.address);
    configure(vec![config])?;
    let device = Library::new(api()).open("soft0")?;
    let pd = device.protection_domain()?;
    let peers = plan.processes - 1;
    let cq = device.completion_queue(ENTRIES * peers as u32)?;
    let mut unconnected = Vec::new();
    for peer in others(plan, index) {
        let builder = pd
            .queue_pair(&cq)
            .send_depth(DEPTH)
            .recv_depth(ENTRIES - DEPTH)
            .tag(peer as u64);
        let builder = builder.allow_remote_read().allow_remote_write().allow_remote_atomic();
        let prepared = builder.timeout(plan.timeout).retry_count(RETRIES).rnr_retry(7).rc()?;
        unconnected.push(Unconnected::new(&pd, prepared, peer)?);
    }
    let cards: Vec<_> = unconnected.iter().map(Unconnected::card).collect();
    say(&format!("cards {}", cards.join(" ")))?;
    let told = await_line(lines)?;
    let cards = told.strip_prefix("peers ").context("no peers")?;
    let mut member = Member {
        links: Vec::new(),
        cq,
        dead: vec![false; plan.processes],
        scratch: Vec::new(),
    };
    member.connect(plan, &pd, index, unconnected, cards)?;
    say("ready")?;
    if await_line(lines)? != "go" {
        bail!("not told to go");
    }
    member.work(plan.bytes / peers as u64, lines)
}

/// The members but `index`, in order.
fn others(plan: &Plan, index: usize) -> impl Iterator<Item = usize> {
    (0..plan.processes).filter(move |&peer| peer != index)
}

struct Member {
    /// By the peer's index; `None` for this member itself, and for those that are lost.
    links: Vec<Option<Link>>,
    cq: CompletionQueue,
    dead: Vec<bool>,
    scratch: Vec<u8>,
}

impl Member {
    fn connect(
        &mut self,
        plan: &Plan,
        pd: &ProtectionDomain,
        index: usize,
        unconnected: Vec<Unconnected>,
        cards: &str,
    ) -> Result<()> {
        self.links.resize_with(plan.processes, || None);
        for ((peer, link), card) in others(plan, index).zip(unconnected).zip(cards.split(' ')) {
            self.links[peer] = Some(link.connect(plan, pd, index, peer, card)?);
        }
        Ok(())
    }

    /// Moves `share` bytes to each peer, then only asks whether they live, until told to leave.
    fn work(&mut self, share: u64, lines: &Receiver<String>) -> Result<()> {
        let (mut done, mut quiet, mut said_quiet) = (false, false, false);
        let mut asked = Instant::now();
        loop {
            let mut idle = self.poll(quiet)?;
            match lines.try_recv().as_deref() {
                Ok("quiet") => quiet = true,
                Ok("leave") => return Ok(()),
                Ok(other) => bail!("told {other:?}"),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => bail!("nobody is there to tell what to do"),
            }
            let ask = !quiet && asked.elapsed() > ASK_EVERY;
            if ask {
                asked = Instant::now();
            }
            for link in self.links.iter_mut().flatten().filter(|_| !quiet) {
                if link.moved < share {
                    idle &= !link.fill()?;
                } else if ask {
                    link.add()?;
                }
            }
            if !done && self.links.iter().flatten().all(|link| link.moved >= share) {
                done = true;
                let moved: u64 = self.links.iter().flatten().map(|link| link.moved).sum();
                say(&format!("done {moved}"))?;
            }
            if quiet && !said_quiet && self.links.iter().flatten().all(Link::is_quiet) {
                said_quiet = true;
                say("quiet")?;
            }
            if idle {
                thread::yield_now();
            }
        }
    }

    /// Takes what has completed; whether nothing had.
    fn poll(&mut self, leaving: bool) -> Result<bool> {
        let (mut idle, mut lost) = (true, Vec::new());
        for done in self.cq.poll()? {
            idle = false;
            let (peer, queue, result) = (done.tag() as usize, done.queue(), done.result());
            let Some(link) = self.links.get_mut(peer).and_then(Option::as_mut) else {
                continue;
            };
            match result {
                Ok(_) if queue == Queue::Send => link.sent(done.into_buffers())?,
                Ok(success) => link.received(success, done.into_buffers(), &mut self.scratch)?,
                Err(failure) => lost.push((peer, Lost(failure))),
            }
        }
        for (peer, Lost(failure)) in lost {
            self.links[peer] = None;
            if !std::mem::replace(&mut self.dead[peer], true) && !leaving {
                report(peer, &failure)?;
            }
        }
        Ok(idle)
    }
}

/// A peer that is dead is told of as lost, by the one status that means it; anything else is a fault.
fn report(peer: usize, failure: &Failure) -> Result<()> {
    if failure.status != Status::RetryExceeded {
        bail!("the connection to member {peer} ended: {failure}");
    }
    say(&format!("lost {peer}"))
}

fn commands() -> Receiver<String> {
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                return;
            }
        }
    });
    receive
}

fn await_line(lines: &Receiver<String>) -> Result<String> {
    lines.recv().context("nobody is there to tell what to do")
}

fn say(line: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// Descriptors open in this process.
fn descriptors() -> Result<usize> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count())
}
