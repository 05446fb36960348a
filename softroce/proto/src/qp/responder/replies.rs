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
    pub(crate) kind: ReplyKind,
    /// The request came a second time: failing it says nothing to the peer, as that may no longer care.
    pub(crate) duplicate: bool,
}

/// What a response says.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReplyKind {
    Ack,
    Nak(Nak),
    Rnr(RnrTimer),
    Atomic { original: u64 },
    Read(ReadStream),
}

/// The responses of a READ that are left.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadStream {
    /// Where the next one's bytes are.
    pub(crate) addr: u64,
    pub(crate) rkey: RKey,
    /// Bytes left.
    pub(crate) left: u32,
    /// Packets left, at least one.
    pub(crate) packets: u32,
    /// None was sent yet.
    pub(crate) unsent: bool,
}

impl Reply {
    const fn is_data(&self) -> bool {
        matches!(self.kind, ReplyKind::Atomic { .. } | ReplyKind::Read(_))
    }

    /// The PSN after its last one.
    const fn end(&self) -> Psn {
        match self.kind {
            ReplyKind::Read(stream) => self.psn.add(stream.packets),
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
    duplicates: usize,
}

impl Replies {
    /// Makes room for `depth` READs and atomics, as many again that came twice, and the acknowledgements between them.
    pub(crate) fn reserve(&mut self, depth: usize) {
        self.queue.reserve(4 * depth + 4);
    }

    pub(crate) fn clear(&mut self) {
        self.queue.clear();
        self.first_time = 0;
        self.duplicates = 0;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether one acknowledgement is all there is.
    pub(crate) fn has_only_ack(&self) -> bool {
        self.queue.len() == 1
            && self
                .queue
                .front()
                .is_some_and(|reply| matches!(reply.kind, ReplyKind::Ack))
    }

    pub(crate) fn front(&mut self) -> Option<&mut Reply> {
        self.queue.front_mut()
    }

    pub(crate) fn pop(&mut self) {
        if let Some(reply) = self.queue.pop_front()
            && reply.is_data()
        {
            *self.count(reply.duplicate) -= 1;
        }
    }

    /// READs and atomics not fully answered that came the first time.
    pub(crate) const fn outstanding(&self) -> usize {
        self.first_time
    }

    /// An acknowledgement. One behind a NAK that is yet to go says nothing new unless the missing packet came.
    pub(crate) fn ack(&mut self, psn: Psn, msn: u32) {
        match self.queue.back() {
            Some(last) if matches!(last.kind, ReplyKind::Ack) => drop(self.queue.pop_back()),
            Some(last) if matches!(last.kind, ReplyKind::Nak(_) | ReplyKind::Rnr(_)) && psn.since(last.psn) < 0 => {
                return;
            }
            _ => {}
        }
        let duplicate = false;
        let kind = ReplyKind::Ack;
        self.queue.push_back(Reply {
            psn,
            msn,
            kind,
            duplicate,
        });
    }

    /// A NAK, which acknowledges what is before it.
    pub(crate) fn nak(&mut self, psn: Psn, msn: u32, kind: ReplyKind) {
        while self.queue.back().is_some_and(|last| !last.is_data()) {
            self.queue.pop_back();
        }
        let duplicate = false;
        self.queue.push_back(Reply {
            psn,
            msn,
            kind,
            duplicate,
        });
    }

    /// The data of a READ or atomic that came the first time.
    pub(crate) fn data(&mut self, psn: Psn, msn: u32, kind: ReplyKind) {
        self.first_time += 1;
        let duplicate = false;
        self.queue.push_back(Reply {
            psn,
            msn,
            kind,
            duplicate,
        });
    }

    /// The data of a READ or atomic that came again; `depth` of those are kept at most, so that a peer cannot fill the queue. What is lost here is
    /// asked for once more.
    pub(crate) fn duplicate_data(&mut self, psn: Psn, msn: u32, kind: ReplyKind, depth: usize) {
        let duplicate = true;
        let reply = Reply {
            psn,
            msn,
            kind,
            duplicate,
        };
        let (start, end) = (reply.psn, reply.end());
        let overlapping = self
            .queue
            .iter_mut()
            .find(|other| other.is_data() && other.psn.since(end) < 0 && start.since(other.end()) < 0);
        if let Some(other) = overlapping {
            // The rest of the same READ is on its way: back to where the peer wants it from, if that is past already.
            if matches!(other.kind, ReplyKind::Read(_)) && other.end() == end && start.since(other.psn) < 0 {
                *other = Reply {
                    duplicate: other.duplicate,
                    ..reply
                };
            }
            return;
        }
        if self.duplicates >= depth {
            return;
        }
        let index = self
            .queue
            .iter()
            .position(|other| other.psn.since(start) > 0)
            .unwrap_or(self.queue.len());
        self.queue.insert(index, reply);
        self.duplicates += 1;
    }

    fn count(&mut self, duplicate: bool) -> &mut usize {
        if duplicate {
            &mut self.duplicates
        } else {
            &mut self.first_time
        }
    }
}
