//! Status of an engine: results, waits and expiry of the operations in flight.

use std::time::{Duration, Instant};

use doorbell_verbs::Qpn;

use super::Engine;
use super::error::{Failed, Waiting};
use super::operation::Ticket;
use super::queue::OperationQueue;
use crate::failure::{Awaited, MESSAGES, Wait, message_number};
use crate::plan::Collective;
use crate::types::Rank;

impl Engine {
    /// The waits after a connection to `first` has failed, and perhaps others: from these peers
    /// nothing can arrive.
    pub(super) fn waits_with_failed_links(&self, first: Rank) -> Vec<Wait> {
        let mut waits = self.report();
        for (connection, links) in self.links.iter().enumerate() {
            for (peer, link) in links.iter().enumerate() {
                let peer = Rank(peer as u32);
                let Some(link) = link.as_ref().filter(|link| peer == first || link.is_broken()) else {
                    continue;
                };
                match waits.iter_mut().find(|wait| wait.peer == peer) {
                    Some(wait) => wait.awaited = Awaited::QueuePairFailed,
                    None => waits.push(Wait {
                        operation: self.finished() + 1,
                        connection: connection as u32,
                        slice: 0,
                        step: 0,
                        peer,
                        qpn: link.qpn().get(),
                        awaited: Awaited::QueuePairFailed,
                    }),
                }
            }
        }
        waits
    }

    /// What the first operation in flight waits for; of a failed engine, the wait when it failed.
    #[must_use]
    pub fn waiting(&self) -> Option<Waiting> {
        if let Some(broken) = &self.failed {
            return broken.waiting;
        }
        let first = self.operations.first_in_flight();
        let is_message = |wait: &Wait| message_number(wait.operation).is_some();
        let found = self.waits().find(|(wait, _)| wait.operation == first);
        let (wait, collective) = found.or_else(|| self.waits().find(|(wait, _)| is_message(wait)))?;
        Some(Waiting {
            operation: wait.operation,
            collective,
            channel: wait.connection / self.config.strands,
            strand: wait.connection % self.config.strands,
            slice: wait.slice,
            step: wait.step,
            peer: wait.peer,
            qpn: Qpn::truncated(wait.qpn),
        })
    }

    fn waits(&self) -> impl Iterator<Item = (Wait, Collective)> {
        let messages = self.runners.len();
        let runners = self.runners.iter().enumerate();
        let of_all = runners.map(move |(connection, runner)| (connection, runner, &self.operations));
        let streams = self.p2p.busy();
        let of_messages = streams.map(move |stream| (messages, &stream.runner, &stream.queue));
        of_all
            .chain(of_messages)
            .filter_map(move |(connection, runner, queue)| {
                let links = self.links.get(connection)?;
                let number = runner.first_open();
                let op = queue.get(number)?;
                let (slice, step, peer, awaited) = runner.waits_for(op, links)?;
                let (operation, slice) = if connection == messages {
                    (MESSAGES | number, runner.part())
                } else {
                    (number, slice)
                };
                let wait = Wait {
                    operation,
                    connection: connection as u32,
                    slice: slice.into(),
                    step,
                    peer,
                    qpn: links.get(peer.index())?.as_ref()?.qpn().get(),
                    awaited,
                };
                Some((wait, op.collective))
            })
    }

    /// All waits, the first of each connection; of a failed engine, those when it failed.
    #[must_use]
    pub fn report(&self) -> Vec<Wait> {
        if let Some(broken) = &self.failed {
            return broken.waits.clone();
        }
        self.waits().map(|(wait, _)| wait).collect()
    }

    /// The last operation up to which all are done; 0 is none.
    #[must_use]
    pub fn finished(&self) -> u64 {
        self.operations.first_in_flight() - 1
    }

    /// Whether no operation is in flight, or failed and not taken.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.operations.is_idle() && self.p2p.is_idle()
    }

    /// Of the operations in flight, or failed and not taken, the one that expires first: when it
    /// was first seen in flight (to about a millisecond), and its timeout.
    #[must_use]
    pub fn expiring(&mut self) -> Option<(Instant, Duration)> {
        self.open_operations()
            .filter_map(|op| Some((*op.began.get_or_insert_with(Instant::now), op.deadline?)))
            .min_by_key(|(began, deadline)| began.checked_add(*deadline))
    }

    /// Whether point-to-point messages are in flight, or failed and not taken.
    #[must_use]
    pub fn exchanges(&self) -> bool {
        !self.p2p.is_idle()
    }

    /// Operations whose results have not been taken.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        let messages: usize = self.p2p.queues().map(OperationQueue::outstanding).sum();
        self.operations.outstanding() + messages
    }

    /// Whether an operation was submitted and its result not taken.
    #[must_use]
    pub fn has(&self, ticket: Ticket) -> bool {
        let streams = &self.p2p.streams;
        let queue = match ticket.stream.map(|stream| streams.get(stream as usize)) {
            Some(stream) => stream.and_then(Option::as_ref).map(|stream| &stream.queue),
            None => Some(&self.operations),
        };
        let op = queue.and_then(|queue| queue.get(ticket.number));
        op.is_some_and(|op| !op.taken)
    }

    /// Why it has failed, if it has.
    #[must_use]
    pub fn failed(&self) -> Option<&Failed> {
        self.failed.as_ref().map(|broken| &broken.why)
    }
}
