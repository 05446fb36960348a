//! How a message gets from one rank to another: the three protocols, and the mailbox by which the two ends of a connection speak.
//!
//! Each end of a connection has a *mailbox*, which the other end writes and it polls. Numbers in it only grow, and are in the byte order of the host: all ranks have the same, as their elements do.
//! A device writes the last eight bytes of a WRITE last, and a later WRITE of a queue pair after an earlier one (IBTA vol 1, o9-20 and 9.7.5.1); so a number behind what it tells of is enough.
//!
//! - **Simple**: the receiver *grants* each message memory, with its number last; the sender writes the message there, and then its number (`ARRIVED`). One of at most 16 KiB is *eager*: it waits for no grant: it goes into a ring of slots in the
//!   mailbox, from where the receiver copies or reduces it. That is a copy more, and a round trip less.
//! - **LL**, *low latency*: words of 4 bytes of data and 4 of flag, by one WRITE into a ring of slots in the mailbox. The flag is the message's number; no other message is needed, and nobody waits for a grant.
//! - **LL128**: the same by lines of 120 bytes of data and 8 of flag.
//!
//! Where the parts of an operation have lengths of their own, each end says its *terms* beside: how many bytes it sends, and how many it expects (`LENGTHS_RING`, a ring of slots too). Nobody writes where the other has granted memory, nor takes
//! what has come, before both have said the same.
//!
//! The slots of a ring, of any kind, come back by a count (`CREDITS`) that the receiver writes every half ring.

use crate::types::Protocol;

/// Grants that may be outstanding on a connection.
pub(crate) const GRANTS: u64 = 16;
/// Bytes of a grant: address, key, length, how much of the message is to come (of messages between two ranks; else 0), number.
pub(crate) const GRANT_BYTES: usize = 32;
/// Bytes of a message of Simple that is eager, at most. Both ends know how long a message is.
pub(crate) const EAGER_BYTES: usize = 16 << 10;
/// Slots for eager messages.
pub(crate) const EAGER_SLOTS: u64 = 8;
/// Bytes of an end's terms: how many it sends, how many it expects, number.
pub(crate) const LENGTHS_BYTES: usize = 24;
/// Slots for terms.
pub(crate) const LENGTHS_SLOTS: u64 = 16;

/// Where things lie in a mailbox.
pub(crate) mod mailbox {
    use super::{EAGER_BYTES, EAGER_SLOTS, GRANT_BYTES, GRANTS, LENGTHS_SLOTS, LineProtocol};

    /// The number of the last message of Simple that is there.
    pub(crate) const ARRIVED: usize = 0;
    /// Slots given back, of LL, of LL128, of eager messages of Simple and of terms.
    pub(crate) const CREDITS: [usize; 4] = [8, 16, 24, 32];
    /// What is written to try a link; nobody reads it.
    pub(crate) const PROBE: usize = 40;
    /// The grants, in turn.
    pub(crate) const GRANT_RING: usize = 64;
    /// The rings of slots for lines.
    pub(crate) const LINE_RINGS: [usize; 2] = [
        GRANT_RING + GRANTS as usize * GRANT_BYTES,
        GRANT_RING + GRANTS as usize * GRANT_BYTES + LineProtocol::Ll.ring(),
    ];
    /// The ring of slots for eager messages.
    pub(crate) const EAGER_RING: usize = LINE_RINGS[1] + LineProtocol::Ll128.ring();
    /// The ring of slots for terms.
    pub(crate) const LENGTHS_RING: usize = EAGER_RING + EAGER_SLOTS as usize * EAGER_BYTES;
    /// Its length.
    pub(crate) const LEN: usize = LENGTHS_RING + LENGTHS_SLOTS as usize * super::LENGTHS_BYTES;
}

/// The protocols of lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LineProtocol {
    Ll,
    Ll128,
}

impl LineProtocol {
    /// As an index of what there is one of each.
    pub(crate) const fn index(self) -> usize {
        match self {
            Self::Ll => 0,
            Self::Ll128 => 1,
        }
    }

    /// Bytes of a slot.
    pub(crate) const fn slot(self) -> usize {
        match self {
            Self::Ll => 2048,
            Self::Ll128 => 8192,
        }
    }

    /// Slots of a ring.
    pub(crate) const fn slots(self) -> u64 {
        match self {
            Self::Ll => 16,
            Self::Ll128 => 8,
        }
    }

    /// Bytes of a ring.
    pub(crate) const fn ring(self) -> usize {
        self.slots() as usize * self.slot()
    }

    /// Bytes of data that a slot takes.
    pub(crate) const fn capacity(self) -> usize {
        match self {
            Self::Ll => self.slot() / 2,
            Self::Ll128 => self.slot() / 128 * 120,
        }
    }

    /// Bytes of a slot that a message takes: one word or line at least, as its flag is what tells of it.
    pub(crate) const fn wire_bytes(self, bytes: usize) -> usize {
        let bytes = if bytes == 0 { 1 } else { bytes };
        match self {
            Self::Ll => bytes.div_ceil(4) * 8,
            Self::Ll128 => bytes.div_ceil(120) * 128,
        }
    }
}

impl Protocol {
    /// The lines it is of; none for Simple.
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
    fn a_full_slot_is_what_its_room_takes() {
        for lines in [LineProtocol::Ll, LineProtocol::Ll128] {
            assert_eq!(lines.wire_bytes(lines.capacity()), lines.slot());
            assert!(lines.wire_bytes(lines.capacity() + 1) > lines.slot());
        }
        assert_eq!(
            (LineProtocol::Ll.wire_bytes(0), LineProtocol::Ll128.wire_bytes(0)),
            (8, 128)
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
            EAGER_SLOTS as usize * EAGER_BYTES,
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
