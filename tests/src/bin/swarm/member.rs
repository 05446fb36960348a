//! One member, with a link to each other. It prints `endpoints …`, reads `peers …`, prints `ready`,
//! reads `go`, prints `lost PEER` for each peer that no longer answers and `done BYTES`, then
//! probes idle peers. `quiet` and `leave` end the probing in step, so that no leaving peer is
//! reported as dead; `left DESCRIPTORS` is how many more it has than before the device.

use std::io::{self, BufRead as _};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_tests::attributes::print_line;
use doorbell_verbs::{CompletionError, CompletionQueue, CompletionStatus, Library, ProtectionDomain, QueueKind};

use crate::link::{DEPTH, ENTRIES, Link, Lost, Unconnected};
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
    let cq = device.completion_queue(ENTRIES * peers as u32)?;
    let mut unconnected = Vec::new();
    for peer in others(plan, index) {
        let builder = pd
            .queue_pair(&cq)
            .max_send_wr(DEPTH)
            .max_recv_wr(ENTRIES - DEPTH)
            .tag(peer as u64);
        let builder = builder.allow_remote_read().allow_remote_write().allow_remote_atomic();
        let prepared = builder.timeout(plan.timeout).retry_count(RETRIES).rnr_retry(7).rc()?;
        unconnected.push(Unconnected::new(&pd, prepared, peer)?);
    }
    let endpoints: Vec<_> = unconnected.iter().map(Unconnected::endpoint_info).collect();
    print_line(&format!("endpoints {}", endpoints.join(" ")))?;
    let line = await_line(lines)?;
    let endpoints = line.strip_prefix("peers ").context("no peers")?;
    let mut member = Member {
        links: Vec::new(),
        cq,
        dead: vec![false; plan.processes],
        scratch: Vec::new(),
    };
    member.connect(plan, &pd, index, unconnected, endpoints)?;
    print_line("ready")?;
    if await_line(lines)? != "go" {
        bail!("expected go");
    }
    member.work(plan.bytes / peers as u64, lines)
}

fn others(plan: &Plan, index: usize) -> impl Iterator<Item = usize> {
    (0..plan.processes).filter(move |&peer| peer != index)
}

struct Member {
    /// By the peer's index; `None` for this member itself, and for lost peers.
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
        endpoints: &str,
    ) -> Result<()> {
        self.links.resize_with(plan.processes, || None);
        for ((peer, link), endpoint_info) in others(plan, index).zip(unconnected).zip(endpoints.split(' ')) {
            self.links[peer] = Some(link.connect(plan, pd, index, peer, endpoint_info)?);
        }
        Ok(())
    }

    /// Moves `share` bytes to each peer, then probes them until `leave` arrives.
    fn work(&mut self, share: u64, lines: &Receiver<String>) -> Result<()> {
        let (mut done, mut quiet, mut reported_quiet) = (false, false, false);
        let mut last_probe = Instant::now();
        loop {
            let mut idle = self.poll(quiet)?;
            match lines.try_recv().as_deref() {
                Ok("quiet") => quiet = true,
                Ok("leave") => return Ok(()),
                Ok(other) => bail!("unknown command {other:?}"),
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
            if !done && self.links.iter().flatten().all(|link| link.moved >= share) {
                done = true;
                let moved: u64 = self.links.iter().flatten().map(|link| link.moved).sum();
                print_line(&format!("done {moved}"))?;
            }
            if quiet && !reported_quiet && self.links.iter().flatten().all(Link::is_quiet) {
                reported_quiet = true;
                print_line("quiet")?;
            }
            if idle {
                thread::yield_now();
            }
        }
    }

    /// Handles completions; returns whether there were none.
    fn poll(&mut self, leaving: bool) -> Result<bool> {
        let (mut idle, mut lost) = (true, Vec::new());
        for done in self.cq.poll()? {
            idle = false;
            let (peer, queue, result) = (done.tag() as usize, done.queue(), done.result());
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
            self.links[peer] = None;
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
