//! How a message gets from one rank to another: the three protocols, and the mailbox by which the two ends of a connection speak.
//!
//! Each end of a connection has a *mailbox*, which the other end writes and it polls. Numbers in it only grow, and are in the byte order of the host: all ranks have the same, as their elements do.
//! A device writes the last eight bytes of a WRITE last, and a later WRITE of a queue pair after an earlier one (IBTA vol 1, o9-20 and 9.7.5.1); so a number behind what it tells of is enough.
//!
//! - **Simple**: the receiver *grants* each message memory, with its number last; the sender writes the message there, and then its number (`ARRIVED`).
//! - **LL**, *low latency*: words of 4 bytes of data and 4 of flag, by one WRITE into a ring of slots in the mailbox. The flag is the message's number; no other message is needed, and nobody waits for a grant.
//! - **LL128**: the same by lines of 120 bytes of data and 8 of flag.
//!
//! The slots of a ring come back by a count (`RETURNED`) that the receiver writes every half ring.

use crate::types::Protocol;

/// Grants that may be outstanding on a connection.
pub(crate) const GRANTS: u64 = 16;
/// Bytes of a grant: address, key, length, how much of the message is to come (of messages between two ranks; else 0), number.
pub(crate) const GRANT: usize = 32;
/// Slots of a ring of lines.
pub(crate) const SLOTS: u64 = 16;

/// Where things lie in a mailbox.
pub(crate) mod at {
    use super::{GRANT, GRANTS, Lines, SLOTS};

    /// The number of the last message of Simple that is there.
    pub(crate) const ARRIVED: usize = 0;
    /// Slots given back, of LL and of LL128.
    pub(crate) const RETURNED: [usize; 2] = [8, 16];
    /// The grants, in turn.
    pub(crate) const GRANTED: usize = 64;
    /// The rings of slots.
    pub(crate) const RINGS: [usize; 2] = [
        GRANTED + GRANTS as usize * GRANT,
        GRANTED + GRANTS as usize * GRANT + SLOTS as usize * Lines::Ll.slot(),
    ];
    /// Its length.
    pub(crate) const LEN: usize = RINGS[1] + SLOTS as usize * Lines::Ll128.slot();
}

/// The protocols of lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lines {
    Ll,
    Ll128,
}

impl Lines {
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
            Self::Ll128 => 4096,
        }
    }

    /// Bytes of data that a slot takes.
    pub(crate) const fn room(self) -> usize {
        match self {
            Self::Ll => self.slot() / 2,
            Self::Ll128 => self.slot() / 128 * 120,
        }
    }

    /// Bytes of a slot that a message takes: one word or line at least, as its flag is what tells of it.
    pub(crate) const fn wire(self, bytes: usize) -> usize {
        let bytes = if bytes == 0 { 1 } else { bytes };
        match self {
            Self::Ll => bytes.div_ceil(4) * 8,
            Self::Ll128 => bytes.div_ceil(120) * 128,
        }
    }
}

impl Protocol {
    /// The lines it is of; none for Simple.
    pub(crate) const fn lines(self) -> Option<Lines> {
        match self {
            Self::Simple => None,
            Self::Ll => Some(Lines::Ll),
            Self::Ll128 => Some(Lines::Ll128),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_slot_is_what_its_room_takes() {
        for lines in [Lines::Ll, Lines::Ll128] {
            assert_eq!(lines.wire(lines.room()), lines.slot());
            assert!(lines.wire(lines.room() + 1) > lines.slot());
        }
        assert_eq!((Lines::Ll.wire(0), Lines::Ll128.wire(0)), (8, 128));
    }

    #[test]
    fn nothing_in_a_mailbox_overlaps() {
        assert!(at::RETURNED[1] + 8 <= at::GRANTED);
        assert!(at::GRANTED.is_multiple_of(64) && at::RINGS[0].is_multiple_of(64) && at::RINGS[1].is_multiple_of(64));
        assert_eq!(at::LEN, at::RINGS[1] + SLOTS as usize * Lines::Ll128.slot());
    }
}
