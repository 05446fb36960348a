//! Completions and responses that are deferred until the copies before them are done.

use std::collections::{HashMap, VecDeque};

use doorbell_roce_proto::work::{Completion, CqId, Status};
use doorbell_roce_proto::{Qpn, Transmit};

use super::Copies;
use crate::memory::PayloadRef;

#[derive(Debug)]
pub(crate) enum Deferred {
    Completion(CqId, Completion),
    Packet(Box<DeferredResponse>),
}

#[derive(Debug)]
pub(crate) struct DeferredResponse {
    pub(crate) transmit: Transmit,
    pub(crate) bytes: Vec<u8>,
    pub(crate) payload_refs: Vec<PayloadRef>,
}

// SAFETY: the pointers of its payload references are to registered memory, as those of regions.
unsafe impl Send for DeferredResponse {}

/// The deferred items of each queue pair in order, with the tickets that they wait for.
#[derive(Debug, Default)]
pub(crate) struct DeferQueue {
    queues: HashMap<Qpn, VecDeque<(u64, Deferred)>>,
}

impl DeferQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }

    /// The ticket for the next deferred item: that of the queue pair's copies and earlier items.
    pub(crate) fn ticket(&self, copies: &Copies, qpn: Qpn) -> Option<u64> {
        if self.queues.is_empty() && copies.is_idle() {
            return None;
        }
        let last = self.queues.get(&qpn).and_then(|queue| queue.back());
        copies.pending_ticket(qpn).max(last.map(|(ticket, _)| *ticket))
    }

    pub(crate) fn push(&mut self, qpn: Qpn, ticket: u64, item: Deferred) {
        self.queues.entry(qpn).or_default().push_back((ticket, item));
    }

    /// The next item up to ticket `done` that `may_send`.
    pub(crate) fn next(&mut self, done: u64, may_send: impl Fn(&Deferred) -> bool) -> Option<Deferred> {
        let is_free = |queue: &VecDeque<(u64, Deferred)>| {
            queue
                .front()
                .is_some_and(|(ticket, item)| *ticket <= done && may_send(item))
        };
        let qpn = *self.queues.iter().find(|(_, queue)| is_free(queue))?.0;
        let queue = self.queues.get_mut(&qpn)?;
        let (_, item) = queue.pop_front()?;
        if queue.is_empty() {
            self.queues.remove(&qpn);
        }
        Some(item)
    }

    /// The copies failed or were revoked: receives are flushed, responses dropped.
    pub(crate) fn fail(&mut self, qpn: Qpn) {
        self.retain(qpn, |item| match item {
            Deferred::Completion(_, completion) => {
                if completion.status == Status::Success {
                    completion.status = Status::Flushed;
                }
                true
            }
            Deferred::Packet(_) => false,
        });
    }

    /// Drops the queue pair's packets with memory references, which are revoked.
    pub(crate) fn revoke_qp(&mut self, qpn: Qpn) {
        self.retain(
            qpn,
            |item| !matches!(item, Deferred::Packet(response) if !response.payload_refs.is_empty()),
        );
    }

    pub(crate) fn revoke_region(&mut self, key: u32) {
        let refers =
            |response: &DeferredResponse| response.payload_refs.iter().any(|payload_ref| payload_ref.key == key);
        for queue in self.queues.values_mut() {
            queue.retain(|(_, item)| !matches!(item, Deferred::Packet(response) if refers(response)));
        }
        self.queues.retain(|_, queue| !queue.is_empty());
    }

    pub(crate) fn remove_qp(&mut self, qpn: Qpn) {
        self.queues.remove(&qpn);
    }

    fn retain(&mut self, qpn: Qpn, mut keep: impl FnMut(&mut Deferred) -> bool) {
        let Some(queue) = self.queues.get_mut(&qpn) else { return };
        queue.retain_mut(|(_, item)| keep(item));
        if queue.is_empty() {
            self.queues.remove(&qpn);
        }
    }
}
