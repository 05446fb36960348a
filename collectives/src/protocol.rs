//! Point-to-point protocols between two ranks (Simple, LL, LL128) and the layout of the mailbox.
//!
//! Each end of a connection has a *mailbox*, which the peer writes and the owner polls. Its
//! counters only grow and are in host byte order. A device places the last eight bytes of a WRITE
//! last, and a later WRITE of a queue pair after an earlier one (IBTA vol 1, o9-20 and 9.7.5.1), so
//! a sequence number behind the data announces it.
//!
//! - **Simple**: the receiver *grants* memory for each message (rendezvous), sequence number last;
//!   the sender writes the message there, and then its sequence number (`ARRIVED`). A message of at
//!   most 16 KiB is *eager*: it goes into a ring of slots in the mailbox without a grant, by one
//!   WRITE, as the sequence number at the slot's end follows the data.
//! - **LL** (low latency): words of 4 bytes of data and 4 of flag, the message's sequence number,
//!   by one WRITE into a ring of slots.
//! - **LL128**: the same with lines of 120 bytes of data and 8 of flag.
//!
//! Where parts have different lengths (all-to-all-v), each end also sends how many bytes it sends
//! and expects (`LENGTHS_RING`). Neither end writes to granted memory or consumes messages before
//! both have sent the same lengths.
//!
//! The count of released slots of a ring piggybacks on the next message of the same ring: in the
//! upper half of an eager message's number, and in a word of LL behind the data. The receiver
//! writes it (`CREDITS`) where half a ring has been released since, and by LL128.

use crate::types::Protocol;

pub(crate) const GRANTS: u64 = 16;
/// Address, key, length, remaining bytes of the message, sequence number.
pub(crate) const GRANT_BYTES: usize = 32;
/// Maximum bytes of an eager message of Simple. Both ends know a message's length.
pub(crate) const EAGER_BYTES: usize = 16 << 10;
pub(crate) const EAGER_SLOTS: u64 = 8;
/// Maximum bytes of an eager message on the cache line of its sequence number.
pub(crate) const EAGER_LINE: usize = 56;
/// Bytes of an eager slot: the message, and behind it its sequence number, at the end of a line.
pub(crate) const EAGER_SLOT: usize = EAGER_BYTES + 64;
/// Bytes of a lengths record: bytes sent, bytes expected, sequence number.
pub(crate) const LENGTHS_BYTES: usize = 24;
pub(crate) const LENGTHS_SLOTS: u64 = 16;

pub(crate) mod mailbox {
    use super::{EAGER_SLOT, EAGER_SLOTS, GRANT_BYTES, GRANTS, LENGTHS_SLOTS, LineProtocol};

    /// Sequence number of the last granted message that has arrived.
    pub(crate) const ARRIVED: usize = 0;
    /// Released slots of LL, LL128, eager messages of Simple, and lengths records.
    pub(crate) const CREDITS: [usize; 4] = [8, 16, 24, 32];
    /// Target of link probes; never read.
    pub(crate) const PROBE: usize = 40;
    pub(crate) const GRANT_RING: usize = 64;
    pub(crate) const LINE_RINGS: [usize; 2] = [
        GRANT_RING + GRANTS as usize * GRANT_BYTES,
        GRANT_RING + GRANTS as usize * GRANT_BYTES + LineProtocol::Ll.ring(),
    ];
    pub(crate) const EAGER_RING: usize = LINE_RINGS[1] + LineProtocol::Ll128.ring();
    pub(crate) const LENGTHS_RING: usize = EAGER_RING + EAGER_SLOTS as usize * EAGER_SLOT;
    pub(crate) const LEN: usize = LENGTHS_RING + LENGTHS_SLOTS as usize * super::LENGTHS_BYTES;
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LineProtocol {
    Ll,
    Ll128,
}

impl LineProtocol {
    pub(crate) const fn index(self) -> usize {
        match self {
            Self::Ll => 0,
            Self::Ll128 => 1,
        }
    }

    /// A full message, and more: the slots of a ring are not in the same sets of a cache.
    pub(crate) const fn slot(self) -> usize {
        match self {
            Self::Ll => 2048 + 64,
            Self::Ll128 => 8192 + 128,
        }
    }

    pub(crate) const fn slots(self) -> u64 {
        match self {
            Self::Ll => 16,
            Self::Ll128 => 8,
        }
    }

    pub(crate) const fn ring(self) -> usize {
        self.slots() as usize * self.slot()
    }

    pub(crate) const fn capacity(self) -> usize {
        match self {
            Self::Ll => 2048 / 2,
            Self::Ll128 => 8192 / 128 * 120,
        }
    }

    /// Bytes in a slot: at least one word or line, as the flag announces the message. The last word
    /// of LL is the credit.
    pub(crate) const fn wire_bytes(self, bytes: usize) -> usize {
        let bytes = if bytes == 0 { 1 } else { bytes };
        match self {
            Self::Ll => bytes.div_ceil(4) * 8 + 8,
            Self::Ll128 => bytes.div_ceil(120) * 128,
        }
    }
}

impl Protocol {
    /// The flag protocol; `None` for Simple.
    pub(crate) const fn lines(self) -> Option<LineProtocol> {
        match self {
            Self::Simple => None,
            Self::Ll => Some(LineProtocol::Ll),
            Self::Ll128 => Some(LineProtocol::Ll128),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_message_fits_a_slot() {
        for lines in [LineProtocol::Ll, LineProtocol::Ll128] {
            assert!(lines.wire_bytes(lines.capacity()) <= lines.slot());
        }
        assert_eq!(
            (LineProtocol::Ll.wire_bytes(0), LineProtocol::Ll128.wire_bytes(0)),
            (16, 128)
        );
    }

    #[test]
    fn nothing_in_a_mailbox_overlaps() {
        assert!(mailbox::CREDITS[3] + 8 <= mailbox::PROBE && mailbox::PROBE + 8 <= mailbox::GRANT_RING);
        let areas = [
            mailbox::GRANT_RING,
            mailbox::LINE_RINGS[0],
            mailbox::LINE_RINGS[1],
            mailbox::EAGER_RING,
            mailbox::LENGTHS_RING,
            mailbox::LEN,
        ];
        let lengths = [
            GRANTS as usize * GRANT_BYTES,
            LineProtocol::Ll.ring(),
            LineProtocol::Ll128.ring(),
            EAGER_SLOTS as usize * EAGER_SLOT,
            LENGTHS_SLOTS as usize * LENGTHS_BYTES,
        ];
        assert!(areas.iter().all(|area| area.is_multiple_of(64)));
        assert!(
            areas
                .windows(2)
                .zip(lengths)
                .all(|(ends, len)| ends[0] + len == ends[1])
        );
    }
}
