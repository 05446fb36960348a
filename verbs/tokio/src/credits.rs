//! Flow control: no message is sent that finds no receive at the peer.
//!
//! Each side posts its receives before the connection is up, all but [`RESERVE`] of which are
//! credits of the peer. A message takes one; its receive, posted again, gives it back. What was
//! given back travels in the immediate data of the next message, or, when half of all credits wait
//! for one, in an update, a message that takes no credit but a receive of the reserve.
//!
//! The reserve is enough: an update carries half of the credits, and all those in use, on the way
//! and not yet given back are together no more than all, so that two updates are on the way at most.

/// Receives that are not credits: for updates.
pub(crate) const RESERVE: u16 = 2;

const FIN: u32 = 1 << 31;
const UPDATE: u32 = 1 << 30;

/// The credits of both directions, as one side knows them.
#[derive(Debug)]
pub(crate) struct Credits {
    /// Messages that may be sent.
    available: u16,
    /// All of the peer's receives that are credits: `available` is never more.
    granted: u16,
    /// Own receives posted again that the peer has not been told of.
    owed: u16,
    /// When so many are owed, an update is due.
    update_at: u16,
}

/// The immediate data of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// Credits given back.
    pub(crate) returned: u16,
    /// The sender will send no more bytes.
    pub(crate) fin: bool,
    /// It took no credit, and has no bytes.
    pub(crate) update: bool,
}

impl Credits {
    /// With so many receives posted on each side, the reserve among them.
    pub(crate) fn new(own_receives: u16, peer_receives: u16) -> Self {
        let granted = peer_receives - RESERVE;
        Self {
            available: granted,
            granted,
            owed: 0,
            update_at: (own_receives - RESERVE).div_ceil(2),
        }
    }

    pub(crate) fn available(&self) -> u16 {
        self.available
    }

    /// For a message with bytes, or the last; `None` without a credit.
    pub(crate) fn send(&mut self, fin: bool) -> Option<Header> {
        self.available = self.available.checked_sub(1)?;
        Some(Header {
            returned: core::mem::take(&mut self.owed),
            fin,
            update: false,
        })
    }

    /// For an update, if one is due.
    pub(crate) fn update(&mut self) -> Option<Header> {
        (self.owed >= self.update_at).then(|| Header {
            returned: core::mem::take(&mut self.owed),
            fin: false,
            update: true,
        })
    }

    /// The receive of a message that took a credit is posted again.
    pub(crate) fn posted_again(&mut self) {
        self.owed += 1;
    }

    /// A message has come. False if the peer gives back more than it was sent.
    #[must_use]
    pub(crate) fn received(&mut self, header: Header) -> bool {
        match self.available.checked_add(header.returned) {
            Some(available) if available <= self.granted => {
                self.available = available;
                true
            }
            _ => false,
        }
    }
}

impl Header {
    pub(crate) fn to_imm(self) -> u32 {
        let bit = |set: bool, bit: u32| if set { bit } else { 0 };
        u32::from(self.returned) | bit(self.fin, FIN) | bit(self.update, UPDATE)
    }

    /// `None` if no peer of this version sends it.
    pub(crate) fn from_imm(imm: u32) -> Option<Self> {
        let header = Self {
            returned: imm as u16,
            fin: imm & FIN != 0,
            update: imm & UPDATE != 0,
        };
        (header.to_imm() == imm && !(header.fin && header.update)).then_some(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// One side: its credits, what is on the way to it, what its program has not consumed.
    struct Side {
        credits: Credits,
        receives: u16,
        incoming: VecDeque<Header>,
        unconsumed: u16,
    }

    fn side(own: u16, peer: u16) -> Side {
        Side {
            credits: Credits::new(own, peer),
            receives: own,
            incoming: VecDeque::new(),
            unconsumed: 0,
        }
    }

    /// Sends `header` to `to`, where a receive must be left.
    fn deliver(header: Header, to: &mut Side) {
        assert!(to.receives > 0, "no receive is left");
        to.receives -= 1;
        to.incoming.push_back(header);
    }

    fn step(action: u8, from: &mut Side, to: &mut Side) {
        match action {
            0 => {
                if let Some(header) = from.credits.send(false) {
                    deliver(header, to);
                }
            }
            1 => {
                if let Some(header) = from.incoming.pop_front() {
                    assert!(from.credits.received(header));
                    if header.update {
                        from.receives += 1;
                    } else {
                        from.unconsumed += 1;
                    }
                }
            }
            _ => {
                if from.unconsumed > 0 {
                    from.unconsumed -= 1;
                    from.receives += 1;
                    from.credits.posted_again();
                }
            }
        }
        if let Some(header) = from.credits.update() {
            deliver(header, to);
        }
    }

    proptest! {
        /// No message finds no receive; and when both have consumed everything, both may send.
        #[test]
        fn a_receive_is_there_for_each_message(
            (left, right) in (RESERVE + 1..12, RESERVE + 1..12),
            actions in prop::collection::vec((0..3_u8, any::<bool>()), 0..400),
        ) {
            let (mut a, mut b) = (side(left, right), side(right, left));
            let mut act = |action, first: bool| {
                let (from, to) = if first { (&mut a, &mut b) } else { (&mut b, &mut a) };
                step(action, from, to);
            };
            for (action, first) in actions {
                act(action, first);
            }
            for _ in 0..100 {
                for (action, first) in [(1, true), (1, false), (2, true), (2, false)] {
                    act(action, first);
                }
            }
            prop_assert!(a.credits.available() > 0 && b.credits.available() > 0);
        }
    }

    #[test]
    fn credits_that_were_never_sent_are_refused() {
        let mut credits = Credits::new(8, 8);
        let sent = credits.send(false).map(Header::to_imm);
        assert_eq!(sent, Some(0));
        let returned = |returned| Header {
            returned,
            fin: false,
            update: true,
        };
        assert!(!credits.received(returned(2)));
        assert!(credits.received(returned(1)));
        assert!(!credits.received(returned(u16::MAX)));
    }

    #[test]
    fn immediate_data_is_parsed_strictly() {
        for (returned, fin, update) in [(0, false, false), (7, true, false), (u16::MAX, false, true)] {
            let header = Header { returned, fin, update };
            assert_eq!(Header::from_imm(header.to_imm()), Some(header));
        }
        assert_eq!(Header::from_imm(FIN | UPDATE), None);
        assert_eq!(Header::from_imm(1 << 16), None);
    }
}
