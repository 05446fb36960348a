//! What the responder has yet to send, in the order of the requests (IBTA vol 1, 9.7.5: responses keep the order of their requests).
//!
//! Acknowledgements are a state, not packets: while the last entry is one, a later one takes its place, so that a batch of requests is answered
//! once. The responses of a READ are one entry that shrinks. A request that comes again puts its entry in by its PSN.

use std::collections::VecDeque;

use crate::wire::{Nak, RnrTimer};
use crate::{Psn, RKey};

/// A response to be sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reply {
    /// Its PSN; of a READ, that of the next packet.
    pub(crate) psn: Psn,
    /// The message sequence number it carries.
    pub(crate) msn: u32,
    pub(crate) kind: Kind,
    /// The request came a second time: failing it says nothing to the peer, as that may no longer care.
    pub(crate) again: bool,
}

/// What a response says.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Ack,
    Nak(Nak),
    Rnr(RnrTimer),
    Atomic { original: u64 },
    Read(Stream),
}

/// The responses of a READ that are left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    /// Where the next one's bytes are.
    pub(crate) addr: u64,
    pub(crate) rkey: RKey,
    /// Bytes left.
    pub(crate) left: u32,
    /// Packets left, at least one.
    pub(crate) packets: u32,
    /// None was sent yet.
    pub(crate) fresh: bool,
}

impl Reply {
    const fn is_data(&self) -> bool {
        matches!(self.kind, Kind::Atomic { .. } | Kind::Read(_))
    }

    /// The PSN after its last one.
    const fn end(&self) -> Psn {
        match self.kind {
            Kind::Read(stream) => self.psn.add(stream.packets),
            _ => self.psn.add(1),
        }
    }
}

/// The queue.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    queue: VecDeque<Reply>,
    /// READs and atomics in it of requests that came the first time, and of those that came again.
    first_time: usize,
    again: usize,
}

impl Replies {
    /// Makes room for `depth` READs and atomics, as many again that came twice, and the acknowledgements between them.
    pub(crate) fn reserve(&mut self, depth: usize) {
        self.queue.reserve(4 * depth + 4);
    }

    pub(crate) fn clear(&mut self) {
        self.queue.clear();
        self.first_time = 0;
        self.again = 0;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether one acknowledgement is all there is.
    pub(crate) fn is_acknowledgement(&self) -> bool {
        self.queue.len() == 1 && self.queue.front().is_some_and(|reply| matches!(reply.kind, Kind::Ack))
    }

    pub(crate) fn front(&mut self) -> Option<&mut Reply> {
        self.queue.front_mut()
    }

    pub(crate) fn pop(&mut self) {
        if let Some(reply) = self.queue.pop_front()
            && reply.is_data()
        {
            *self.count(reply.again) -= 1;
        }
    }

    /// READs and atomics not fully answered that came the first time.
    pub(crate) const fn outstanding(&self) -> usize {
        self.first_time
    }

    /// An acknowledgement. One behind a NAK that is yet to go says nothing new unless the missing packet came.
    pub(crate) fn ack(&mut self, psn: Psn, msn: u32) {
        match self.queue.back() {
            Some(last) if matches!(last.kind, Kind::Ack) => drop(self.queue.pop_back()),
            Some(last) if matches!(last.kind, Kind::Nak(_) | Kind::Rnr(_)) && psn.since(last.psn) < 0 => return,
            _ => {}
        }
        let again = false;
        let kind = Kind::Ack;
        self.queue.push_back(Reply { psn, msn, kind, again });
    }

    /// A NAK, which acknowledges what is before it.
    pub(crate) fn nak(&mut self, psn: Psn, msn: u32, kind: Kind) {
        while self.queue.back().is_some_and(|last| !last.is_data()) {
            self.queue.pop_back();
        }
        let again = false;
        self.queue.push_back(Reply { psn, msn, kind, again });
    }

    /// The data of a READ or atomic that came the first time.
    pub(crate) fn data(&mut self, psn: Psn, msn: u32, kind: Kind) {
        self.first_time += 1;
        let again = false;
        self.queue.push_back(Reply { psn, msn, kind, again });
    }

    /// The data of a READ or atomic that came again; `depth` of those are kept at most, so that a peer cannot fill the queue. What is lost here is
    /// asked for once more.
    pub(crate) fn data_again(&mut self, psn: Psn, msn: u32, kind: Kind, depth: usize) {
        let again = true;
        let reply = Reply { psn, msn, kind, again };
        let (start, end) = (reply.psn, reply.end());
        let overlapping = self
            .queue
            .iter_mut()
            .find(|other| other.is_data() && other.psn.since(end) < 0 && start.since(other.end()) < 0);
        if let Some(other) = overlapping {
            // The rest of the same READ is on its way: back to where the peer wants it from, if that is past already.
            if matches!(other.kind, Kind::Read(_)) && other.end() == end && start.since(other.psn) < 0 {
                *other = Reply {
                    again: other.again,
                    ..reply
                };
            }
            return;
        }
        if self.again >= depth {
            return;
        }
        let place = self
            .queue
            .iter()
            .position(|other| other.psn.since(start) > 0)
            .unwrap_or(self.queue.len());
        self.queue.insert(place, reply);
        self.again += 1;
    }

    fn count(&mut self, again: bool) -> &mut usize {
        if again { &mut self.again } else { &mut self.first_time }
    }
}
