//! The content of a slot: the record of one packet.
//!
//! First the header bytes; from the next multiple of 8 on the payload itself or the references, 16
//! bytes each; or, if these do not fit in the slot, their offset in the bulk area.

use super::layout::CONTENT_LEN;
use super::segment::SegmentId;
use super::{CorruptRing, HEADER, LARGEST, REFERENCES};

/// The kind of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RecordKind {
    /// A packet from one queue pair to another.
    Packet,
    /// A UDP datagram that another process received for a queue pair of this one.
    Datagram,
}

/// A range of the sender's memory, or of the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reference {
    /// Of a segment that both map.
    Segment {
        /// Its number.
        id: SegmentId,
        /// The first byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Of the sender's address space, in the ring of a process to itself.
    Process {
        /// The first byte.
        addr: u64,
        /// Bytes.
        len: u32,
    },
    /// Of GPU memory, which the receiver has imported, and the GPU copies.
    Device {
        /// Its number.
        id: SegmentId,
        /// The first byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Of the ring's bulk area, from [`Sender::copy_in`](super::Sender::copy_in).
    Bulk {
        /// The first byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
}

impl Reference {
    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        let (Self::Segment { len, .. } | Self::Process { len, .. } | Self::Device { len, .. } | Self::Bulk { len, .. }) =
            *self;
        len as usize
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn part(self, skip: usize, len: usize) -> Self {
        let (skip, len) = (skip as u64, len as u32);
        match self {
            Self::Segment { id, offset, .. } => {
                let offset = offset.wrapping_add(skip);
                Self::Segment { id, offset, len }
            }
            Self::Process { addr, .. } => {
                let addr = addr.wrapping_add(skip);
                Self::Process { addr, len }
            }
            Self::Device { id, offset, .. } => {
                let offset = offset.wrapping_add(skip);
                Self::Device { id, offset, len }
            }
            Self::Bulk { offset, .. } => {
                let offset = offset.wrapping_add(skip);
                Self::Bulk { offset, len }
            }
        }
    }

    pub(super) fn encode(self) -> [u8; REFERENCE] {
        let (at, len, kind, id) = match self {
            Self::Segment { id, offset, len } => (offset, len, 1, id.0),
            Self::Process { addr, len } => (addr, len, 2, 0),
            Self::Bulk { offset, len } => (offset, len, 3, 0),
            Self::Device { id, offset, len } => (offset, len, 0, id.0),
        };
        let what = (kind << ID_BITS) | id;
        let mut bytes = [0; REFERENCE];
        bytes[..8].copy_from_slice(&at.to_ne_bytes());
        bytes[8..12].copy_from_slice(&len.to_ne_bytes());
        bytes[12..].copy_from_slice(&what.to_ne_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; REFERENCE]) -> Result<Self, CorruptRing> {
        let [at0, at1, at2, at3, at4, at5, at6, at7, len @ .., w0, w1, w2, w3] = *bytes;
        let at = u64::from_ne_bytes([at0, at1, at2, at3, at4, at5, at6, at7]);
        let (len, what) = (u32::from_ne_bytes(len), u32::from_ne_bytes([w0, w1, w2, w3]));
        let id = SegmentId(what & ((1 << ID_BITS) - 1));
        match what >> ID_BITS {
            1 => Ok(Self::Segment { id, offset: at, len }),
            2 => Ok(Self::Process { addr: at, len }),
            3 => Ok(Self::Bulk { offset: at, len }),
            0 if id.0 != 0 => Ok(Self::Device { id, offset: at, len }),
            _ => Err(CorruptRing("a reference of an unknown kind")),
        }
    }
}

pub(super) const ID_BITS: u32 = 30;
pub(super) const REFERENCE: usize = 16;

/// The payload of a record to send.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// These bytes are copied into the ring: [`LARGEST`] at most.
    Inline(&'a [u8]),
    /// The receiver copies from there: at most `REFERENCES`, together at most [`LARGEST`].
    Referred(&'a [Reference]),
}

/// A record to send.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// Its kind.
    pub kind: RecordKind,
    /// The packet's headers, or those of a forwarded datagram: [`HEADER`] bytes at most.
    pub header: &'a [u8],
    /// Its payload.
    pub payload: Payload<'a>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PayloadLocation {
    Slot,
    Bulk,
    RefsInSlot,
    RefsInBulk,
}

/// A slot's control word: all of its numbers, so that they are read at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Control {
    pub(super) kind: RecordKind,
    pub(super) location: PayloadLocation,
    pub(super) header: usize,
    pub(super) references: usize,
    pub(super) payload: usize,
}

impl Control {
    /// Offset in the slot's content of the payload, the references, or their offset.
    pub(super) fn after_header(&self) -> usize {
        self.header.next_multiple_of(8)
    }

    fn content(&self) -> usize {
        match self.location {
            PayloadLocation::Slot => self.payload,
            PayloadLocation::RefsInSlot => self.references * REFERENCE,
            PayloadLocation::Bulk | PayloadLocation::RefsInBulk => 8,
        }
    }

    pub(super) fn fits(&self) -> bool {
        self.after_header() + self.content() <= CONTENT_LEN
    }

    pub(super) fn encode(self) -> u64 {
        let kind = match self.kind {
            RecordKind::Packet => 1,
            RecordKind::Datagram => 2,
        };
        let location = match self.location {
            PayloadLocation::Slot => 1,
            PayloadLocation::Bulk => 2,
            PayloadLocation::RefsInSlot => 3,
            PayloadLocation::RefsInBulk => 4,
        };
        let [header, references, payload] = [self.header, self.references, self.payload].map(|n| n as u64);
        kind | location << 8 | header << 16 | references << 24 | payload << 32
    }

    /// Decodes an untrusted word: sizes are within their limits, and the content fits in a slot.
    pub(super) fn decode(word: u64) -> Result<Self, CorruptRing> {
        let [kind, location, header, references, payload @ ..] = word.to_le_bytes();
        let kind = match kind {
            1 => RecordKind::Packet,
            2 => RecordKind::Datagram,
            _ => return Err(CorruptRing("a record of an unknown kind")),
        };
        let location = match location {
            1 => PayloadLocation::Slot,
            2 => PayloadLocation::Bulk,
            3 => PayloadLocation::RefsInSlot,
            4 => PayloadLocation::RefsInBulk,
            _ => return Err(CorruptRing("a record with an unknown payload location")),
        };
        let control = Self {
            kind,
            location,
            header: header.into(),
            references: references.into(),
            payload: u32::from_le_bytes(payload) as usize,
        };
        if control.header > HEADER || control.references > REFERENCES || control.payload > LARGEST || !control.fits() {
            return Err(CorruptRing("a record above the size limits"));
        }
        Ok(control)
    }
}
