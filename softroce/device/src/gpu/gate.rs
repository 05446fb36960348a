//! Completions and responses that are deferred until the copies before them are done.

use std::collections::{HashMap, VecDeque};

use doorbell_roce_proto::work::{Completion, CqId, Status};
use doorbell_roce_proto::{Qpn, Transmit};

use super::Copies;
use crate::memory::Referred;

/// A deferred item.
#[derive(Debug)]
pub(crate) enum Held {
    /// For the application.
    Completion(CqId, Completion),
    /// For the peer.
    Packet(Box<Answer>),
}

/// A packet for a shm link.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) transmit: Transmit,
    pub(crate) bytes: Vec<u8>,
    pub(crate) referred: Vec<Referred>,
}

// SAFETY: the pointers of its payload references are to registered memory, as those of the regions
// are.
unsafe impl Send for Answer {}

/// The deferred items of each queue pair in order, with the tickets that they wait for.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    held: HashMap<Qpn, VecDeque<(u64, Held)>>,
}

impl Gate {
    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// The ticket for which another item of a queue pair is deferred: that of its copies, and of
    /// the items before it.
    pub(crate) fn ticket(&self, copies: &Copies, qpn: Qpn) -> Option<u64> {
        if self.held.is_empty() && copies.is_idle() {
            return None;
        }
        let before = self.held.get(&qpn).and_then(|queue| queue.back());
        copies.of(qpn).max(before.map(|(ticket, _)| *ticket))
    }

    pub(crate) fn hold(&mut self, qpn: Qpn, ticket: u64, held: Held) {
        self.held.entry(qpn).or_default().push_back((ticket, held));
    }

    /// The next item up to ticket `done` that `may_go`.
    pub(crate) fn next(&mut self, done: u64, may_go: impl Fn(&Held) -> bool) -> Option<Held> {
        let is_free = |queue: &VecDeque<(u64, Held)>| {
            queue
                .front()
                .is_some_and(|(ticket, held)| *ticket <= done && may_go(held))
        };
        let qpn = *self.held.iter().find(|(_, queue)| is_free(queue))?.0;
        let queue = self.held.get_mut(&qpn)?;
        let (_, held) = queue.pop_front()?;
        if queue.is_empty() {
            self.held.remove(&qpn);
        }
        Some(held)
    }

    /// Copies of a queue pair have failed or were revoked: its receives are flushed, and responses
    /// are dropped.
    pub(crate) fn fail(&mut self, qpn: Qpn) {
        self.retain(qpn, |held| match held {
            Held::Completion(_, completion) => {
                if completion.status == Status::Success {
                    completion.status = Status::Flushed;
                }
                true
            }
            Held::Packet(_) => false,
        });
    }

    /// Drops the queue pair's packets with memory references, which are revoked.
    pub(crate) fn withdraw(&mut self, qpn: Qpn) {
        self.retain(
            qpn,
            |held| !matches!(held, Held::Packet(answer) if !answer.referred.is_empty()),
        );
    }

    /// The same for references to a region.
    pub(crate) fn withdraw_region(&mut self, key: u32) {
        let refers = |answer: &Answer| answer.referred.iter().any(|referred| referred.key == key);
        for queue in self.held.values_mut() {
            queue.retain(|(_, held)| !matches!(held, Held::Packet(answer) if refers(answer)));
        }
        self.held.retain(|_, queue| !queue.is_empty());
    }

    /// The queue pair is destroyed or reset.
    pub(crate) fn forget(&mut self, qpn: Qpn) {
        self.held.remove(&qpn);
    }

    fn retain(&mut self, qpn: Qpn, mut keep: impl FnMut(&mut Held) -> bool) {
        let Some(queue) = self.held.get_mut(&qpn) else { return };
        queue.retain_mut(|(_, held)| keep(held));
        if queue.is_empty() {
            self.held.remove(&qpn);
        }
    }
}
