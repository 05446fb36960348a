//! The receiving end of a shm ring.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use super::body::{RecordBody, Source};
use super::layout::{Field, Mapping};
use super::mapped::{MappedSegments, UnfitSegment};
use super::record::{Control, PayloadLocation, REFERENCE, RecordKind, Reference};
use super::ring::{CREDIT, Consumer, slot};
use super::segment::SegmentId;
use super::{CorruptRing, HEADER, REFERENCES, counted};

/// Capabilities of the receiver, published to the sender as bits of a word of the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Capabilities(pub(super) u64);

impl Capabilities {
    pub(super) const SEGMENTS: Self = Self(1);
    pub(super) const DEVICES: Self = Self(2);
    pub(super) const DIRECT: Self = Self(4);

    pub(super) fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// What becomes of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Disposition {
    /// It is consumed.
    Consumed,
    /// Its references are still being read: it stays until it is [released](Receiver::release),
    /// while later ones are handled.
    Retained,
    /// It must be handled again.
    Deferred,
}

/// A received record.
#[derive(Debug)]
pub struct Received<'a> {
    /// Its kind.
    pub kind: RecordKind,
    /// A private copy of its headers.
    pub header: &'a [u8],
    /// Its payload.
    pub body: RecordBody<'a>,
}

/// The receiving end of a shm ring. Used by one thread at a time.
#[derive(Debug)]
pub struct Receiver {
    map: Mapping,
    ring: Consumer,
    /// Its sender is this process's.
    own: bool,
    segments: MappedSegments,
    capabilities: Capabilities,
    /// The sender waits for credits and must be woken.
    credit_wakeup_pending: bool,
    references: Vec<Reference>,
}

impl Receiver {
    /// Attaches to the ring of a descriptor from another process.
    ///
    /// # Errors
    /// When it is no ring: it must be a sealed memfd of this version, as long as its geometry says.
    pub fn attach(fd: OwnedFd) -> io::Result<Self> {
        let map = Mapping::attach(fd)?;
        let capabilities = Capabilities::SEGMENTS;
        map.set(Field::Capabilities, capabilities.0);
        Ok(Self {
            map,
            ring: Consumer::default(),
            own: false,
            segments: MappedSegments::default(),
            capabilities,
            credit_wakeup_pending: false,
            references: Vec::with_capacity(REFERENCES),
        })
    }

    /// A ring from this process to itself.
    ///
    /// # Safety
    /// The sender is this process's, and the memory that its records refer to by address is the
    /// application's until they are received or revoked. Nothing is revoked while a record is
    /// received.
    pub(crate) unsafe fn attach_own(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            own: true,
            ..Self::attach(fd)?
        })
    }

    /// Consumes the next record, if there is one; `take` must copy what it needs.
    ///
    /// # Errors
    /// When the ring is corrupt: it can only be closed.
    #[inline]
    pub fn pop<R>(&mut self, take: impl FnOnce(Received<'_>) -> R) -> Result<Option<R>, CorruptRing> {
        self.pop_with(|record| (Disposition::Consumed, take(record)))
    }

    /// Handles the next record, if there is one; `take` returns what becomes of it.
    ///
    /// # Errors
    /// As [`pop`](Self::pop).
    #[inline]
    pub fn pop_with<R>(
        &mut self,
        take: impl FnOnce(Received<'_>) -> (Disposition, R),
    ) -> Result<Option<R>, CorruptRing> {
        if !self.ring.ready(&self.map) {
            self.ring.publish_head(&self.map);
            return Ok(None);
        }
        self.take(take).map(Some)
    }

    /// Whether there is a next record, whose payload is in its slot.
    #[must_use]
    #[inline]
    pub fn next_is_inline(&self) -> bool {
        self.ring.ready(&self.map) && {
            let control = self
                .map
                .control(slot(&self.map, self.ring.next()))
                .load(Ordering::Relaxed);
            Control::decode(control).is_ok_and(|control| control.location == PayloadLocation::Slot)
        }
    }

    fn take<R>(&mut self, take: impl FnOnce(Received<'_>) -> (Disposition, R)) -> Result<R, CorruptRing> {
        let position = self.ring.next();
        let slot = slot(&self.map, position);
        let control = Control::decode(self.map.control(slot).load(Ordering::Relaxed))?;
        let content = self.map.content(slot);
        let mut header = [0; HEADER];
        // SAFETY: `decode` found no more than HEADER bytes of header, fewer than the slot has. They
        // may change concurrently, which changes the copy and nothing else.
        unsafe { ptr::copy_nonoverlapping(content, header.as_mut_ptr(), control.header) };
        // SAFETY: within the content, as `decode` checked that what follows fits in it.
        let after_header = unsafe { content.add(control.after_header()) }.cast_const();
        let source = match control.location {
            PayloadLocation::Slot => Source::Ring(after_header),
            PayloadLocation::Bulk => Source::Ring(self.bulk(after_header, control.payload)?),
            PayloadLocation::RefsInSlot => self.refer(after_header, &control)?,
            PayloadLocation::RefsInBulk => {
                let list = self.bulk(after_header, control.references * REFERENCE)?;
                self.refer(list, &control)?
            }
        };
        let used_bulk = match source {
            Source::Ring(_) => control.location == PayloadLocation::Bulk,
            Source::Referred { bulk, .. } => bulk || control.location == PayloadLocation::RefsInBulk,
        };
        let weight = if used_bulk { CREDIT } else { counted(control.payload) };
        let (after, taken) = take(Received {
            kind: control.kind,
            header: &header[..control.header],
            body: RecordBody {
                map: &self.map,
                segments: &self.segments,
                own: self.own,
                position,
                references: &self.references,
                source,
                len: control.payload,
            },
        });
        match after {
            Disposition::Consumed => self.credit_wakeup_pending |= self.ring.consumed(&self.map, weight),
            Disposition::Retained => self.ring.retain_next(weight),
            Disposition::Deferred => {}
        }
        Ok(taken)
    }

    /// Whether the oldest retained record was revoked: checked after its references were read.
    #[must_use]
    pub fn was_revoked(&self) -> bool {
        Consumer::was_revoked(&self.map, self.ring.done())
    }

    /// Releases the oldest retained record, or one consumed behind it.
    pub fn release(&mut self) {
        self.credit_wakeup_pending |= self.ring.release(&self.map);
    }

    fn bulk(&self, offset: *const u8, len: usize) -> Result<*const u8, CorruptRing> {
        // SAFETY: the eight bytes at `offset` are in the slot's content (`Control::fits`).
        let offset = u64::from_ne_bytes(unsafe { offset.cast::<[u8; 8]>().read() });
        let at = self
            .map
            .bulk(offset, len)
            .ok_or(CorruptRing("a payload outside the ring"))?;
        Ok(at.cast_const())
    }

    /// Copies the list of references, and checks all that can be checked before the bytes are read.
    fn refer(&mut self, list: *const u8, control: &Control) -> Result<Source, CorruptRing> {
        self.references.clear();
        let mut len = 0;
        let mut bulk = false;
        for index in 0..control.references {
            // SAFETY: `list` has that many references: in the slot's content by `Control::fits`, or
            // in the bulk area, which the caller requested. Each is copied before it is checked.
            let bytes = unsafe { list.add(index * REFERENCE).cast::<[u8; REFERENCE]>().read() };
            let reference = Reference::decode(&bytes)?;
            if let Reference::Bulk { offset, .. } = reference {
                self.map
                    .bulk(offset, reference.len())
                    .ok_or(CorruptRing("a reference outside the ring"))?;
                bulk = true;
            }
            len += reference.len();
            self.references.push(reference);
        }
        if len != control.payload {
            return Err(CorruptRing("the references do not add up to the payload"));
        }
        let revocable = self
            .references
            .iter()
            .any(|reference| !matches!(reference, Reference::Bulk { .. }));
        Ok(Source::Referred { revocable, bulk })
    }

    /// From now on the sender may access this process's memory directly: a thread that withdraws
    /// some finds its access word.
    pub(crate) fn enable_direct(&mut self) {
        self.capabilities.0 |= Capabilities::DIRECT.0;
        self.map.set(Field::Capabilities, self.capabilities.0);
    }

    /// Where the sender names its direct accesses to this process's memory.
    pub(crate) fn access_word(&self) -> &AtomicU64 {
        self.map.field(Field::Access)
    }

    /// Whether the sender waits for credits that were returned and must be woken: once per wait.
    #[must_use]
    pub fn credit_wakeup_pending(&mut self) -> bool {
        std::mem::take(&mut self.credit_wakeup_pending)
    }

    /// Before sleeping until woken. `false` when a record is there: the caller must not sleep.
    #[must_use]
    pub fn sleep(&mut self) -> bool {
        self.ring.sleep(&self.map)
    }

    /// Awake again: needs no wake-up.
    pub fn awake(&mut self) {
        self.ring.awake(&self.map);
    }

    /// Maps a segment that the sender sent over the connection, in the order of its announcements.
    ///
    /// # Errors
    /// When it is invalid, or cannot be mapped. The ring then uses no more segments.
    pub fn add_segment(&mut self, id: SegmentId, fd: OwnedFd) -> Result<(), UnfitSegment> {
        let added = self.segments.add(id, fd);
        if added.is_err() {
            self.capabilities.0 &= !Capabilities::SEGMENTS.0;
            self.map.set(Field::Capabilities, self.capabilities.0);
        }
        self.map.set(Field::Mapped, self.segments.tried());
        added
    }

    /// From now on the sender may share GPU memory.
    pub fn enable_device_memory(&mut self) {
        self.capabilities.0 |= Capabilities::DEVICES.0;
        self.map.set(Field::Capabilities, self.capabilities.0);
    }

    /// Announced GPU memory, in order among the segments, was imported; if not, no more is shared.
    pub fn add_device_memory(&mut self, imported: bool) {
        if !imported {
            self.capabilities.0 &= !Capabilities::DEVICES.0;
            self.map.set(Field::Capabilities, self.capabilities.0);
        }
        self.map.set(Field::Mapped, self.segments.skip());
    }

    /// The sender's segment is gone: records refer to it no more.
    pub fn remove_segment(&mut self, id: SegmentId) {
        self.segments.remove(id);
    }
}
