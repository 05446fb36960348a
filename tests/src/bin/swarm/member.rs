//! One member, with a link to each other. It prints `endpoints …`, reads `peers …`, prints `ready`,
//! reads `go`, prints `lost PEER` for each peer that no longer answers and `done BYTES`, then
//! probes idle peers. `quiet` and `leave` end the probing in step, so that no leaving peer is
//! reported as dead; `left DESCRIPTORS` is how many more it has than before the device.
//!
//! In a soak `renew PEERS` names members that were killed and replaced: it prints `offer …` with
//! the attributes for each, reads `accept …` with theirs, and prints `connected`.

use std::io::{self, BufRead as _};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_tests::attributes::print_line;
use doorbell_verbs::{CompletionError, CompletionQueue, CompletionStatus, Library, ProtectionDomain, Psn, QueueKind};

use crate::datagrams::{self, Datagrams};
use crate::link::{DEPTH, ENTRIES, Link, Lost, Unconnected};
use crate::soak::VICTIMS;
use crate::{Plan, RETRIES};

const PROBE_INTERVAL: Duration = Duration::from_millis(100);

/// Runs member `index`; fails when a byte is wrong, or for anything not caused by a dead peer.
pub(crate) fn run(plan: &Plan, index: usize) -> Result<()> {
    let lines = commands();
    let before = descriptors()?;
    run_traffic(plan, index, &lines)?;
    print_line(&format!("left {}", descriptors()? as i64 - before as i64))
}

fn run_traffic(plan: &Plan, index: usize, lines: &Receiver<String>) -> Result<()> {
    let [mut config] = <[DeviceConfig; 1]>::try_from(DeviceConfig::from_env()?)
        .map_err(|devices| anyhow::anyhow!("one device is enough, and not {}", devices.len()))?;
    config.address = Some(plan.address);
    configure(vec![config])?;
    let device = Library::new(api()).open("soft0")?;
    let pd = device.protection_domain()?;
    let peers = plan.processes - 1;
    // A dropped queue pair has its entries until it was polled; others replace it in a soak.
    let entries = ENTRIES * (peers + VICTIMS) as u32 + datagrams::ENTRIES;
    let cq = device.completion_queue(entries)?;
    let mut member = Member {
        plan: plan.clone(),
        index,
        datagrams: plan
            .soak
            .is_some()
            .then(|| Datagrams::new(plan, index, &pd, &cq))
            .transpose()?,
        pd,
        cq,
        links: std::iter::repeat_with(|| None).take(plan.processes).collect(),
        offered: Vec::new(),
        dead: vec![false; plan.processes],
        scratch: Vec::new(),
        totals: Totals::default(),
    };
    if plan.soak.is_some() {
        member.wrap_qpns()?;
    }
    let all: Vec<_> = (0..plan.processes).filter(|&peer| peer != index).collect();
    print_line(&format!("endpoints {}", member.offer(&all)?))?;
    let line = await_line(lines)?;
    member.accept(line.strip_prefix("peers ").context("no peers")?)?;
    print_line("ready")?;
    if await_line(lines)? != "go" {
        bail!("expected go");
    }
    member.work(plan.bytes / peers as u64, lines)
}

/// More than a block of queue pair numbers.
const QPNS: usize = (1 << 10) + 16;

/// Of links that are gone.
#[derive(Default)]
struct Totals {
    bytes: u64,
    operations: u64,
}

struct Member {
    plan: Plan,
    index: usize,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    datagrams: Option<Datagrams>,
    /// By the peer's index; `None` for this member itself, and for lost peers.
    links: Vec<Option<Link>>,
    /// Peers that get the attributes of these next.
    offered: Vec<(usize, Unconnected)>,
    dead: Vec<bool>,
    scratch: Vec<u8>,
    totals: Totals,
}

impl Member {
    /// Uses up the numbers of a block, so that the next ones wrap.
    fn wrap_qpns(&self) -> Result<()> {
        for _ in 0..QPNS {
            drop(self.pd.queue_pair(&self.cq).rc()?);
        }
        Ok(())
    }

    /// Makes a queue pair for each peer; returns their attributes.
    fn offer(&mut self, peers: &[usize]) -> Result<String> {
        let mut offers = Vec::new();
        for &peer in peers {
            let builder = self
                .pd
                .queue_pair(&self.cq)
                .max_send_wr(DEPTH)
                .max_recv_wr(ENTRIES - DEPTH);
            let builder = builder
                .tag(peer as u64)
                .timeout(self.plan.timeout)
                .retry_count(RETRIES)
                .rnr_retry(7);
            let mut builder = builder.allow_remote_read().allow_remote_write().allow_remote_atomic();
            if self.plan.soak.is_some() {
                // The PSNs wrap after some packets.
                builder = builder.psn(Psn::truncated(0xff_fff0 + peer as u32 % 16));
            }
            let unconnected = Unconnected::new(&self.pd, builder.rc()?, peer)?;
            let datagrams = self.datagrams.as_ref().map_or(0, Datagrams::qpn);
            offers.push(format!("{}/{datagrams}", unconnected.endpoint_info()));
            self.offered.push((peer, unconnected));
            self.dead[peer] = false;
        }
        Ok(offers.join(" "))
    }

    /// Connects what was offered, by the peers' attributes in the same order.
    fn accept(&mut self, endpoints: &str) -> Result<()> {
        let offered = std::mem::take(&mut self.offered);
        for ((peer, unconnected), info) in offered.into_iter().zip(endpoints.split(' ')) {
            let (endpoint, datagrams) = info.split_once('/').context("attributes without a datagram's")?;
            let link = unconnected.connect(&self.plan, &self.pd, self.index, peer, endpoint)?;
            self.links[peer] = Some(link);
            if let Some(own) = &mut self.datagrams {
                own.set_peer(peer, datagrams.parse()?);
            }
        }
        Ok(())
    }

    /// Moves `share` bytes to each peer, or any number in a soak, then probes them until `leave`
    /// arrives.
    fn work(&mut self, share: u64, lines: &Receiver<String>) -> Result<()> {
        let share = if self.plan.soak.is_some() { u64::MAX } else { share };
        let (mut done, mut quiet, mut reported_quiet) = (false, false, false);
        let mut last_probe = Instant::now();
        loop {
            let mut idle = self.poll(quiet)?;
            match lines.try_recv().as_deref() {
                Ok("quiet") => quiet = true,
                Ok("leave") => return Ok(()),
                Ok(other) => self.renew(other)?,
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => bail!("the parent is gone"),
            }
            let probe = !quiet && last_probe.elapsed() > PROBE_INTERVAL;
            if probe {
                last_probe = Instant::now();
            }
            for link in self.links.iter_mut().flatten().filter(|_| !quiet) {
                if link.moved < share {
                    idle &= !link.fill()?;
                } else if probe {
                    link.add()?;
                }
            }
            if let Some(datagrams) = self.datagrams.as_mut().filter(|_| probe) {
                datagrams.send()?;
            }
            if !done && self.links.iter().flatten().all(|link| link.moved >= share) {
                done = true;
                let moved: u64 = self.links.iter().flatten().map(|link| link.moved).sum();
                print_line(&format!("done {moved}"))?;
            }
            if quiet && !reported_quiet && self.links.iter().flatten().all(Link::is_quiet) {
                reported_quiet = true;
                print_line(&format!("quiet {}", self.report()))?;
            }
            if idle {
                thread::yield_now();
            }
        }
    }

    /// The commands of a soak.
    fn renew(&mut self, command: &str) -> Result<()> {
        if let Some(peers) = command.strip_prefix("renew ") {
            let peers: Vec<usize> = peers.split(' ').map(str::parse).collect::<Result<_, _>>()?;
            let offers = self.offer(&peers)?;
            return print_line(&format!("offer {offers}"));
        }
        let endpoints = command
            .strip_prefix("accept ")
            .with_context(|| format!("unknown command {command:?}"))?;
        self.accept(endpoints)?;
        print_line("connected")
    }

    /// Bytes verified, requests completed, datagrams sent and received.
    fn report(&self) -> String {
        let links = self.links.iter().flatten();
        let (mut bytes, mut operations) = (self.totals.bytes, self.totals.operations);
        for link in links {
            bytes += link.moved;
            operations += link.operations;
        }
        let [sent, received] = self.datagrams.as_ref().map_or([0; 2], |datagrams| datagrams.counts);
        format!("{bytes} {operations} {sent} {received}")
    }

    /// Handles completions; returns whether there were none.
    fn poll(&mut self, leaving: bool) -> Result<bool> {
        let (mut idle, mut lost) = (true, Vec::new());
        for done in self.cq.poll()? {
            idle = false;
            let (tag, queue, result) = (done.tag(), done.queue(), done.result());
            if tag == datagrams::TAG {
                let datagrams = self
                    .datagrams
                    .as_mut()
                    .context("a datagram, but no queue pair for it")?;
                result?;
                match done.datagram() {
                    Some(datagram) => datagrams.received(datagram.payload(), done.into_buffers())?,
                    None => datagrams.sent(done.into_buffers())?,
                }
                continue;
            }
            let peer = tag as usize;
            let Some(link) = self.links.get_mut(peer).and_then(Option::as_mut) else {
                continue;
            };
            match result {
                Ok(_) if queue == QueueKind::Send => link.sent(done.into_buffers())?,
                Ok(success) => link.received(success, done.into_buffers(), &mut self.scratch)?,
                Err(failure) => lost.push((peer, Lost(failure))),
            }
        }
        for (peer, Lost(failure)) in lost {
            if let Some(link) = self.links[peer].take() {
                self.totals.bytes += link.moved;
                self.totals.operations += link.operations;
            }
            if !std::mem::replace(&mut self.dead[peer], true) && !leaving {
                report_lost(peer, &failure)?;
            }
        }
        Ok(idle)
    }
}

/// Reports a dead peer as lost; a status other than retry exceeded is a fault.
fn report_lost(peer: usize, failure: &CompletionError) -> Result<()> {
    if failure.status != CompletionStatus::RetryExceeded {
        bail!("the connection to member {peer} ended: {failure}");
    }
    print_line(&format!("lost {peer}"))
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
    lines.recv().context("the parent is gone")
}

fn descriptors() -> Result<usize> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count())
}
