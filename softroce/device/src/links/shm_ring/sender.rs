//! The sending end of a shm ring.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::{ALIGN, CONTENT_OFFSET, Field, MAX_BULK, Mapping, RingGeometry};
use super::receiver::Capabilities;
use super::record::{Control, Payload, PayloadLocation, REFERENCE, Record, Reference};
use super::ring::{Producer, slot};
use super::segment::SegmentId;
use super::{CorruptRing, HEADER, IN_FLIGHT, LARGEST, REFERENCES, counted};

/// There is no space for another record: see [`Sender::has_space`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the shm ring is full")]
pub struct RingFull;

/// By what a record's memory references can be revoked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Referrer<'a> {
    /// The queue pair that sends it.
    pub qpn: u32,
    /// The keys of the regions that it refers to.
    pub keys: &'a [u32],
}

/// The sending end of a shm ring. Used by one thread at a time.
#[derive(Debug)]
pub struct Sender {
    map: Mapping,
    ring: Producer,
    bulk: Bulk,
    /// The record in each slot, as sent; kept where the peer cannot write.
    sent: Box<[Sent]>,
    /// Bytes of payloads that are [`counted`]: of all records, and of those consumed.
    bytes_sent: u64,
    bytes_freed: u64,
    /// The position behind the last record that refers to memory.
    referred: u64,
    /// Announced to the receiver and not withdrawn, each with its index: it maps them in order.
    announced: Vec<(u64, SegmentId)>,
    announcements: u64,
}

#[derive(Clone, Debug, Default)]
struct Sent {
    bulk_end: u64,
    bytes_end: u64,
    refers: bool,
    qpn: u32,
    keys: Vec<u32>,
}

/// A ring of bytes. Positions never wrap. One record's space is contiguous.
#[derive(Debug)]
struct Bulk {
    len: u64,
    /// The end of the space of sent records.
    sent: u64,
    /// The space of the record being written; both are `sent` when it has none.
    start: u64,
    end: u64,
    /// The end of the space that was freed.
    freed: u64,
}

impl Bulk {
    /// Where the next record's space begins: not so near the end that it could not be contiguous.
    fn start(&self) -> u64 {
        // Nothing is in use: the beginning is likelier in the caches.
        if self.sent == self.freed {
            return self.sent.next_multiple_of(self.len);
        }
        let left = self.len - self.sent % self.len;
        if left < MAX_BULK as u64 {
            self.sent + left
        } else {
            self.sent
        }
    }

    fn has_known_space(&self) -> bool {
        // When nothing is in use all of it is free, wherever the next begins.
        self.sent == self.freed || self.start() + MAX_BULK as u64 - self.freed <= self.len
    }

    /// The offset of `len` bytes for the record being written, which may use `most` in all. The
    /// caller has checked that [`MAX_BULK`] are free.
    fn take(&mut self, len: usize, most: usize) -> Option<u64> {
        if self.end == self.sent {
            (self.start, self.end) = (self.start(), self.start());
            if self.sent == self.freed {
                (self.sent, self.freed) = (self.end, self.end);
            }
        }
        let end = self.end + len.next_multiple_of(ALIGN) as u64;
        if end - self.start > most as u64 {
            return None;
        }
        let offset = self.end % self.len;
        self.end = end;
        Some(offset)
    }

    fn discard(&mut self) {
        (self.start, self.end) = (self.sent, self.sent);
    }

    fn commit(&mut self) {
        self.sent = self.end;
        self.start = self.end;
    }
}

const CACHE_LINE: usize = 64;

/// With more of the bulk area in use the sender reads the head, to reuse what is in the caches.
const BULK_IN_CACHE: u64 = 128 << 10;

impl Sender {
    /// Creates a ring, and the descriptor for the process at its other end.
    ///
    /// # Errors
    /// When there is no memory or descriptor left.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        Self::with_geometry(RingGeometry::default())
    }

    /// Fails as [`create`](Self::create), or when the geometry is impossible.
    pub(crate) fn with_geometry(geometry: RingGeometry) -> io::Result<(Self, OwnedFd)> {
        let (map, fd) = Mapping::create(geometry)?;
        let sender = Self {
            map,
            ring: Producer::default(),
            bulk: Bulk {
                len: geometry.bulk as u64,
                sent: 0,
                start: 0,
                end: 0,
                freed: 0,
            },
            sent: vec![Sent::default(); geometry.slots].into_boxed_slice(),
            bytes_sent: 0,
            bytes_freed: 0,
            referred: 0,
            announced: Vec::new(),
            announcements: 0,
        };
        Ok((sender, fd))
    }

    /// Whether there is space for any record: a slot, the largest possible bulk space, and less
    /// than 4 MiB of long payloads in flight.
    ///
    /// # Errors
    /// When the receiver's head is impossible.
    pub fn has_space(&mut self) -> Result<bool, CorruptRing> {
        if !self.has_known_space() || self.bulk.sent - self.bulk.freed > BULK_IN_CACHE {
            self.refresh()?;
        }
        Ok(self.has_known_space())
    }

    /// Requests a wake-up when credits are returned. Whether there is space already.
    ///
    /// # Errors
    /// As [`has_space`](Self::has_space).
    pub fn request_credit_wakeup(&mut self) -> Result<bool, CorruptRing> {
        let before = self.ring.head();
        self.ring.request_credit_wakeup(&self.map)?;
        self.free(before);
        Ok(self.has_known_space())
    }

    fn has_known_space(&self) -> bool {
        self.ring.has_slot(&self.map) && self.bulk.has_known_space() && self.bytes_sent - self.bytes_freed < IN_FLIGHT
    }

    fn refresh(&mut self) -> Result<(), CorruptRing> {
        let before = self.ring.head();
        self.ring.refresh(&self.map)?;
        self.free(before);
        Ok(())
    }

    /// Frees the space consumed since the receiver was at `before`.
    fn free(&mut self, before: u64) {
        if self.ring.head() != before {
            // This slot has become free just now, so that nothing was written to it since.
            let last = slot(&self.map, self.ring.head() - 1);
            let sent = &self.sent[last as usize];
            self.bulk.freed = self.bulk.freed.max(sent.bulk_end);
            self.bytes_freed = sent.bytes_end;
        }
    }

    /// Bulk space for a part of the next record's payload: [`LARGEST`] bytes in all. The caller
    /// writes it, by raw copies only as the receiver can write there too, and names it in a
    /// reference of the next record, or frees it with [`discard`](Self::discard).
    ///
    /// # Errors
    /// When there is none.
    pub fn copy_in(&mut self, len: usize) -> Result<(Reference, *mut u8), RingFull> {
        if !self.has_known_space() {
            return Err(RingFull);
        }
        let (offset, wire) = match (self.bulk.take(len, LARGEST + REFERENCES * ALIGN), u32::try_from(len)) {
            (Some(offset), Ok(len)) => (offset, len),
            _ => return Err(RingFull),
        };
        let at = self.map.bulk(offset, len).ok_or(RingFull)?;
        Ok((Reference::Bulk { offset, len: wire }, at))
    }

    /// Frees the space that [`copy_in`](Self::copy_in) gave since the last record.
    pub fn discard(&mut self) {
        self.bulk.discard();
    }

    /// Sends a record; `needs_wake` returns whether the receiver must be woken for it.
    ///
    /// # Errors
    /// When there is no [space](Self::has_space).
    ///
    /// # Panics
    /// When header, payload or references are longer than [`HEADER`], [`LARGEST`], `REFERENCES`.
    pub fn push(&mut self, record: &Record<'_>, referrer: Referrer<'_>) -> Result<(), RingFull> {
        assert!(
            record.header.len() <= HEADER,
            "a header of {} bytes",
            record.header.len()
        );
        if !self.has_known_space() {
            return Err(RingFull);
        }
        let slot = slot(&self.map, self.ring.tail());
        let content = self.map.content(slot);
        if let Payload::Inline(bytes) = record.payload
            && self.push_cache_line(slot, record, bytes)
        {
            return Ok(());
        }
        // SAFETY: a header is at most HEADER bytes, fewer than a slot's content has; the slot is
        // ours until it is published.
        unsafe { put(record.header, content) };
        let control = match record.payload {
            Payload::Inline(bytes) => self.put_payload(record, bytes, content),
            Payload::Referred(references) => self.put_references(record, references, content),
        };
        self.map.control(slot).store(control.encode(), Ordering::Relaxed);
        let refers = matches!(record.payload, Payload::Referred(references) if references.iter().any(is_revocable));
        let sent = &mut self.sent[slot as usize];
        sent.refers = refers;
        if refers {
            sent.qpn = referrer.qpn;
            sent.keys.clear();
            sent.keys.extend_from_slice(referrer.keys);
            self.referred = self.ring.tail() + 1;
        }
        self.bulk.commit();
        self.bytes_sent += counted(control.payload);
        (sent.bulk_end, sent.bytes_end) = (self.bulk.sent, self.bytes_sent);
        self.ring.publish(&self.map);
        Ok(())
    }

    /// Sends a record that fits in the slot's first cache line, or returns false. It is assembled
    /// elsewhere, as the polling receiver would fetch the line between the first byte and the last.
    fn push_cache_line(&mut self, slot: u64, record: &Record<'_>, bytes: &[u8]) -> bool {
        let control = Control {
            kind: record.kind,
            location: PayloadLocation::Slot,
            header: record.header.len(),
            references: 0,
            payload: bytes.len(),
        };
        let mut line = [0; CACHE_LINE - CONTENT_OFFSET];
        let Some(payload) = line.get_mut(control.after_header()..control.after_header() + bytes.len()) else {
            return false;
        };
        payload.copy_from_slice(bytes);
        line[..record.header.len()].copy_from_slice(record.header);
        self.bulk.discard();
        let sent = &mut self.sent[slot as usize];
        (sent.refers, sent.bulk_end, sent.bytes_end) = (false, self.bulk.sent, self.bytes_sent);
        // SAFETY: a slot's content has more bytes; the slot is ours until it is published.
        unsafe {
            self.map
                .content(slot)
                .cast::<[u8; CACHE_LINE - CONTENT_OFFSET]>()
                .write(line)
        };
        self.map.control(slot).store(control.encode(), Ordering::Relaxed);
        self.ring.publish(&self.map);
        true
    }

    fn put_payload(&mut self, record: &Record<'_>, bytes: &[u8], content: *mut u8) -> Control {
        assert!(bytes.len() <= LARGEST, "a payload of {} bytes", bytes.len());
        self.discard();
        let mut control = Control {
            kind: record.kind,
            location: PayloadLocation::Slot,
            header: record.header.len(),
            references: 0,
            payload: bytes.len(),
        };
        self.put_behind(&mut control, PayloadLocation::Bulk, bytes, content);
        control
    }

    fn put_references(&mut self, record: &Record<'_>, references: &[Reference], content: *mut u8) -> Control {
        assert!(references.len() <= REFERENCES, "{} references", references.len());
        let payload = references.iter().map(Reference::len).sum();
        assert!(payload <= LARGEST, "a payload of {payload} bytes");
        let mut control = Control {
            kind: record.kind,
            location: PayloadLocation::RefsInSlot,
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
            PayloadLocation::RefsInBulk,
            &bytes[..references.len() * REFERENCE],
            content,
        );
        control
    }

    /// Puts bytes behind the header, or into the bulk area if they do not fit.
    fn put_behind(&mut self, control: &mut Control, otherwise: PayloadLocation, bytes: &[u8], content: *mut u8) {
        // SAFETY: a header's length, rounded up, is within the content.
        let after_header = unsafe { content.add(control.after_header()) };
        if control.fits() {
            // SAFETY: they fit behind the header; the slot is ours until it is published.
            return unsafe { put(bytes, after_header) };
        }
        control.location = otherwise;
        let offset = self.bulk.take(bytes.len(), MAX_BULK);
        let Some((offset, bulk)) = offset.and_then(|offset| Some((offset, self.map.bulk(offset, bytes.len())?))) else {
            unreachable!("a record may take MAX_BULK of contiguous space, which was checked")
        };
        // SAFETY: within the bulk area, and ours until the record is consumed; then eight bytes
        // behind the header, which is shorter than the slot by more.
        unsafe {
            put(bytes, bulk);
            put(&offset.to_ne_bytes(), after_header);
        }
    }

    /// Whether the receiver must be woken for published records. Once for each sleep.
    #[must_use]
    pub(crate) fn needs_wake(&mut self) -> bool {
        self.ring.must_wake(&self.map)
    }

    /// Revokes references to a region: nothing written there from now on is taken for a message.
    ///
    /// # Errors
    /// As [`has_space`](Self::has_space). The references are revoked nevertheless.
    pub fn revoke_region(&mut self, key: u32) -> Result<(), CorruptRing> {
        self.revoke(|sent| sent.keys.contains(&key))
    }

    /// As [`revoke_region`](Self::revoke_region), for a queue pair's records.
    pub fn revoke_qp(&mut self, qpn: u32) -> Result<(), CorruptRing> {
        self.revoke(|sent| sent.qpn == qpn)
    }

    fn revoke(&mut self, matches: impl Fn(&Sent) -> bool) -> Result<(), CorruptRing> {
        if self.referred <= self.ring.head() {
            return Ok(());
        }
        let refreshed = self.refresh();
        for position in self.ring.head()..self.referred {
            let sent = &self.sent[slot(&self.map, position) as usize];
            if sent.refers && matches(sent) {
                self.ring.revoke(&self.map, position);
            }
        }
        self.ring.revoke_fence();
        refreshed
    }

    /// The segment was sent to the receiver, after those announced before.
    pub fn announce(&mut self, id: SegmentId) {
        self.announcements += 1;
        self.announced.push((self.announcements, id));
    }

    /// A segment is withdrawn. Whether it was announced, and the receiver must be notified.
    pub(crate) fn withdraw(&mut self, id: SegmentId) -> bool {
        let before = self.announced.len();
        self.announced.retain(|(_, known)| *known != id);
        self.announced.len() != before
    }

    #[must_use]
    pub(crate) fn is_announced(&self, id: SegmentId) -> bool {
        self.announced.iter().any(|(_, known)| *known == id)
    }

    /// Whether records may refer to the segment: the receiver has mapped it.
    #[must_use]
    pub(crate) fn can_reference(&self, id: SegmentId) -> bool {
        self.is_mapped(id) && self.capabilities().contains(Capabilities::SEGMENTS)
    }

    fn is_mapped(&self, id: SegmentId) -> bool {
        let place = self.announced.iter().find(|(_, known)| *known == id);
        place.is_some_and(|(place, _)| *place <= self.map.get(Field::Mapped))
    }

    #[must_use]
    pub(crate) fn peer_supports_devices(&self) -> bool {
        self.capabilities().contains(Capabilities::DEVICES)
    }

    /// Whether the receiver has imported GPU memory that was [announced](Self::announce).
    #[must_use]
    pub(crate) fn can_reference_device(&self, id: SegmentId) -> bool {
        self.is_mapped(id) && self.peer_supports_devices()
    }

    /// Records sent, and how many of them the receiver has returned the slots of.
    pub(crate) fn progress(&self) -> (u64, u64) {
        (self.ring.tail(), self.map.get(Field::Head))
    }

    /// Where this process names its direct accesses to the receiver's memory, if that has
    /// [enabled](super::Receiver::enable_direct) them.
    #[inline]
    pub(crate) fn access_word(&self) -> Option<&AtomicU64> {
        let enabled = self.capabilities().contains(Capabilities::DIRECT);
        enabled.then(|| self.map.field(Field::Access))
    }

    pub(crate) fn is_receiver_asleep(&self) -> bool {
        self.map.get(Field::Asleep) != 0
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities(self.map.get(Field::Capabilities))
    }
}

/// Whether the memory may be reused before the receiver has read it.
fn is_revocable(reference: &Reference) -> bool {
    !matches!(reference, Reference::Bulk { .. })
}

/// # Safety
/// `at` is writable for as many bytes, and no part of them.
unsafe fn put(bytes: &[u8], at: *mut u8) {
    // SAFETY: as the contract says.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
}
