//! The sending end of a lane.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::{ALIGN, CONTENT, Field, MOST_BULK, Mapping, Shape};
use super::receiver::Abilities;
use super::record::{Control, Form, Payload, REFERENCE, Record, Reference};
use super::ring::{Producer, slot};
use super::segment::SegmentId;
use super::{Broken, HEADER, LARGEST, REFERENCES};

/// There is no room for another record: see [`Sender::room`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the lane is full")]
pub struct Full;

/// Whose memory a record refers to: by what it can be revoked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Referrer<'a> {
    /// The queue pair that sends it.
    pub qpn: u32,
    /// The keys of the regions that it refers to.
    pub keys: &'a [u32],
}

/// The sending end of a lane. Used by one thread at a time.
#[derive(Debug)]
pub struct Sender {
    map: Mapping,
    ring: Producer,
    bulk: Bulk,
    /// What was sent in each slot, kept here where no neighbour can write.
    sent: Box<[Sent]>,
    /// The position behind the last record that refers to memory.
    referred: u64,
    /// The segments that the receiver was sent and not told to forget, each with its place in this order; it maps them in the same.
    announced: Vec<(u64, SegmentId)>,
    /// How many it was sent, ever.
    announcements: u64,
    /// For the receiver to try whether it can read this process; stays where it is.
    _probe: Box<AtomicU64>,
}

#[derive(Clone, Debug, Default)]
struct Sent {
    /// Up to where the bulk area is taken with it.
    bulk_end: u64,
    /// It refers to memory outside the lane.
    refers: bool,
    qpn: u32,
    keys: Vec<u32>,
}

/// The bulk area: a ring of bytes. Positions count bytes and never wrap. What one record takes is in one piece.
#[derive(Debug)]
struct Bulk {
    len: u64,
    /// Up to where it is taken by records that are sent.
    sent: u64,
    /// From where and up to where by the one that is being written; both are `sent` when it takes nothing.
    begun: u64,
    taken: u64,
    /// Up to where it was given back.
    freed: u64,
}

impl Bulk {
    /// Where the next record's bytes begin: not so near the end that they would not be in one piece.
    fn start(&self) -> u64 {
        // Nothing is taken: from the beginning, which is likelier in the caches than what was used longest ago.
        if self.sent == self.freed {
            return self.sent.next_multiple_of(self.len);
        }
        let left = self.len - self.sent % self.len;
        if left < MOST_BULK as u64 {
            self.sent + left
        } else {
            self.sent
        }
    }

    fn has_room(&self) -> bool {
        // When nothing is taken all of it is free, wherever the next begins.
        self.sent == self.freed || self.start() + MOST_BULK as u64 - self.freed <= self.len
    }

    /// The offset of `len` bytes for the record that is being written, which may take `most` in all. There is room for [`MOST_BULK`].
    fn take(&mut self, len: usize, most: usize) -> Option<u64> {
        if self.taken == self.sent {
            (self.begun, self.taken) = (self.start(), self.start());
            if self.sent == self.freed {
                (self.sent, self.freed) = (self.taken, self.taken);
            }
        }
        let end = self.taken + len.next_multiple_of(ALIGN) as u64;
        if end - self.begun > most as u64 {
            return None;
        }
        let offset = self.taken % self.len;
        self.taken = end;
        Some(offset)
    }

    /// The record that is being written takes nothing.
    fn discard(&mut self) {
        (self.begun, self.taken) = (self.sent, self.sent);
    }

    /// The record that was being written is sent.
    fn commit(&mut self) {
        self.sent = self.taken;
        self.begun = self.taken;
    }
}

/// Bytes of a cache line, at which slots begin.
const LINE: usize = 64;

/// When so much of the bulk area is in use the sender looks what was given back, though there is more: so that it goes on where the caches have it.
const BULK_IN_CACHE: u64 = 128 << 10;

impl Sender {
    /// A new lane, and the descriptor to give to the process at its other end.
    ///
    /// # Errors
    /// When the machine has no memory or the process no descriptor left.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        Self::with_shape(Shape::default())
    }

    /// A new lane of a shape.
    ///
    /// # Errors
    /// As [`create`](Self::create); or when the shape is none.
    pub fn with_shape(shape: Shape) -> io::Result<(Self, OwnedFd)> {
        let (map, fd) = Mapping::create(shape)?;
        // What is there is found by whoever really reads this process, and nobody else.
        let probe = Box::new(AtomicU64::new(0));
        let value = ptr::from_ref(&*probe).addr() as u64 ^ u64::from(std::process::id()).rotate_left(32) ^ PROBE;
        probe.store(value, Ordering::Relaxed);
        map.set(Field::ProbeAddress, ptr::from_ref(&*probe).expose_provenance() as u64);
        map.set(Field::ProbeValue, value);
        let sender = Self {
            map,
            ring: Producer::default(),
            bulk: Bulk {
                len: shape.bulk as u64,
                sent: 0,
                begun: 0,
                taken: 0,
                freed: 0,
            },
            sent: vec![Sent::default(); shape.slots].into_boxed_slice(),
            referred: 0,
            announced: Vec::new(),
            announcements: 0,
            _probe: probe,
        };
        Ok((sender, fd))
    }

    /// Whether there is room for a record, whatever it is: a slot, and what the largest takes of the bulk area.
    ///
    /// # Errors
    /// When the receiver says what cannot be.
    pub fn room(&mut self) -> Result<bool, Broken> {
        if !self.has_room() || self.bulk.sent - self.bulk.freed > BULK_IN_CACHE {
            self.refresh()?;
        }
        Ok(self.has_room())
    }

    /// Asks to be called by the receiver when there is room: before waiting for that without looking. Whether there is already.
    ///
    /// # Errors
    /// As [`room`](Self::room).
    pub fn wait_for_room(&mut self) -> Result<bool, Broken> {
        let before = self.ring.head();
        self.ring.starve(&self.map)?;
        self.free(before);
        Ok(self.has_room())
    }

    fn has_room(&self) -> bool {
        self.ring.has_slot(&self.map) && self.bulk.has_room()
    }

    fn refresh(&mut self) -> Result<(), Broken> {
        let before = self.ring.head();
        self.ring.refresh(&self.map)?;
        self.free(before);
        Ok(())
    }

    /// Gives back of the bulk area what was consumed since the receiver was at `before`.
    fn free(&mut self, before: u64) {
        if self.ring.head() != before {
            // That slot has become free by this, so nothing was written to it since.
            let last = slot(&self.map, self.ring.head() - 1);
            self.bulk.freed = self.bulk.freed.max(self.sent[last as usize].bulk_end);
        }
    }

    /// Room in the bulk area for a part of the next record's payload: [`LARGEST`] bytes in all. What it gives is to be written, by raw copies only as the receiver can write there
    /// too, and named by a reference of the record that is pushed next, or given up by [`discard`](Self::discard).
    ///
    /// # Errors
    /// When there is none.
    pub fn copy_in(&mut self, len: usize) -> Result<(Reference, *mut u8), Full> {
        if !self.has_room() {
            return Err(Full);
        }
        let (offset, wire) = match (self.bulk.take(len, LARGEST + REFERENCES * ALIGN), u32::try_from(len)) {
            (Some(offset), Ok(len)) => (offset, len),
            _ => return Err(Full),
        };
        let at = self.map.bulk(offset, len).ok_or(Full)?;
        Ok((Reference::Bulk { offset, len: wire }, at))
    }

    /// Gives up what [`copy_in`](Self::copy_in) gave since the last record.
    pub fn discard(&mut self) {
        self.bulk.discard();
    }

    /// Sends a record. The receiver may have it at once; whether it must be rung for it is asked with [`needs_wake`](Self::needs_wake).
    ///
    /// # Errors
    /// When there is no [`room`](Self::room).
    ///
    /// # Panics
    /// When header, payload or references are longer than [`HEADER`], [`LARGEST`], [`REFERENCES`].
    pub fn push(&mut self, record: &Record<'_>, referrer: Referrer<'_>) -> Result<(), Full> {
        assert!(
            record.header.len() <= HEADER,
            "a header of {} bytes",
            record.header.len()
        );
        if !self.has_room() {
            return Err(Full);
        }
        let slot = slot(&self.map, self.ring.tail());
        let content = self.map.content(slot);
        if let Payload::Inline(bytes) = record.payload
            && self.push_line(slot, record, bytes)
        {
            return Ok(());
        }
        // SAFETY: a header is at most HEADER bytes, fewer than a slot's content has; the slot is ours until it is published.
        unsafe { put(record.header, content) };
        let control = match record.payload {
            Payload::Inline(bytes) => self.put_payload(record, bytes, content),
            Payload::Referred(references) => self.put_references(record, references, content),
        };
        self.map.control(slot).store(control.encode(), Ordering::Relaxed);
        let refers = matches!(record.payload, Payload::Referred(references) if references.iter().any(revocable));
        let sent = &mut self.sent[slot as usize];
        sent.refers = refers;
        if refers {
            sent.qpn = referrer.qpn;
            sent.keys.clear();
            sent.keys.extend_from_slice(referrer.keys);
            self.referred = self.ring.tail() + 1;
        }
        self.bulk.commit();
        sent.bulk_end = self.bulk.sent;
        self.ring.publish(&self.map);
        Ok(())
    }

    /// Sends a record all of which is in the slot's first cache line. It is put together elsewhere: the receiver, which waits looking at that line, would take it away between the first byte and the last. False where it is longer;
    /// nothing was sent then.
    fn push_line(&mut self, slot: u64, record: &Record<'_>, bytes: &[u8]) -> bool {
        let control = Control {
            kind: record.kind,
            form: Form::Slot,
            header: record.header.len(),
            references: 0,
            payload: bytes.len(),
        };
        let mut line = [0; LINE - CONTENT];
        let Some(payload) = line.get_mut(control.behind_header()..control.behind_header() + bytes.len()) else {
            return false;
        };
        payload.copy_from_slice(bytes);
        line[..record.header.len()].copy_from_slice(record.header);
        self.bulk.discard();
        let sent = &mut self.sent[slot as usize];
        (sent.refers, sent.bulk_end) = (false, self.bulk.sent);
        // SAFETY: a slot's content has as many bytes and more; the slot is ours until it is published.
        unsafe { self.map.content(slot).cast::<[u8; LINE - CONTENT]>().write(line) };
        self.map.control(slot).store(control.encode(), Ordering::Relaxed);
        self.ring.publish(&self.map);
        true
    }

    fn put_payload(&mut self, record: &Record<'_>, bytes: &[u8], content: *mut u8) -> Control {
        assert!(bytes.len() <= LARGEST, "a payload of {} bytes", bytes.len());
        self.discard();
        let mut control = Control {
            kind: record.kind,
            form: Form::Slot,
            header: record.header.len(),
            references: 0,
            payload: bytes.len(),
        };
        self.put_behind(&mut control, Form::Bulk, bytes, content);
        control
    }

    fn put_references(&mut self, record: &Record<'_>, references: &[Reference], content: *mut u8) -> Control {
        assert!(references.len() <= REFERENCES, "{} references", references.len());
        let payload = references.iter().map(Reference::len).sum();
        assert!(payload <= LARGEST, "a payload of {payload} bytes");
        let mut control = Control {
            kind: record.kind,
            form: Form::Referred,
            header: record.header.len(),
            references: references.len(),
            payload,
        };
        let mut bytes = [0; REFERENCES * REFERENCE];
        for (reference, bytes) in references.iter().zip(bytes.as_chunks_mut().0) {
            *bytes = reference.encode();
        }
        self.put_behind(
            &mut control,
            Form::ReferredByBulk,
            &bytes[..references.len() * REFERENCE],
            content,
        );
        control
    }

    /// Puts bytes behind the header, or into the bulk area where they don't fit.
    fn put_behind(&mut self, control: &mut Control, otherwise: Form, bytes: &[u8], content: *mut u8) {
        // SAFETY: a header's length, rounded up, is within the content.
        let behind = unsafe { content.add(control.behind_header()) };
        if control.fits() {
            // SAFETY: they fit behind the header; the slot is ours until it is published.
            return unsafe { put(bytes, behind) };
        }
        control.form = otherwise;
        let offset = self.bulk.take(bytes.len(), MOST_BULK);
        let Some((offset, bulk)) = offset.and_then(|offset| Some((offset, self.map.bulk(offset, bytes.len())?))) else {
            unreachable!("a record may take MOST_BULK in one piece, and there was room")
        };
        // SAFETY: within the bulk area, and ours until the record is consumed; then eight bytes behind the header, which is shorter than the slot by more.
        unsafe {
            put(bytes, bulk);
            put(&offset.to_ne_bytes(), behind);
        }
    }

    /// After one record or several: whether the receiver sleeps, and has to be rung. Said once for each time that it sleeps.
    #[must_use]
    pub fn needs_wake(&mut self) -> bool {
        self.ring.must_ring(&self.map)
    }

    /// Takes back what refers to a region: when this returns, whatever the memory holds from then on is taken for a message by nobody.
    ///
    /// # Errors
    /// As [`room`](Self::room). All that is to be was taken back nevertheless.
    pub fn revoke_region(&mut self, key: u32) -> Result<(), Broken> {
        self.revoke(|sent| sent.keys.contains(&key))
    }

    /// Takes back what a queue pair sent and refers to memory, as [`revoke_region`](Self::revoke_region) does.
    ///
    /// # Errors
    /// As there.
    pub fn revoke_qp(&mut self, qpn: u32) -> Result<(), Broken> {
        self.revoke(|sent| sent.qpn == qpn)
    }

    fn revoke(&mut self, doomed: impl Fn(&Sent) -> bool) -> Result<(), Broken> {
        if self.referred <= self.ring.head() {
            return Ok(());
        }
        let refreshed = self.refresh();
        for position in self.ring.head()..self.referred {
            let sent = &self.sent[slot(&self.map, position) as usize];
            if sent.refers && doomed(sent) {
                self.ring.revoke(&self.map, position);
            }
        }
        self.ring.settle();
        refreshed
    }

    /// The receiver has been sent a segment over the connection of the two processes, the next after those told before.
    pub fn announce(&mut self, id: SegmentId) {
        self.announcements += 1;
        self.announced.push((self.announcements, id));
    }

    /// A segment is given up. Whether the receiver was sent it, and so is to be told.
    pub fn forget(&mut self, id: SegmentId) -> bool {
        let before = self.announced.len();
        self.announced.retain(|(_, known)| *known != id);
        self.announced.len() != before
    }

    /// Whether the receiver was sent the segment.
    #[must_use]
    pub fn announced(&self, id: SegmentId) -> bool {
        self.announced.iter().any(|(_, known)| *known == id)
    }

    /// Whether records may refer to the segment: the receiver has mapped it.
    #[must_use]
    pub fn can_refer(&self, id: SegmentId) -> bool {
        let place = self.announced.iter().find(|(_, known)| *known == id);
        place.is_some_and(|(place, _)| *place <= self.map.get(Field::Mapped))
            && self.abilities().contains(Abilities::SEGMENTS)
    }

    /// Whether the receiver copies from GPUs' memory that it is told of.
    #[must_use]
    pub fn peer_takes_devices(&self) -> bool {
        self.abilities().contains(Abilities::DEVICES)
    }

    /// Whether records may refer to memory of a GPU that was [announced](Self::announce): the receiver has imported it.
    #[must_use]
    pub fn can_refer_device(&self, id: SegmentId) -> bool {
        let place = self.announced.iter().find(|(_, known)| *known == id);
        place.is_some_and(|(place, _)| *place <= self.map.get(Field::Mapped)) && self.peer_takes_devices()
    }

    /// Whether records may refer to this process' memory by address: the receiver has tried that it can read it.
    #[must_use]
    pub fn peer_reads_memory(&self) -> bool {
        self.abilities().contains(Abilities::PROCESS)
    }

    fn abilities(&self) -> Abilities {
        Abilities(self.map.get(Field::Abilities))
    }
}

/// Any number that is not found by chance.
const PROBE: u64 = 0x9d3c_5a71_e84f_2b06;

/// Whether what it names may be somebody else's before the receiver has read it.
fn revocable(reference: &Reference) -> bool {
    !matches!(reference, Reference::Bulk { .. })
}

/// # Safety
/// `at` is writable for as many bytes, and no part of them.
unsafe fn put(bytes: &[u8], at: *mut u8) {
    // SAFETY: as the contract says.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
}
