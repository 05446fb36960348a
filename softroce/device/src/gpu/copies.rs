//! Asynchronous GPU copies (decisions 036, 037, 039). The copies that one poll of the rings
//! requests are a batch: adjacent ones are merged, and an event behind them reports the end.
//! Batches complete in the order of their numbers, the *tickets*.
//!
//! Bytes between host and GPU go through a ring of pinned memory: copied into it at once, or out of
//! it on completion ([`StagedCopy`]), the last bytes last. Long messages to memory that is used
//! repeatedly go to it directly ([`pins`](super::pins)), except for those last bytes.

mod imports;

use std::collections::{HashMap, VecDeque};
use std::mem;
use std::slice;
use std::time::{Duration, Instant};

use doorbell_roce_proto::Qpn;
use doorbell_roce_proto::qp::LinkId;

use self::imports::Import;
use super::cuda::{Engine, Mark, Pin};
use super::pins::{Pins, ReleasedPins};
use super::{Bounds, Failed, Memory, PreparedDevice, RING, failed};
use crate::links::shm_ring::segment::SegmentId;
use crate::memory::{Fault, copy};

const ALIGN: usize = 64;

const MAX_IN_FLIGHT: usize = 2;

/// Behind a batch of so many bytes the next is delayed by this fraction of its expected duration.
const LONG: usize = 16 << 20;
const BATCH_DELAY: f64 = 0.5;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Target<'a> {
    /// Host memory, in a region with these bounds.
    Host(*mut u8, Bounds),
    /// GPU memory, from this byte on.
    Device(&'a Memory, usize),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyOwner {
    pub(crate) qpn: Qpn,
    /// The destination region.
    pub(crate) key: u32,
    /// It is a response that the queue pair requested.
    pub(crate) response: bool,
    pub(crate) ends: bool,
}

// fields: one queue of batches; the counters and the ring change together with it.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    engine: Engine,
    requested: Batch,
    ops: Vec<CopyOp>,
    in_flight: VecDeque<Batch>,
    done: u64,
    /// When the oldest one became the first in flight, if it is [`LONG`].
    since: Option<Instant>,
    seconds_per_byte: Option<f64>,
    /// Bytes of the ring ever allocated, and freed.
    taken: u64,
    freed: u64,
    /// For each queue pair the last ticket, and the last of responses.
    busy: HashMap<Qpn, (u64, u64)>,
    checkpoint: Checkpoint,
    imports: HashMap<(LinkId, SegmentId), Import>,
    pins: Pins,
    /// The link of this process to itself: its records name local allocations.
    loopback: Option<LinkId>,
}

// SAFETY: its pointers are to registered memory, as in `Region`; used under the engine's lock.
unsafe impl Send for Copies {}

#[derive(Debug, Default)]
struct Batch {
    marks: Vec<Mark>,
    owners: Vec<(Qpn, u32)>,
    staged: Vec<StagedCopy>,
    bytes: usize,
    /// The end of its space in the ring.
    ring: u64,
    failed: bool,
    /// The copies of a batch that is done by kernels; kept alive here.
    small: Option<Vec<CopyOp>>,
}

impl Batch {
    fn begin(&mut self, engine: &mut Engine, ops: Vec<CopyOp>) {
        for CopyOp { into, from, len } in ops {
            let begun = match (&into, &from) {
                (CopyEnd::Device(to, at), CopyEnd::Device(source, start)) => {
                    engine.copy((to, *at), (source, *start), len)
                }
                (CopyEnd::Device(to, at), CopyEnd::Ring(start)) => engine.copy_up((to, *at), *start, len),
                (CopyEnd::Ring(at), CopyEnd::Device(source, start)) => engine.copy_down((source, *start), *at, len),
                (CopyEnd::Host(pin, at), CopyEnd::Device(source, start)) => {
                    engine.copy_out((source, *start), (pin, *at), len)
                }
                // Never requested.
                (_, CopyEnd::Host(..)) | (CopyEnd::Ring(_) | CopyEnd::Host(..), CopyEnd::Ring(_)) => Ok(()),
            };
            if let Err(error) = begun {
                failed(&error);
                self.failed = true;
            }
        }
        if let Err(error) = engine.mark(&mut self.marks) {
            failed(&error);
            self.failed = true;
        }
    }
}

#[derive(Debug)]
pub(super) struct CopyOp {
    pub(super) into: CopyEnd,
    pub(super) from: CopyEnd,
    pub(super) len: usize,
}

#[derive(Clone, Debug)]
pub(super) enum CopyEnd {
    Device(Memory, usize),
    Ring(usize),
    Host(Pin, usize),
}

impl CopyEnd {
    /// Whether it is adjacent to `before`, which is `len` bytes long.
    fn continues(&self, before: &Self, len: usize) -> bool {
        match (self, before) {
            (Self::Device(memory, at), Self::Device(other, start)) => memory.is(other) && *at == start + len,
            (Self::Ring(at), Self::Ring(start)) => *at == start + len,
            (Self::Host(pin, at), Self::Host(other, start)) => pin.is(other) && *at == start + len,
            _ => false,
        }
    }
}

#[derive(Debug)]
pub(crate) struct StagedCopy {
    pub(crate) qpn: Qpn,
    ring: usize,
    to: *mut u8,
    len: usize,
}

#[derive(Debug, Default)]
struct Checkpoint {
    ops: usize,
    len: usize,
    owners: usize,
    staged: usize,
    ring: (u64, u64),
    /// The tickets of the queue pair of the requests.
    busy: Option<(Qpn, (u64, u64))>,
}

#[derive(Debug, Default)]
pub(crate) struct Done {
    pub(crate) failed: Vec<Qpn>,
    pub(crate) staged: Vec<StagedCopy>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CopyRequest {
    Queued,
    RingFull,
    Refused,
}

impl Copies {
    pub(crate) fn set_loopback_link(&mut self, link: LinkId) {
        self.loopback = Some(link);
    }

    pub(crate) fn is_prepared(&self, memory: &Memory) -> bool {
        self.engine.is_prepared(memory)
    }

    pub(crate) fn add(&mut self, device: PreparedDevice) {
        self.engine.add(device);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.ops.is_empty()
    }

    pub(crate) fn ticket(&self) -> u64 {
        self.done + self.in_flight.len() as u64 + 1
    }

    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    pub(crate) fn pending_ticket(&self, qpn: Qpn) -> Option<u64> {
        if self.is_idle() {
            return None;
        }
        self.busy.get(&qpn).map(|last| last.0).filter(|last| *last > self.done)
    }

    pub(crate) fn has_pending_response(&self, qpn: Qpn) -> bool {
        !self.is_idle() && self.busy.get(&qpn).is_some_and(|last| last.1 > self.done)
    }

    pub(crate) fn uses(&self, qpn: Option<Qpn>, key: Option<u32>) -> bool {
        let used = |batch: &Batch| {
            let is = |owner: &(Qpn, u32)| qpn == Some(owner.0) || key == Some(owner.1);
            batch.owners.iter().any(is)
        };
        self.in_flight.iter().any(used) || used(&self.requested)
    }

    pub(crate) fn next_record(&mut self) {
        self.checkpoint = Checkpoint {
            ops: self.ops.len(),
            len: self.ops.last().map_or(0, |last| last.len),
            owners: self.requested.owners.len(),
            staged: self.requested.staged.len(),
            ring: (self.taken, self.freed),
            busy: None,
        };
    }

    /// The record is deferred: undoes its requests, for which it would wait itself otherwise.
    pub(crate) fn undo(&mut self) {
        let Checkpoint {
            ops,
            len,
            owners,
            staged,
            ring,
            busy,
        } = std::mem::take(&mut self.checkpoint);
        self.ops.truncate(ops);
        if let Some(last) = self.ops.last_mut() {
            last.len = len;
        }
        self.requested.owners.truncate(owners);
        self.requested.staged.truncate(staged);
        (self.taken, self.freed) = ring;
        if let Some((qpn, tickets)) = busy {
            self.busy.insert(qpn, tickets);
        }
    }

    /// Requests a copy from `offset` of the allocation that a record names.
    pub(crate) fn request(
        &mut self,
        owner: CopyOwner,
        (link, id, offset): (LinkId, SegmentId, u64),
        target: Target<'_>,
        len: usize,
    ) -> CopyRequest {
        let device = match target {
            Target::Device(memory, _) => Some(memory.device()),
            Target::Host(..) => None,
        };
        let Some(memory) = self.imported(link, id, device) else {
            return CopyRequest::Refused;
        };
        let Some(start) = usize::try_from(offset).ok().filter(|start| {
            // The peer's numbers are not trusted.
            start.checked_add(len).is_some_and(|end| end <= memory.len())
        }) else {
            return CopyRequest::Refused;
        };
        let into = match target {
            Target::Device(memory, at) => CopyEnd::Device(memory.clone(), at),
            Target::Host(to, bounds) => return self.request_to_host(owner, (memory, start), (to, bounds), len),
        };
        self.push(owner, into, CopyEnd::Device(memory, start), len);
        CopyRequest::Queued
    }

    fn request_to_host(
        &mut self,
        owner: CopyOwner,
        (memory, start): (Memory, usize),
        (to, bounds): (*mut u8, Bounds),
        len: usize,
    ) -> CopyRequest {
        let pinned = self.pins.find(&memory, owner.key, to.addr(), len, bounds);
        // A direct copy must not be overwritten by an older one that is still in the ring.
        let pinned = pinned.filter(|_| !self.overlaps_staged(to.addr(), len));
        // The last bytes go through the ring: applications poll them.
        let direct = match &pinned {
            Some(_) if owner.ends => len.saturating_sub(copy::WORD),
            Some(_) => len,
            None => 0,
        };
        let rest = len - direct;
        let ring = match rest {
            0 => None,
            _ => match self.take(rest) {
                None => return CopyRequest::RingFull,
                ring => ring,
            },
        };
        if let Err(error) = self.engine.ring(&memory) {
            failed(&error);
            return CopyRequest::Refused;
        }
        if let Some((pin, at)) = pinned
            && direct > 0
        {
            let from = CopyEnd::Device(memory.clone(), start);
            self.push(owner, CopyEnd::Host(pin, at), from, direct);
        }
        if let Some(ring) = ring {
            self.requested.staged.push(StagedCopy {
                qpn: owner.qpn,
                ring,
                to: to.wrapping_add(direct),
                len: rest,
            });
            self.push(
                owner,
                CopyEnd::Ring(ring),
                CopyEnd::Device(memory, start + direct),
                rest,
            );
        }
        CopyRequest::Queued
    }

    fn overlaps_staged(&self, start: usize, len: usize) -> bool {
        let overlaps = |staged: &StagedCopy| staged.to.addr() < start + len && start < staged.to.addr() + staged.len;
        let batches = self.in_flight.iter().chain([&self.requested]);
        batches.flat_map(|batch| &batch.staged).any(overlaps)
    }

    /// The pins of a deregistered region without copies, to be released without locks.
    pub(crate) fn unpin(&mut self, key: u32) -> ReleasedPins {
        self.pins.remove_region(key)
    }

    /// Requests a copy to a GPU of the `len` bytes that `fill` writes; fails with it.
    pub(crate) fn request_from_host<E>(
        &mut self,
        owner: CopyOwner,
        (memory, at): (&Memory, usize),
        len: usize,
        fill: impl FnOnce(*mut u8) -> Result<(), E>,
    ) -> Result<CopyRequest, E> {
        let start = match self.engine.ring(memory) {
            Ok(start) => start,
            Err(error) => {
                failed(&error);
                return Ok(CopyRequest::Refused);
            }
        };
        let checkpoint = (self.taken, self.freed);
        let Some(ring) = self.take(len) else {
            return Ok(CopyRequest::RingFull);
        };
        // SAFETY: the allocated part is in the ring.
        if let Err(error) = fill(unsafe { start.as_ptr().add(ring) }) {
            (self.taken, self.freed) = checkpoint;
            return Err(error);
        }
        self.push(owner, CopyEnd::Device(memory.clone(), at), CopyEnd::Ring(ring), len);
        Ok(CopyRequest::Queued)
    }

    fn take(&mut self, len: usize) -> Option<usize> {
        let size = RING as u64;
        if self.freed == self.taken {
            // From the beginning, so that it stays contiguous for long.
            let start = self.taken.next_multiple_of(size);
            (self.taken, self.freed) = (start, start);
        }
        let mut start = self.taken;
        let end = |start: u64| start + len.next_multiple_of(ALIGN) as u64;
        if start % size + (end(start) - start) > size {
            start = start.next_multiple_of(size);
        }
        if len > RING || end(start) - self.freed > size {
            return None;
        }
        self.taken = end(start);
        self.requested.ring = self.taken;
        Some((start % size) as usize)
    }

    fn push(&mut self, owner: CopyOwner, into: CopyEnd, from: CopyEnd, len: usize) {
        let ticket = self.ticket();
        let last = self.busy.entry(owner.qpn).or_default();
        self.checkpoint.busy.get_or_insert((owner.qpn, *last));
        last.0 = ticket;
        if owner.response {
            last.1 = ticket;
        }
        let owned = (owner.qpn, owner.key);
        if self.requested.owners.last() != Some(&owned) {
            self.requested.owners.push(owned);
        }
        if let Some(last) = self.ops.last_mut()
            && into.continues(&last.into, last.len)
            && from.continues(&last.from, last.len)
        {
            last.len += len;
            return;
        }
        self.ops.push(CopyOp { into, from, len });
    }

    /// Starts the requested copies, unless enough are in flight: later requests join the batch, so
    /// that copies get longer under load. Between two copies a PCIe link is idle for about 3 us.
    pub(crate) fn begin(&mut self) {
        if self.ops.is_empty() || self.in_flight.len() >= MAX_IN_FLIGHT || self.should_wait() {
            return;
        }
        // Kernels and copy engines are not ordered with each other, and writes must be.
        let small = self.engine.are_small(&self.ops);
        if self.in_flight.iter().any(|batch| batch.small.is_some() != small) {
            return;
        }
        let mut batch = mem::take(&mut self.requested);
        batch.bytes = self.ops.iter().map(|op| op.len).sum();
        if self.in_flight.is_empty() {
            self.since = (batch.bytes >= LONG).then(Instant::now);
        }
        batch.ring = self.taken;
        if small {
            let ops = mem::take(&mut self.ops);
            if let Err(error) = self.engine.copy_small(&ops, &mut batch.marks) {
                failed(&error);
                batch.failed = true;
            }
            batch.small = Some(ops);
            self.in_flight.push_back(batch);
            return;
        }
        batch.begin(&mut self.engine, mem::take(&mut self.ops));
        self.in_flight.push_back(batch);
    }

    /// Whether the batch in flight is so long that the next one waits for more requests.
    fn should_wait(&self) -> bool {
        let (Some(front), Some(since), Some(seconds_per_byte)) =
            (self.in_flight.front(), self.since, self.seconds_per_byte)
        else {
            return false;
        };
        since.elapsed() < Duration::from_secs_f64(BATCH_DELAY * seconds_per_byte * front.bytes as f64)
    }

    /// The oldest batch is done: records its rate, and when the next one became the first.
    fn record_rate(&mut self, bytes: usize) {
        let next = self.in_flight.front().is_some_and(|batch| batch.bytes >= LONG);
        let now = (next || self.since.is_some()).then(Instant::now);
        if let (Some(since), Some(now)) = (self.since, now) {
            self.seconds_per_byte = Some((now - since).as_secs_f64() / bytes as f64);
        }
        self.since = now.filter(|_| next);
    }

    fn fall_back_to_engines(&mut self) {
        let Some(first) = self.in_flight.front().filter(|batch| batch.small.is_some()) else {
            return;
        };
        let Some(device) = self.engine.small.cancel(&first.marks) else {
            return;
        };
        for batch in &mut self.in_flight {
            if batch.marks.iter().any(|mark| mark.is_small(device)) {
                batch.marks.clear();
                let ops = batch.small.take().unwrap_or_default();
                batch.begin(&mut self.engine, ops);
            }
        }
    }

    pub(crate) fn poll(&mut self) -> Option<Done> {
        let mut found: Option<Done> = None;
        while let Some(batch) = self.in_flight.front_mut() {
            let mut failing = None;
            let done = batch.marks.iter().all(|mark| {
                self.engine.is_done(mark).unwrap_or_else(|error| {
                    // Work of a context that has failed is over.
                    failing = Some(error);
                    true
                })
            });
            if !done {
                self.fall_back_to_engines();
                break;
            }
            if let Some(error) = failing {
                failed(&error);
                batch.failed = true;
            }
            let Some(batch) = self.in_flight.pop_front() else { break };
            self.done += 1;
            let Batch {
                marks,
                owners,
                staged,
                bytes,
                ring,
                failed,
                small: _,
            } = batch;
            self.record_rate(bytes);
            for mark in marks {
                self.engine.recycle(mark);
            }
            let found = found.get_or_insert_default();
            if failed {
                found.failed.extend(owners.into_iter().map(|(qpn, _)| qpn));
            } else {
                found.staged.extend(staged);
            }
            self.freed = self.freed.max(ring);
        }
        if found.is_some() && self.is_idle() {
            self.busy.clear();
        }
        found
    }

    pub(crate) fn finish_staged(&self, staged: &StagedCopy) -> Result<(), Failed> {
        let start = self.engine.ring_start().ok_or(Failed)?;
        // SAFETY: within the ring, where the finished copy wrote, and nothing else does until more
        // is requested.
        let bytes = unsafe { slice::from_raw_parts(start.add(staged.ring), staged.len) };
        // SAFETY: in a region found writable on request; deregistration waits for it (`uses`).
        unsafe { copy::to_peer_visible(bytes, staged.to) }.map_err(|Fault| Failed)
    }
}
