//! A ring of slots for messages in the peer's mailbox, and its credits (decision 125).

use crate::protocol::{EAGER_LINE, EAGER_SLOT, EAGER_SLOTS, mailbox};

#[derive(Clone, Copy, Default)]
pub(super) struct Ring {
    /// Slots filled at the peer, and those of them that it has released, by the credits that came
    /// with its messages.
    pub(super) sent: u64,
    pub(super) released: u64,
    /// Slots released here, and those of them of which the peer knows: by a control write, or by a
    /// message that it has consumed.
    pub(super) consumed: u64,
    credited: u64,
    /// A message that went to the peer, by its number, and the credit in it.
    carried: (u64, u64),
}

impl Ring {
    /// The credit in the message that has just been counted as sent.
    #[inline]
    pub(super) fn credit(&mut self) -> u32 {
        if self.carried.0 <= self.released {
            self.carried = (self.sent, self.consumed);
        }
        self.consumed as u32
    }

    /// Takes the credit that came with a message. Messages are consumed in order, so it only grows,
    /// by less than 2^32.
    #[inline]
    pub(super) fn add_credit(&mut self, credit: u32) {
        let more = credit.wrapping_sub(self.released as u32);
        self.released = self.released.wrapping_add(u64::from(more));
        if self.carried.0 <= self.released {
            self.credited = self.credited.max(self.carried.1);
        }
    }

    /// Releases one of `slots`. Returns a credit for a control write every half ring: the peer may
    /// be unable to consume the messages that carry credits before it has sent one, for which it
    /// needs a slot.
    #[inline]
    pub(super) fn release(&mut self, slots: u64) -> Option<u64> {
        self.consumed += 1;
        let is_due = self.consumed - self.credited >= slots / 2;
        is_due.then(|| {
            self.credited = self.consumed;
            self.consumed
        })
    }
}

/// The last word of an eager message: its sequence number, and a credit.
#[inline]
pub(super) fn eager_word(number: u64, credit: u32) -> u64 {
    u64::from(credit) << 32 | u64::from(number as u32)
}

/// The offset of the sequence number in the slot of the eager message that follows `before` others.
#[inline]
pub(super) fn eager_number(before: u64) -> usize {
    mailbox::EAGER_RING + (before % EAGER_SLOTS) as usize * EAGER_SLOT + EAGER_SLOT - 8
}

/// The offset of the data of an eager message, right before its number: one WRITE has both. Data on
/// other cache lines than the number is aligned to them.
#[inline]
pub(super) fn eager_data(number: usize, len: usize) -> usize {
    let align = if len <= EAGER_LINE { 8 } else { 64 };
    (number - len) / align * align
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::EAGER_BYTES;

    #[test]
    fn a_credit_counts_once_its_message_is_consumed() {
        const SLOTS: u64 = 8;
        let mut ring = Ring::default();
        let released = |ring: &mut Ring, count: u64| (0..count).filter_map(|_| ring.release(SLOTS)).collect::<Vec<_>>();
        assert_eq!(released(&mut ring, 3), [0; 0]);
        (ring.sent, ring.consumed) = (1, 3);
        assert_eq!(ring.credit(), 3);
        // The peer has not consumed the message: it is credited by a control write.
        assert_eq!(released(&mut ring, 4), [4]);
        ring.add_credit(1);
        ring.sent = 2;
        assert_eq!(ring.credit(), 7);
        ring.add_credit(2);
        // It knows of seven.
        assert_eq!(released(&mut ring, 3), [0; 0]);
        assert_eq!(released(&mut ring, 1), [11]);
    }

    #[test]
    fn credits_of_32_bits_wrap_around() {
        let mut ring = Ring {
            sent: (1 << 33) + 5,
            released: (1 << 33) - 1,
            ..Ring::default()
        };
        ring.add_credit(4);
        assert_eq!(ring.released, (1 << 33) + 4);
        assert_eq!(eager_word(1 << 32 | 7, 9), 9 << 32 | 7);
    }

    /// They overlap neither their numbers nor the slot before, and short ones are on one line.
    #[test]
    fn an_eager_message_ends_its_slot() {
        for len in (0..300).chain([EAGER_BYTES - 1, EAGER_BYTES]) {
            let number = eager_number(1);
            let start = eager_data(number, len);
            assert!(
                start + len <= number && start >= mailbox::EAGER_RING + EAGER_SLOT,
                "{len}"
            );
            assert!(len == 0 || start.is_multiple_of(if len > 56 { 64 } else { 8 }));
            assert_eq!(start / 64 == number / 64, len <= 56, "{len}");
        }
    }
}
