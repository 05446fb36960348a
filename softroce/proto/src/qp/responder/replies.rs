//! Pending replies, in the order of their requests (IBTA vol 1, 9.7.5).
//!
//! ACKs are coalesced: a later ACK replaces the last entry if that is an ACK, so a batch of
//! requests is acknowledged once. The responses of a READ are one entry that shrinks. The reply to
//! a duplicate request is inserted by its PSN.

use std::collections::VecDeque;

use crate::memory::PdId;
use crate::wire::{Nak, RnrTimer, SelectiveEth};
use crate::{Psn, RKey};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Reply {
    /// Its PSN; of a READ, that of the next response.
    pub(crate) psn: Psn,
    pub(crate) msn: u32,
    pub(crate) kind: ReplyKind,
    /// For a duplicate request: a failure causes no NAK.
    pub(crate) duplicate: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum ReplyKind {
    Ack,
    Nak(Nak),
    Rnr(RnrTimer),
    Selective(SelectiveEth),
    Atomic { original: u64 },
    Read(ReadStream),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadStream {
    pub(crate) pd: PdId,
    /// Source of the next response's payload.
    pub(crate) addr: u64,
    pub(crate) rkey: RKey,
    pub(crate) left: u32,
    /// Packets left, at least one.
    pub(crate) packets: u32,
    pub(crate) unsent: bool,
}

impl Reply {
    const fn is_data(&self) -> bool {
        matches!(self.kind, ReplyKind::Atomic { .. } | ReplyKind::Read(_))
    }

    const fn end(&self) -> Psn {
        match self.kind {
            ReplyKind::Read(stream) => self.psn.add(stream.packets),
            _ => self.psn.add(1),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Replies {
    queue: VecDeque<Reply>,
    /// READs and atomics in the queue: of first-time and of duplicate requests.
    first_time: usize,
    duplicates: usize,
}

impl Replies {
    /// Reserves space for `depth` READs and atomics, as many duplicates, and the ACKs between them.
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

    pub(crate) fn has_only_ack(&self) -> bool {
        self.queue.len() == 1
            && self
                .queue
                .front()
                .is_some_and(|reply| matches!(reply.kind, ReplyKind::Ack))
    }

    pub(crate) fn sends_data(&self) -> bool {
        self.queue
            .front()
            .is_some_and(|reply| matches!(reply.kind, ReplyKind::Read(_)))
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

    /// First-time READs and atomics whose replies are not complete.
    pub(crate) const fn outstanding(&self) -> usize {
        self.first_time
    }

    /// Queues an ACK. Behind a pending NAK it is redundant unless the missing packet arrived.
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

    /// Queues a NAK, which acknowledges everything before it.
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

    /// At most `depth`, so that a peer cannot fill the queue; it retries what is dropped here.
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
            // The same READ is being answered: rewinds to the requested PSN, if already sent.
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
