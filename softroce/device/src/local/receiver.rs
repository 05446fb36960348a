//! The receiving end of a lane.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::Ordering;

use super::body::{Body, Peer, Source};
use super::layout::{Field, Mapping};
use super::mapped::{Segments, UnfitSegment};
use super::record::{Control, Form, Kind, REFERENCE, Reference};
use super::ring::{Consumer, slot};
use super::segment::SegmentId;
use super::{Broken, HEADER, REFERENCES};

/// Whose memory the references of a lane name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Origin {
    /// Another process', which this one can read.
    Process(Peer),
    /// One that this one cannot read: of another user or namespace, or forbidden to it.
    Unreadable,
    /// This process' own.
    Own,
}

/// What the receiver tells the sender that it can do: bits of a word of the lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Abilities(pub(super) u64);

impl Abilities {
    /// It maps segments.
    pub(super) const SEGMENTS: Self = Self(1);
    /// It reads the sender's memory by address.
    pub(super) const PROCESS: Self = Self(2);
    /// It copies from GPUs' memory that it is told of.
    pub(super) const DEVICES: Self = Self(4);

    pub(super) fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// What becomes of a record that was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum After {
    /// It is done with.
    Consumed,
    /// What it refers to is still being read: it stays, until it is [released](Receiver::release), and the next one comes.
    Kept,
    /// It cannot be taken yet, and is looked at again.
    Left,
}

/// A record that has come.
#[derive(Debug)]
pub struct Received<'a> {
    /// What it is.
    pub kind: Kind,
    /// Its headers: a copy, which nobody changes any more.
    pub header: &'a [u8],
    /// Its payload.
    pub body: Body<'a>,
}

/// The receiving end of a lane. Used by one thread at a time.
#[derive(Debug)]
pub struct Receiver {
    map: Mapping,
    ring: Consumer,
    origin: Origin,
    segments: Segments,
    abilities: Abilities,
    /// The sender waits for room and was not called yet.
    owes_call: bool,
    /// The references of the record at hand.
    references: Vec<Reference>,
}

impl Receiver {
    /// The lane of which another process sent the descriptor. It tries at once whether it can read that process' memory, for the sender to know: `process` is its number, if it has one here.
    ///
    /// # Errors
    /// When it is no lane: it must be a memfd, sealed, of this version, and as long as it says.
    pub fn attach(fd: OwnedFd, process: Option<i32>) -> io::Result<Self> {
        let map = Mapping::attach(fd)?;
        let peer = process.map(|process| Peer {
            process,
            address: map.get(Field::ProbeAddress),
            value: map.get(Field::ProbeValue),
        });
        let origin = match peer {
            Some(peer) if peer.can_be_read() => Origin::Process(peer),
            _ => Origin::Unreadable,
        };
        Ok(Self::with_origin(map, origin))
    }

    /// A lane from this process to itself.
    ///
    /// # Safety
    /// The sender is this process', and the memory that its records refer to by address is readable until they are received or revoked. Nothing is revoked while a record is received.
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    pub unsafe fn attach_own(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self::with_origin(Mapping::attach(fd)?, Origin::Own))
    }

    fn with_origin(map: Mapping, origin: Origin) -> Self {
        let mut abilities = Abilities::SEGMENTS;
        if origin != Origin::Unreadable {
            abilities.0 |= Abilities::PROCESS.0;
        }
        map.set(Field::Abilities, abilities.0);
        Self {
            map,
            ring: Consumer::default(),
            origin,
            segments: Segments::default(),
            abilities,
            owes_call: false,
            references: Vec::with_capacity(REFERENCES),
        }
    }

    /// Takes the next record, if there is one. What `take` does not copy is gone afterwards.
    ///
    /// # Errors
    /// When what is there is no record: the lane is good for nothing any more.
    #[inline]
    pub fn pop<R>(&mut self, take: impl FnOnce(Received<'_>) -> R) -> Result<Option<R>, Broken> {
        self.pop_for(|record| (After::Consumed, take(record)))
    }

    /// Looks at the next record, if there is one; `take` says what becomes of it.
    ///
    /// # Errors
    /// As [`pop`](Self::pop).
    #[inline]
    pub fn pop_for<R>(&mut self, take: impl FnOnce(Received<'_>) -> (After, R)) -> Result<Option<R>, Broken> {
        if !self.ring.ready(&self.map) {
            self.ring.idle(&self.map);
            return Ok(None);
        }
        self.take(take).map(Some)
    }

    /// Whether the next record is there, and has all of its payload in its slot.
    #[inline]
    pub fn short_is_next(&self) -> bool {
        self.ring.ready(&self.map) && {
            let control = self
                .map
                .control(slot(&self.map, self.ring.next()))
                .load(Ordering::Relaxed);
            Control::decode(control).is_ok_and(|control| control.form == Form::Slot)
        }
    }

    fn take<R>(&mut self, take: impl FnOnce(Received<'_>) -> (After, R)) -> Result<R, Broken> {
        let position = self.ring.next();
        let slot = slot(&self.map, position);
        let control = Control::decode(self.map.control(slot).load(Ordering::Relaxed))?;
        let content = self.map.content(slot);
        let mut header = [0; HEADER];
        // SAFETY: `decode` found no more than HEADER bytes of header, fewer than the slot has. They may change meanwhile, which changes the copy and nothing else.
        unsafe { ptr::copy_nonoverlapping(content, header.as_mut_ptr(), control.header) };
        // SAFETY: within the content, as `decode` says that what follows fits in it.
        let behind = unsafe { content.add(control.behind_header()) }.cast_const();
        let source = match control.form {
            Form::Slot => Source::Lane(behind),
            Form::Bulk => Source::Lane(self.bulk(behind, control.payload)?),
            Form::Referred => self.refer(behind, &control)?,
            Form::ReferredByBulk => {
                let list = self.bulk(behind, control.references * REFERENCE)?;
                self.refer(list, &control)?
            }
        };
        let bulky = match source {
            Source::Lane(_) => control.form == Form::Bulk,
            Source::Referred { bulk, .. } => bulk || control.form == Form::ReferredByBulk,
        };
        let (after, taken) = take(Received {
            kind: control.kind,
            header: &header[..control.header],
            body: Body {
                map: &self.map,
                segments: &self.segments,
                origin: self.origin,
                position,
                references: &self.references,
                source,
                len: control.payload,
            },
        });
        match after {
            After::Consumed => self.owes_call |= self.ring.consumed(&self.map, bulky),
            After::Kept => self.ring.keep(bulky),
            After::Left => {}
        }
        Ok(taken)
    }

    /// Whether the oldest record that is kept was taken back: asked when what it referred to has been read, before that counts.
    #[must_use]
    pub fn was_revoked(&self) -> bool {
        Consumer::was_revoked(&self.map, self.ring.done())
    }

    /// The oldest record that is kept, or was taken behind one, is done with.
    pub fn release(&mut self) {
        self.owes_call |= self.ring.release(&self.map);
    }

    /// What lies in the bulk area, where the slot says.
    fn bulk(&self, offset: *const u8, len: usize) -> Result<*const u8, Broken> {
        // SAFETY: the eight bytes at `offset` are in the slot's content (`Control::fits`).
        let offset = u64::from_ne_bytes(unsafe { offset.cast::<[u8; 8]>().read() });
        let at = self.map.bulk(offset, len).ok_or(Broken("a payload outside the lane"))?;
        Ok(at.cast_const())
    }

    /// Copies the list of references and checks all that can be checked before the bytes are asked for.
    fn refer(&mut self, list: *const u8, control: &Control) -> Result<Source, Broken> {
        self.references.clear();
        let mut len = 0;
        let mut bulk = false;
        for index in 0..control.references {
            // SAFETY: `list` has that many references: in the slot's content by `Control::fits`, or in the bulk area as was asked for. Each is copied before it is looked at.
            let bytes = unsafe { list.add(index * REFERENCE).cast::<[u8; REFERENCE]>().read() };
            let reference = Reference::decode(&bytes)?;
            if let Reference::Bulk { offset, .. } = reference {
                self.map
                    .bulk(offset, reference.len())
                    .ok_or(Broken("a reference outside the lane"))?;
                bulk = true;
            }
            len += reference.len();
            self.references.push(reference);
        }
        if len != control.payload {
            return Err(Broken("references to another number of bytes than there are"));
        }
        let revocable = self
            .references
            .iter()
            .any(|reference| !matches!(reference, Reference::Bulk { .. }));
        Ok(Source::Referred { revocable, bulk })
    }

    /// Whether the sender waits for room and there is some now: it has to be rung, over the connection of the two processes. Said once for each time that it waits.
    #[must_use]
    pub fn owes_call(&mut self) -> bool {
        std::mem::take(&mut self.owes_call)
    }

    /// Before sleeping until rung. `false` when a record is there: then it must not sleep.
    #[must_use]
    pub fn sleep(&mut self) -> bool {
        self.ring.sleep(&self.map)
    }

    /// Awake again: need not be rung.
    pub fn awake(&mut self) {
        self.ring.awake(&self.map);
    }

    /// Maps a segment of the sender's, which it sent over the connection: in the order in which it sent them.
    ///
    /// # Errors
    /// When it is none, or cannot be mapped. The sender is told then that segments are nothing for this lane.
    pub fn add_segment(&mut self, id: SegmentId, fd: OwnedFd) -> Result<(), UnfitSegment> {
        let added = self.segments.add(id, fd);
        if added.is_err() {
            self.abilities.0 &= !Abilities::SEGMENTS.0;
            self.map.set(Field::Abilities, self.abilities.0);
        }
        self.map.set(Field::Mapped, self.segments.tried());
        added
    }

    /// From now on the sender may tell of memory of GPUs.
    pub fn take_devices(&mut self) {
        self.abilities.0 |= Abilities::DEVICES.0;
        self.map.set(Field::Abilities, self.abilities.0);
    }

    /// Memory of a GPU that the sender told of, in its order among the segments, was imported; or not, and the sender is to tell of no more.
    pub fn add_device(&mut self, imported: bool) {
        if !imported {
            self.abilities.0 &= !Abilities::DEVICES.0;
            self.map.set(Field::Abilities, self.abilities.0);
        }
        self.map.set(Field::Mapped, self.segments.pass());
    }

    /// Unmaps a segment that the sender has given up.
    pub fn remove_segment(&mut self, id: SegmentId) {
        self.segments.remove(id);
    }
}
