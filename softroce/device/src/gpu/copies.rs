//! Copies that go on beside the engine: begun when a packet is handled, and known by a *ticket* until they are done.
//!
//! What one look at the lanes asks for is a batch: copies that continue each other are made one, they are begun together, and an event behind them tells that all are done. Tickets are the
//! numbers of batches, and are done in their order.
//!
//! Between the host and a GPU bytes go by a ring of pinned memory. What is to go to a GPU is copied into it at once; what is to come to the host is copied out of it when it is there
//! ([`Landing`]), the last bytes last, as all that a peer writes. Long messages to memory that is used again go to it directly ([`pins`](super::pins)), all but those last bytes.

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

/// What begins in the ring begins at a multiple of it.
const ALIGN: usize = 64;

/// Batches that are under way at once: one, and one behind it that begins when that is done.
const UNDER_WAY: usize = 2;

/// Behind a batch of so many bytes the next one is not begun at once, but when this part of the time has gone by that it will take, by how long the one before took: what comes meanwhile is one copy with it.
const LONG: usize = 16 << 20;
const HELD: f64 = 0.5;

/// Where bytes are to go.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target<'a> {
    /// Into memory of the host, which is in a region with these bounds.
    Host(*mut u8, Bounds),
    /// Into a GPU's, from this byte on.
    Device(&'a Memory, usize),
}

/// For whom something is copied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    pub(crate) qpn: Qpn,
    /// The region that it goes to.
    pub(crate) key: u32,
    /// It is of a response that the queue pair asked for.
    pub(crate) response: bool,
    /// The message ends with it.
    pub(crate) ends: bool,
}

/// The copies of a device.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    engine: Engine,
    /// Asked for and not begun.
    open: Batch,
    moves: Vec<Move>,
    /// Begun and not done, the oldest first.
    begun: VecDeque<Batch>,
    /// Up to this one all are done.
    done: u64,
    /// When the oldest of them had no other before it any more, where it is [`LONG`].
    since: Option<Instant>,
    /// Seconds that a byte took of the last such batch.
    pace: Option<f64>,
    /// Bytes of the ring that were ever taken, and given back.
    taken: u64,
    freed: u64,
    /// For each queue pair the last ticket, and the last of responses.
    busy: HashMap<Qpn, (u64, u64)>,
    /// To undo what a record has asked for that cannot be taken as a whole.
    before: Before,
    imports: HashMap<(LaneId, SegmentId), Import>,
    pins: Pins,
    /// The lane of this process to itself: its records name what this process has.
    to_itself: Option<LaneId>,
}

// SAFETY: what its pointers point to is registered memory of the process, as in `Region`; it is used under the engine's lock.
unsafe impl Send for Copies {}

#[derive(Debug, Default)]
struct Batch {
    marks: Vec<Mark>,
    owners: Vec<(Qpn, u32)>,
    landings: Vec<Landing>,
    bytes: usize,
    /// Up to where it has taken the ring.
    ring: u64,
    failed: bool,
    /// All of them are done as short copies are; what those use is kept here.
    short: Option<Vec<Move>>,
}

impl Batch {
    /// Has copy engines begin what it is made of.
    fn begin(&mut self, engine: &mut Engine, moves: Vec<Move>) {
        for Move { into, from, len } in moves {
            let begun = match (&into, &from) {
                (End::Device(to, at), End::Device(source, start)) => engine.copy((to, *at), (source, *start), len),
                (End::Device(to, at), End::Ring(start)) => engine.copy_up((to, *at), *start, len),
                (End::Ring(at), End::Device(source, start)) => engine.copy_down((source, *start), *at, len),
                (End::Host(pin, at), End::Device(source, start)) => engine.copy_out((source, *start), (pin, *at), len),
                // Nothing else is ever asked for.
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

/// A copy that is asked for.
#[derive(Debug)]
pub(super) struct Move {
    pub(super) into: End,
    pub(super) from: End,
    pub(super) len: usize,
}

/// Where it goes, or comes from.
#[derive(Clone, Debug)]
pub(super) enum End {
    Device(Memory, usize),
    Ring(usize),
    Host(Pin, usize),
}

impl End {
    /// Whether this one continues `before`, of which there are `len` bytes.
    fn continues(&self, before: &Self, len: usize) -> bool {
        match (self, before) {
            (Self::Device(memory, at), Self::Device(other, start)) => memory.is(other) && *at == start + len,
            (Self::Ring(at), Self::Ring(start)) => *at == start + len,
            (Self::Host(pin, at), Self::Host(other, start)) => pin.is(other) && *at == start + len,
            _ => false,
        }
    }
}

/// What is to be copied out of the ring when it is there.
#[derive(Debug)]
pub(crate) struct Landing {
    pub(crate) qpn: Qpn,
    ring: usize,
    to: *mut u8,
    len: usize,
}

/// Memory that another process has told of.
#[derive(Debug)]
struct Import {
    handle: Handle,
    len: usize,
    /// For each device that copies from it; the first for copies to the host.
    mapped: Vec<Memory>,
}

/// How things were before a record.
#[derive(Debug, Default)]
struct Before {
    moves: usize,
    /// Of the last of them.
    len: usize,
    owners: usize,
    landings: usize,
    ring: (u64, u64),
    /// What the queue pair's tickets were that something was asked for.
    busy: Option<(Qpn, (u64, u64))>,
}

/// What has been done.
#[derive(Debug, Default)]
pub(crate) struct Done {
    /// Queue pairs of which copies have failed.
    pub(crate) failed: Vec<Qpn>,
    pub(crate) landings: Vec<Landing>,
}

/// Whether a copy could be asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Asked {
    Yes,
    /// The ring is full for now.
    Later,
    /// It will never be.
    Never,
}

impl Copies {
    /// Records of this lane are from this process itself.
    pub(crate) fn set_own_lane(&mut self, lane: LaneId) {
        self.to_itself = Some(lane);
    }

    /// Whether it is known how short copies of some memory's device are done.
    pub(crate) fn has_short(&self, memory: &Memory) -> bool {
        self.engine.has_short(memory)
    }

    /// Has short copies of a device done as such from now on.
    pub(crate) fn add_short(&mut self, short: Short) {
        self.engine.add_short(short);
    }

    /// Whether nothing is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.begun.is_empty() && self.moves.is_empty()
    }

    /// The ticket of what is asked for now.
    pub(crate) fn ticket(&self) -> u64 {
        self.done + self.begun.len() as u64 + 1
    }

    /// Up to this ticket all is done.
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    /// The ticket of the last copy for a queue pair that is not done.
    pub(crate) fn of(&self, qpn: Qpn) -> Option<u64> {
        if self.is_idle() {
            return None;
        }
        self.busy.get(&qpn).map(|last| last.0).filter(|last| *last > self.done)
    }

    /// Whether a copy of a response to a queue pair is not done.
    pub(crate) fn is_unsettled(&self, qpn: Qpn) -> bool {
        !self.is_idle() && self.busy.get(&qpn).is_some_and(|last| last.1 > self.done)
    }

    /// Whether copies for a queue pair, or of a region, are not done.
    pub(crate) fn uses(&self, qpn: Option<Qpn>, key: Option<u32>) -> bool {
        let used = |batch: &Batch| {
            let is = |owner: &(Qpn, u32)| qpn == Some(owner.0) || key == Some(owner.1);
            batch.owners.iter().any(is)
        };
        self.begun.iter().any(used) || used(&self.open)
    }

    /// Another process, at the other end of a lane, has told of an allocation of `len` bytes. Whether it can be copied from.
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

    /// The same of one that this process itself has.
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

    /// The other end gives an allocation up.
    pub(crate) fn remove_import(&mut self, lane: LaneId, id: SegmentId) {
        self.imports.remove(&(lane, id));
    }

    /// The other end is gone.
    pub(crate) fn remove_imports(&mut self, lane: LaneId) {
        self.imports.retain(|(of, _), _| *of != lane);
    }

    /// An allocation that a record of a lane names, for copies of a device.
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
            // The driver copies between any two devices' memory of one process.
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

    /// Another record is looked at.
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

    /// The record is put off: what it has asked for is not begun. Otherwise it would have to wait for itself.
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

    /// Asks for a copy from `offset` on of what a record names.
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
            // The numbers are the neighbour's.
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

    /// Asks for a copy of a GPU's memory to the host.
    fn ask_to_host(
        &mut self,
        owner: Owner,
        (memory, start): (Memory, usize),
        (to, bounds): (*mut u8, Bounds),
        len: usize,
    ) -> Asked {
        let pinned = self.pins.find(&memory, owner.key, to.addr(), len, bounds);
        // What has come before and is not yet where it belongs must not be put over this.
        let pinned = pinned.filter(|_| !self.is_to_land(to.addr(), len));
        // As an application may look at the last bytes of a message to learn that the rest is there, these go by the ring.
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

    /// Whether some of `len` bytes of the host's at `start` are yet to be written with what is in the ring, or comes there.
    fn is_to_land(&self, start: usize, len: usize) -> bool {
        let overlaps = |landing: &Landing| landing.to.addr() < start + len && start < landing.to.addr() + landing.len;
        let batches = self.begun.iter().chain([&self.open]);
        batches.flat_map(|batch| &batch.landings).any(overlaps)
    }

    /// A region goes, and no copy uses it any more: what is pinned of it, to be released when nothing is locked.
    pub(crate) fn unpin(&mut self, key: u32) -> Taken {
        self.pins.take(key)
    }

    /// Asks for a copy to a GPU of what `fill` writes to the pointer, into `len` bytes.
    ///
    /// # Errors
    /// What `fill` says.
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
        // SAFETY: what was taken lies in the ring.
        if let Err(error) = fill(unsafe { start.as_ptr().add(ring) }) {
            (self.taken, self.freed) = before;
            return Err(error);
        }
        self.push(owner, End::Device(memory.clone(), at), End::Ring(ring), len);
        Ok(Asked::Yes)
    }

    /// A part of the ring, if there is one.
    fn take(&mut self, len: usize) -> Option<usize> {
        let size = RING as u64;
        if self.freed == self.taken {
            // From the beginning, so that it stays in one piece as long as may be.
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

    /// Begins what was asked for, unless enough is under way: what is asked for meanwhile joins it, so that a copy is the longer the more there is to copy. Between two copies a link is idle for some 3 us.
    pub(crate) fn begin(&mut self) {
        if self.moves.is_empty() || self.begun.len() >= UNDER_WAY || self.is_early() {
            return;
        }
        // The two ways have no order between them, and what is written has.
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

    /// Whether what is under way takes so long yet that more may come to join what is behind it.
    fn is_early(&self) -> bool {
        let (Some(front), Some(since), Some(pace)) = (self.begun.front(), self.since, self.pace) else {
            return false;
        };
        since.elapsed() < Duration::from_secs_f64(HELD * pace * front.bytes as f64)
    }

    /// The oldest batch is done: how long it took, and when the next one has begun.
    fn time(&mut self, bytes: usize) {
        let next = self.begun.front().is_some_and(|batch| batch.bytes >= LONG);
        let now = (next || self.since.is_some()).then(Instant::now);
        if let (Some(since), Some(now)) = (self.since, now) {
            self.pace = Some((now - since).as_secs_f64() / bytes as f64);
        }
        self.since = now.filter(|_| next);
    }

    /// Has copy engines do what the first batch waits for, where that is short copies that their device does not begin; and what comes behind it in the same way.
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

    /// Looks what has been done, in the order of tickets.
    pub(crate) fn look(&mut self) -> Option<Done> {
        let mut found: Option<Done> = None;
        while let Some(batch) = self.begun.front_mut() {
            let mut failing = None;
            let done = batch.marks.iter().all(|mark| {
                self.engine.is_done(mark).unwrap_or_else(|error| {
                    // Nothing more comes of it: work of a context that has failed is over.
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

    /// Copies what has come to the ring to where it belongs.
    pub(crate) fn land(&self, landing: &Landing) -> Result<(), Failed> {
        let start = self.engine.ring_start().ok_or(Failed)?;
        // SAFETY: within the ring, where the copy that has ended wrote, and nothing else does until more is asked for.
        let bytes = unsafe { slice::from_raw_parts(start.add(landing.ring), landing.len) };
        // SAFETY: inside a region that may be written, as was checked when it was asked for; who takes that away waits for this (`uses`).
        unsafe { copy::to_peer_visible(bytes, landing.to) };
        Ok(())
    }
}
