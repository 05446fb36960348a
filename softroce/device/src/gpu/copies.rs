//! Asynchronous GPU copies: started when a packet is handled, and identified by a *ticket* until
//! they are done.
//!
//! The copies that one poll of the rings requests are a batch: adjacent ones are merged, they are
//! started together, and an event behind them reports that all are done. Tickets are the numbers of
//! batches, which complete in order.
//!
//! Bytes between host and GPU go through a ring of pinned memory. Those for a GPU are copied into
//! it at once; those for the host are copied out of it on completion ([`StagedCopy`]), the last
//! bytes last, like all that a peer writes. Long messages to memory that is used repeatedly go to
//! it directly ([`pins`](super::pins)), except for those last bytes.

use std::collections::{HashMap, VecDeque};
use std::mem;
use std::slice;
use std::time::{Duration, Instant};

use doorbell_roce_proto::Qpn;
use doorbell_roce_proto::qp::LaneId;

use super::cuda::{Engine, Mark, Pin};
use super::pins::{Pins, Taken};
use super::{Bounds, Failed, Handle, Memory, RING, Short, failed, own};
use crate::local::segment::SegmentId;
use crate::memory::copy;

/// Alignment in the ring.
const ALIGN: usize = 64;

/// Batches in flight at once: one, and one queued behind it.
const UNDER_WAY: usize = 2;

/// Behind a batch of at least so many bytes the next is delayed by this fraction of its expected
/// duration, from the last one's rate: copies that are requested meanwhile join it.
const LONG: usize = 16 << 20;
const HELD: f64 = 0.5;

/// The destination of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target<'a> {
    /// Host memory, in a region with these bounds.
    Host(*mut u8, Bounds),
    /// GPU memory, from this byte on.
    Device(&'a Memory, usize),
}

/// What a copy belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    pub(crate) qpn: Qpn,
    /// The destination region.
    pub(crate) key: u32,
    /// It is a response that the queue pair requested.
    pub(crate) response: bool,
    /// It is the end of a message.
    pub(crate) ends: bool,
}

/// The copies of a device.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    engine: Engine,
    /// Requested, not started.
    open: Batch,
    moves: Vec<Move>,
    /// In flight, the oldest first.
    begun: VecDeque<Batch>,
    /// The ticket up to which all are done.
    done: u64,
    /// When the oldest one became the first in flight, if it is [`LONG`].
    since: Option<Instant>,
    /// Seconds per byte of the last such batch.
    pace: Option<f64>,
    /// Bytes of the ring ever allocated, and freed.
    taken: u64,
    freed: u64,
    /// For each queue pair the last ticket, and the last of responses.
    busy: HashMap<Qpn, (u64, u64)>,
    /// To undo the requests of a record that is deferred.
    before: Before,
    imports: HashMap<(LaneId, SegmentId), Import>,
    pins: Pins,
    /// The link of this process to itself: its records name local allocations.
    to_itself: Option<LaneId>,
}

// SAFETY: its pointers are to registered memory of the process, as in `Region`; it is used under
// the engine's lock.
unsafe impl Send for Copies {}

#[derive(Debug, Default)]
struct Batch {
    marks: Vec<Mark>,
    owners: Vec<(Qpn, u32)>,
    landings: Vec<Landing>,
    bytes: usize,
    /// The end of its space in the ring.
    ring: u64,
    failed: bool,
    /// The copies of a batch that is done by kernels; kept alive here.
    short: Option<Vec<Move>>,
}

impl Batch {
    /// Starts its copies on the copy engines.
    fn begin(&mut self, engine: &mut Engine, moves: Vec<Move>) {
        for Move { into, from, len } in moves {
            let begun = match (&into, &from) {
                (End::Device(to, at), End::Device(source, start)) => engine.copy((to, *at), (source, *start), len),
                (End::Device(to, at), End::Ring(start)) => engine.copy_up((to, *at), *start, len),
                (End::Ring(at), End::Device(source, start)) => engine.copy_down((source, *start), *at, len),
                (End::Host(pin, at), End::Device(source, start)) => engine.copy_out((source, *start), (pin, *at), len),
                // Never requested.
                (_, End::Host(..)) | (End::Ring(_) | End::Host(..), End::Ring(_)) => Ok(()),
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

/// A requested copy.
#[derive(Debug)]
pub(super) struct Move {
    pub(super) into: End,
    pub(super) from: End,
    pub(super) len: usize,
}

/// The source or destination of a copy.
#[derive(Clone, Debug)]
pub(super) enum End {
    Device(Memory, usize),
    Ring(usize),
    Host(Pin, usize),
}

impl End {
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

/// Bytes to copy out of the ring on completion.
#[derive(Debug)]
pub(crate) struct Landing {
    pub(crate) qpn: Qpn,
    ring: usize,
    to: *mut u8,
    len: usize,
}

/// GPU memory shared by another process.
#[derive(Debug)]
struct Import {
    handle: Handle,
    len: usize,
    /// One mapping for each device that copies from it; the first also for copies to the host.
    mapped: Vec<Memory>,
}

/// The state before a record's requests.
#[derive(Debug, Default)]
struct Before {
    moves: usize,
    /// The length of the last copy.
    len: usize,
    owners: usize,
    landings: usize,
    ring: (u64, u64),
    /// The tickets of the queue pair of the requests.
    busy: Option<(Qpn, (u64, u64))>,
}

/// Finished copies.
#[derive(Debug, Default)]
pub(crate) struct Done {
    /// Queue pairs whose copies failed.
    pub(crate) failed: Vec<Qpn>,
    pub(crate) landings: Vec<Landing>,
}

/// Result of requesting a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Asked {
    Yes,
    /// The ring is full.
    Later,
    /// It can never be done.
    Never,
}

impl Copies {
    /// Sets the link of this process to itself.
    pub(crate) fn set_own_lane(&mut self, lane: LaneId) {
        self.to_itself = Some(lane);
    }

    /// Whether it is decided how small copies of the memory's device are done.
    pub(crate) fn has_short(&self, memory: &Memory) -> bool {
        self.engine.has_short(memory)
    }

    /// Decides how small copies of a device are done.
    pub(crate) fn add_short(&mut self, short: Short) {
        self.engine.add_short(short);
    }

    /// Whether nothing is in flight or requested.
    pub(crate) fn is_idle(&self) -> bool {
        self.begun.is_empty() && self.moves.is_empty()
    }

    /// The ticket of copies requested now.
    pub(crate) fn ticket(&self) -> u64 {
        self.done + self.begun.len() as u64 + 1
    }

    /// The ticket up to which all are done.
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    /// The ticket of the last unfinished copy for a queue pair.
    pub(crate) fn of(&self, qpn: Qpn) -> Option<u64> {
        if self.is_idle() {
            return None;
        }
        self.busy.get(&qpn).map(|last| last.0).filter(|last| *last > self.done)
    }

    /// Whether a copy of a READ response for a queue pair is unfinished.
    pub(crate) fn is_unsettled(&self, qpn: Qpn) -> bool {
        !self.is_idle() && self.busy.get(&qpn).is_some_and(|last| last.1 > self.done)
    }

    /// Whether copies for a queue pair, or of a region, are unfinished.
    pub(crate) fn uses(&self, qpn: Option<Qpn>, key: Option<u32>) -> bool {
        let used = |batch: &Batch| {
            let is = |owner: &(Qpn, u32)| qpn == Some(owner.0) || key == Some(owner.1);
            batch.owners.iter().any(is)
        };
        self.begun.iter().any(used) || used(&self.open)
    }

    /// Imports an allocation of `len` bytes that the peer of a link shares. Whether it can be
    /// copied from.
    pub(crate) fn add_import(&mut self, lane: LaneId, id: SegmentId, handle: Handle, len: usize) -> bool {
        match Memory::import(&handle, len, None) {
            Ok(Some(memory)) => {
                let mapped = vec![memory];
                self.imports.insert((lane, id), Import { handle, len, mapped });
                true
            }
            Ok(None) => false,
            Err(error) => {
                tracing::warn!("memory of a GPU of another process cannot be imported, and goes by the host: {error}");
                false
            }
        }
    }

    /// The same of one of this process's own allocations.
    pub(crate) fn add_own(&mut self, lane: LaneId, id: SegmentId) -> bool {
        let Some(memory) = own(id) else { return false };
        let import = Import {
            handle: Handle::Ipc([0; 64]),
            len: memory.len(),
            mapped: vec![memory],
        };
        self.imports.insert((lane, id), import);
        true
    }

    /// The peer withdrew an allocation.
    pub(crate) fn remove_import(&mut self, lane: LaneId, id: SegmentId) {
        self.imports.remove(&(lane, id));
    }

    /// The peer is gone.
    pub(crate) fn remove_imports(&mut self, lane: LaneId) {
        self.imports.retain(|(of, _), _| *of != lane);
    }

    /// The allocation that a record names, for copies on a device.
    fn imported(&mut self, lane: LaneId, id: SegmentId, device: Option<usize>) -> Option<Memory> {
        if self.to_itself == Some(lane) {
            return own(id);
        }
        let import = self.imports.get_mut(&(lane, id))?;
        let fits = |memory: &&Memory| device.is_none_or(|device| memory.device() == device);
        if let Some(memory) = import.mapped.iter().find(fits) {
            return Some(memory.clone());
        }
        if let Some(own) = own(id)
            && import.mapped.first().is_some_and(|memory| memory.is(&own))
        {
            // The driver copies between any two devices of one process.
            return Some(own);
        }
        match Memory::import(&import.handle, import.len, device) {
            Ok(Some(memory)) => {
                import.mapped.push(memory.clone());
                Some(memory)
            }
            Ok(None) => None,
            Err(error) => {
                tracing::warn!("memory of a GPU of another process cannot be imported: {error}");
                None
            }
        }
    }

    /// Begins the requests of another record.
    pub(crate) fn next_record(&mut self) {
        self.before = Before {
            moves: self.moves.len(),
            len: self.moves.last().map_or(0, |last| last.len),
            owners: self.open.owners.len(),
            landings: self.open.landings.len(),
            ring: (self.taken, self.freed),
            busy: None,
        };
    }

    /// The record is deferred: undoes its requests, for which it would wait itself otherwise.
    pub(crate) fn undo(&mut self) {
        let Before {
            moves,
            len,
            owners,
            landings,
            ring,
            busy,
        } = std::mem::take(&mut self.before);
        self.moves.truncate(moves);
        if let Some(last) = self.moves.last_mut() {
            last.len = len;
        }
        self.open.owners.truncate(owners);
        self.open.landings.truncate(landings);
        (self.taken, self.freed) = ring;
        if let Some((qpn, tickets)) = busy {
            self.busy.insert(qpn, tickets);
        }
    }

    /// Requests a copy from `offset` of the allocation that a record names.
    pub(crate) fn ask(
        &mut self,
        owner: Owner,
        (lane, id, offset): (LaneId, SegmentId, u64),
        target: Target<'_>,
        len: usize,
    ) -> Asked {
        let device = match target {
            Target::Device(memory, _) => Some(memory.device()),
            Target::Host(..) => None,
        };
        let Some(memory) = self.imported(lane, id, device) else {
            return Asked::Never;
        };
        let Some(start) = usize::try_from(offset).ok().filter(|start| {
            // The peer's numbers are not trusted.
            start.checked_add(len).is_some_and(|end| end <= memory.len())
        }) else {
            return Asked::Never;
        };
        let into = match target {
            Target::Device(memory, at) => End::Device(memory.clone(), at),
            Target::Host(to, bounds) => return self.ask_to_host(owner, (memory, start), (to, bounds), len),
        };
        self.push(owner, into, End::Device(memory, start), len);
        Asked::Yes
    }

    /// Requests a copy from GPU to host memory.
    fn ask_to_host(
        &mut self,
        owner: Owner,
        (memory, start): (Memory, usize),
        (to, bounds): (*mut u8, Bounds),
        len: usize,
    ) -> Asked {
        let pinned = self.pins.find(&memory, owner.key, to.addr(), len, bounds);
        // A direct copy must not be overwritten by an older one that is still in the ring.
        let pinned = pinned.filter(|_| !self.is_to_land(to.addr(), len));
        // An application may poll the last bytes of a message to detect the rest, so these go
        // through the ring.
        let direct = match &pinned {
            Some(_) if owner.ends => len.saturating_sub(copy::WORD),
            Some(_) => len,
            None => 0,
        };
        let rest = len - direct;
        let ring = match rest {
            0 => None,
            _ => match self.take(rest) {
                None => return Asked::Later,
                ring => ring,
            },
        };
        if let Err(error) = self.engine.ring(&memory) {
            failed(&error);
            return Asked::Never;
        }
        if let Some((pin, at)) = pinned
            && direct > 0
        {
            let from = End::Device(memory.clone(), start);
            self.push(owner, End::Host(pin, at), from, direct);
        }
        if let Some(ring) = ring {
            self.open.landings.push(Landing {
                qpn: owner.qpn,
                ring,
                to: to.wrapping_add(direct),
                len: rest,
            });
            self.push(owner, End::Ring(ring), End::Device(memory, start + direct), rest);
        }
        Asked::Yes
    }

    /// Whether `len` bytes of host memory at `start` overlap with a staged copy.
    fn is_to_land(&self, start: usize, len: usize) -> bool {
        let overlaps = |landing: &Landing| landing.to.addr() < start + len && start < landing.to.addr() + landing.len;
        let batches = self.begun.iter().chain([&self.open]);
        batches.flat_map(|batch| &batch.landings).any(overlaps)
    }

    /// A region is deregistered, and no copy uses it: returns its pins, to be released without
    /// locks.
    pub(crate) fn unpin(&mut self, key: u32) -> Taken {
        self.pins.take(key)
    }

    /// Requests a copy to a GPU of the `len` bytes that `fill` writes to the pointer.
    ///
    /// # Errors
    /// Those of `fill`.
    pub(crate) fn ask_from_host<E>(
        &mut self,
        owner: Owner,
        (memory, at): (&Memory, usize),
        len: usize,
        fill: impl FnOnce(*mut u8) -> Result<(), E>,
    ) -> Result<Asked, E> {
        let start = match self.engine.ring(memory) {
            Ok(start) => start,
            Err(error) => {
                failed(&error);
                return Ok(Asked::Never);
            }
        };
        let before = (self.taken, self.freed);
        let Some(ring) = self.take(len) else {
            return Ok(Asked::Later);
        };
        // SAFETY: the allocated part is in the ring.
        if let Err(error) = fill(unsafe { start.as_ptr().add(ring) }) {
            (self.taken, self.freed) = before;
            return Err(error);
        }
        self.push(owner, End::Device(memory.clone(), at), End::Ring(ring), len);
        Ok(Asked::Yes)
    }

    /// Allocates a part of the ring, if it has space.
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
        self.open.ring = self.taken;
        Some((start % size) as usize)
    }

    fn push(&mut self, owner: Owner, into: End, from: End, len: usize) {
        let ticket = self.ticket();
        let last = self.busy.entry(owner.qpn).or_default();
        self.before.busy.get_or_insert((owner.qpn, *last));
        last.0 = ticket;
        if owner.response {
            last.1 = ticket;
        }
        let owned = (owner.qpn, owner.key);
        if self.open.owners.last() != Some(&owned) {
            self.open.owners.push(owned);
        }
        if let Some(before) = self.moves.last_mut()
            && into.continues(&before.into, before.len)
            && from.continues(&before.from, before.len)
        {
            before.len += len;
            return;
        }
        self.moves.push(Move { into, from, len });
    }

    /// Starts the requested copies, unless enough are in flight: later requests join the batch, so
    /// that copies get longer under load. Between two copies a PCIe link is idle for about 3 us.
    pub(crate) fn begin(&mut self) {
        if self.moves.is_empty() || self.begun.len() >= UNDER_WAY || self.is_early() {
            return;
        }
        // Kernels and copy engines are not ordered with each other, and writes must be.
        let short = self.engine.are_short(&self.moves);
        if self.begun.iter().any(|batch| batch.short.is_some() != short) {
            return;
        }
        let mut batch = mem::take(&mut self.open);
        batch.bytes = self.moves.iter().map(|asked| asked.len).sum();
        if self.begun.is_empty() {
            self.since = (batch.bytes >= LONG).then(Instant::now);
        }
        batch.ring = self.taken;
        if short {
            let moves = mem::take(&mut self.moves);
            if let Err(error) = self.engine.copy_short(&moves, &mut batch.marks) {
                failed(&error);
                batch.failed = true;
            }
            batch.short = Some(moves);
            self.begun.push_back(batch);
            return;
        }
        batch.begin(&mut self.engine, mem::take(&mut self.moves));
        self.begun.push_back(batch);
    }

    /// Whether the batch in flight takes so long yet that the next one should wait for more
    /// requests.
    fn is_early(&self) -> bool {
        let (Some(front), Some(since), Some(pace)) = (self.begun.front(), self.since, self.pace) else {
            return false;
        };
        since.elapsed() < Duration::from_secs_f64(HELD * pace * front.bytes as f64)
    }

    /// The oldest batch is done: records its rate, and when the next one became the first.
    fn time(&mut self, bytes: usize) {
        let next = self.begun.front().is_some_and(|batch| batch.bytes >= LONG);
        let now = (next || self.since.is_some()).then(Instant::now);
        if let (Some(since), Some(now)) = (self.since, now) {
            self.pace = Some((now - since).as_secs_f64() / bytes as f64);
        }
        self.since = now.filter(|_| next);
    }

    /// Falls back to copy engines for batches of small copies whose kernel does not run.
    fn hurry(&mut self) {
        let Some(first) = self.begun.front().filter(|batch| batch.short.is_some()) else {
            return;
        };
        let Some(place) = self.engine.take_back(&first.marks) else {
            return;
        };
        for batch in &mut self.begun {
            if batch.marks.iter().any(|mark| mark.is_short(place)) {
                batch.marks.clear();
                let moves = batch.short.take().unwrap_or_default();
                batch.begin(&mut self.engine, moves);
            }
        }
    }

    /// Polls for finished batches, in ticket order.
    pub(crate) fn look(&mut self) -> Option<Done> {
        let mut found: Option<Done> = None;
        while let Some(batch) = self.begun.front_mut() {
            let mut failing = None;
            let done = batch.marks.iter().all(|mark| {
                self.engine.is_done(mark).unwrap_or_else(|error| {
                    // Work of a context that has failed is over.
                    failing = Some(error);
                    true
                })
            });
            if !done {
                self.hurry();
                break;
            }
            if let Some(error) = failing {
                failed(&error);
                batch.failed = true;
            }
            let Some(batch) = self.begun.pop_front() else { break };
            self.done += 1;
            let Batch {
                marks,
                owners,
                landings,
                bytes,
                ring,
                failed,
                short: _,
            } = batch;
            self.time(bytes);
            for mark in marks {
                self.engine.recycle(mark);
            }
            let found = found.get_or_insert_default();
            if failed {
                found.failed.extend(owners.into_iter().map(|(qpn, _)| qpn));
            } else {
                found.landings.extend(landings);
            }
            self.freed = self.freed.max(ring);
        }
        if found.is_some() && self.is_idle() {
            self.busy.clear();
        }
        found
    }

    /// Copies the staged bytes to their destination.
    pub(crate) fn land(&self, landing: &Landing) -> Result<(), Failed> {
        let start = self.engine.ring_start().ok_or(Failed)?;
        // SAFETY: within the ring, where the finished copy wrote, and nothing else does until more
        // is requested.
        let bytes = unsafe { slice::from_raw_parts(start.add(landing.ring), landing.len) };
        // SAFETY: inside a writable region, as was checked on request; deregistration waits for it
        // (`uses`).
        unsafe { copy::to_peer_visible(bytes, landing.to) };
        Ok(())
    }
}
