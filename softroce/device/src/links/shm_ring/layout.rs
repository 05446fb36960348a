//! The memfd of a shm ring: its layout, its creation, and the checks of one from another process.
//!
//! ```text
//! 0      magic, slots, bulk bytes (written once, before the descriptor is sent)
//! 64     the sender's word: it waits for credits
//! 128    the receiver's words: head; how many segments it has mapped; its capabilities
//! 192    the receiver sleeps: cleared by the sender
//! 256    what the sender accesses directly in the receiver's memory ([`direct`](crate::direct))
//! 4096   slots of 256 bytes: tag, control, the record's content; at the end, revoked
//! …      the bulk area
//! ```
//! Words that different processes write often are in cache lines of their own. Bits that are
//! written once need no model.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::ProtFlags;

use super::{LARGEST, REFERENCES, ring};
use crate::mapping::SharedMapping;

/// "DBRING" and the version of this layout.
const MAGIC: u64 = u64::from_be_bytes(*b"DBRING\0\x04");

pub(super) const SLOT: usize = 256;
pub(super) const CONTENT_OFFSET: usize = 16;
pub(super) const CONTENT_LEN: usize = REVOKED - CONTENT_OFFSET;

const HEADER_AREA: usize = 4096;
const TAG: usize = 0;
const CONTROL: usize = 8;
/// At the end, so that all of a short message fits in the first cache line.
const REVOKED: usize = SLOT - 8;

/// The most bulk space of a record: the largest payload in aligned pieces, and their list.
pub(super) const MAX_BULK: usize = LARGEST + REFERENCES * (ALIGN + 16);
/// Alignment of pieces in the bulk area.
pub(super) const ALIGN: usize = 64;

/// The size of a shm ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingGeometry {
    /// Slots, one for each record: a power of two.
    pub slots: usize,
    /// Bytes of the bulk area: a multiple of 4096, at least twice the largest payload. Paged in on
    /// use.
    pub bulk: usize,
}

impl Default for RingGeometry {
    fn default() -> Self {
        Self {
            slots: 512,
            bulk: 1 << 20,
        }
    }
}

impl RingGeometry {
    /// The file's size, if the geometry is possible.
    fn size(self) -> Option<NonZeroUsize> {
        let possible = self.slots.is_power_of_two()
            && (2..=1 << 16).contains(&self.slots)
            && self.bulk.is_multiple_of(4096)
            && (2 * MAX_BULK..=1 << 30).contains(&self.bulk);
        let size = (HEADER_AREA + self.slots * SLOT).next_multiple_of(4096) + self.bulk;
        NonZeroUsize::new(size).filter(|_| possible)
    }

    fn bulk_start(self) -> usize {
        (HEADER_AREA + self.slots * SLOT).next_multiple_of(4096)
    }
}

#[derive(Clone, Copy, Debug)]
#[repr(usize)]
pub(super) enum Field {
    Magic = 0,
    Slots = 8,
    Bulk = 16,
    CreditWanted = 64,
    Head = 128,
    /// How many of the announced segments the receiver has mapped.
    Mapped = 136,
    /// Bits of `receiver::Capabilities`.
    Capabilities = 144,
    Asleep = 192,
    Access = 256,
}

#[derive(Debug)]
pub(super) struct Mapping {
    /// All access to its bytes is atomic, or by raw copies of the end that may access the slot.
    map: SharedMapping,
    geometry: RingGeometry,
}

impl Mapping {
    pub(super) fn create(geometry: RingGeometry) -> io::Result<(Self, OwnedFd)> {
        let Some(size) = geometry.size() else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "invalid size of a shm ring",
            ));
        };
        let fd = memfd_create(
            c"doorbell-shm-ring",
            MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING,
        )?;
        let file = File::from(fd);
        file.set_len(size.get() as u64)?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals()))?;
        let mapping = Self::map(&file, size, geometry)?;
        mapping.set(Field::Slots, geometry.slots as u64);
        mapping.set(Field::Bulk, geometry.bulk as u64);
        mapping.set(Field::Magic, MAGIC);
        Ok((mapping, file.into()))
    }

    /// Maps and checks the ring of a descriptor from another process.
    pub(super) fn attach(fd: OwnedFd) -> io::Result<Self> {
        let invalid = |what| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the descriptor is not a shm ring: {what}"),
            )
        };
        let file = File::from(fd);
        // The peer could shrink an unsealed file: a SIGBUS here. Only memfds have seals.
        let sealed = SealFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GET_SEALS)?);
        if !sealed.contains(seals()) {
            return Err(invalid("it is not sealed"));
        }
        let size = usize::try_from(file.metadata()?.len()).ok().and_then(NonZeroUsize::new);
        let Some(size) = size.filter(|size| size.get() > HEADER_AREA) else {
            return Err(invalid("it is too short"));
        };
        // The geometry is known once it is mapped.
        let mut mapping = Self::map(&file, size, RingGeometry { slots: 0, bulk: 0 })?;
        if mapping.get(Field::Magic) != MAGIC {
            return Err(invalid("another magic number or version"));
        }
        let number = |field| usize::try_from(mapping.get(field)).unwrap_or(usize::MAX);
        let (slots, bulk) = (number(Field::Slots), number(Field::Bulk));
        if slots > 1 << 16 || bulk > 1 << 30 {
            return Err(invalid("impossible sizes"));
        }
        let geometry = RingGeometry { slots, bulk };
        if geometry.size() != Some(size) {
            return Err(invalid("its sizes do not fit its length"));
        }
        mapping.geometry = geometry;
        Ok(mapping)
    }

    fn map(file: &impl AsFd, size: NonZeroUsize, geometry: RingGeometry) -> io::Result<Self> {
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let map = SharedMapping::new(file, size, rights)?;
        Ok(Self { map, geometry })
    }

    fn start(&self) -> *mut u8 {
        self.map.start().as_ptr()
    }

    /// A word by its offset: a multiple of 8, within the mapping.
    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset + 8 <= self.map.len().get());
        // SAFETY: the callers' offsets are below 4096 or in one of the slots
        // (`RingGeometry::size`), and multiples of 8 from a page's start. The mapping lives as long
        // as `self`; other accesses to these eight bytes, here or in the other process, are atomic.
        unsafe { AtomicU64::from_ptr(self.start().add(offset).cast()) }
    }

    pub(super) fn field(&self, field: Field) -> &AtomicU64 {
        self.word(field as usize)
    }

    pub(super) fn get(&self, field: Field) -> u64 {
        self.field(field).load(std::sync::atomic::Ordering::Acquire)
    }

    pub(super) fn set(&self, field: Field, value: u64) {
        self.field(field).store(value, std::sync::atomic::Ordering::Release);
    }

    fn slot(&self, slot: u64, offset: usize) -> usize {
        // `slot` is below the number of slots: `ring::slot` masks it.
        HEADER_AREA + slot as usize * SLOT + offset
    }

    pub(super) fn control(&self, slot: u64) -> &AtomicU64 {
        self.word(self.slot(slot, CONTROL))
    }

    /// The [`CONTENT_LEN`] bytes of a slot.
    pub(super) fn content(&self, slot: u64) -> *mut u8 {
        // SAFETY: within the mapping, as all of the slot is.
        unsafe { self.start().add(self.slot(slot, CONTENT_OFFSET)) }
    }

    /// A range of the bulk area, if it is inside.
    pub(super) fn bulk(&self, offset: u64, len: usize) -> Option<*mut u8> {
        let end = usize::try_from(offset).ok()?.checked_add(len)?;
        // SAFETY: the start is before `end`, within the bulk area and so the mapping.
        (end <= self.geometry.bulk).then(|| unsafe { self.start().add(self.geometry.bulk_start() + end - len) })
    }
}

impl ring::RingWords for Mapping {
    type Word = AtomicU64;

    fn slots(&self) -> u64 {
        self.geometry.slots as u64
    }

    fn tag(&self, slot: u64) -> &AtomicU64 {
        self.word(self.slot(slot, TAG))
    }

    fn revoked(&self, slot: u64) -> &AtomicU64 {
        self.word(self.slot(slot, REVOKED))
    }

    fn head(&self) -> &AtomicU64 {
        self.field(Field::Head)
    }

    fn asleep(&self) -> &AtomicU64 {
        self.field(Field::Asleep)
    }

    fn credit_wanted(&self) -> &AtomicU64 {
        self.field(Field::CreditWanted)
    }
}

fn seals() -> SealFlag {
    SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}
