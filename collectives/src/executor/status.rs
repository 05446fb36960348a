//! Status of an engine: results, waits and expiry of the operations in flight.

use std::time::{Duration, Instant};

use doorbell_verbs::Qpn;

use super::Engine;
use super::error::{Failed, Waiting};
use super::operation::Ticket;
use super::strand::StrandRunner;
use crate::failure::{Awaited, Wait};
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
        let messages = || self.p2p.waiting(&self.links, self.config.channels);
        let Some(first) = self.operations.iter().position(|op| op.result.is_none()) else {
            return messages();
        };
        let number = self.first + first as u64;
        self.waits()
            .find(|(wait, ..)| wait.operation == number)
            .map(|(wait, collective, runner)| Waiting {
                operation: wait.operation,
                collective,
                channel: runner.channel,
                strand: runner.strand,
                slice: wait.slice,
                step: wait.step,
                peer: wait.peer,
                qpn: Qpn::truncated(wait.qpn),
            })
            .or_else(messages)
    }

    fn waits(&self) -> impl Iterator<Item = (Wait, Collective, &StrandRunner)> {
        self.runners
            .iter()
            .zip(&self.links)
            .enumerate()
            .filter_map(|(connection, (runner, links))| {
                let op = self
                    .operations
                    .get(usize::try_from(runner.next.checked_sub(self.first)?).ok()?)?;
                let (slice, step, peer, awaited) = runner.waits_for(op, links)?;
                let wait = Wait {
                    operation: runner.next,
                    connection: connection as u32,
                    slice: slice.into(),
                    step,
                    peer,
                    qpn: links.get(peer.index())?.as_ref()?.qpn().get(),
                    awaited,
                };
                Some((wait, op.collective, runner))
            })
    }

    /// All waits, the first of each connection; of a failed engine, those when it failed.
    #[must_use]
    pub fn report(&self) -> Vec<Wait> {
        if let Some(broken) = &self.failed {
            return broken.waits.clone();
        }
        let messages = self.p2p.waits(&self.links).into_iter().map(|(_, wait)| wait);
        self.waits().map(|(wait, ..)| wait).chain(messages).collect()
    }

    /// The last operation up to which all are done; 0 is none.
    #[must_use]
    pub fn finished(&self) -> u64 {
        let open = self.operations.iter().position(|op| op.result.is_none());
        self.first + open.unwrap_or(self.operations.len()) as u64 - 1
    }

    /// Whether no operation is in flight, or failed and not taken.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.operations
            .iter()
            .all(|op| op.taken || matches!(op.result, Some(Ok(()))))
            && self.p2p.is_idle()
    }

    /// Of the operations in flight, or failed and not taken, the one that expires first: when it
    /// was first seen in flight (to about a millisecond), and its timeout.
    #[must_use]
    pub fn expiring(&mut self) -> Option<(Instant, Duration)> {
        let open = self
            .operations
            .iter_mut()
            .filter(|op| !op.taken && !matches!(op.result, Some(Ok(()))));
        open.filter_map(|op| Some((*op.began.get_or_insert_with(Instant::now), op.deadline?)))
            .chain(self.p2p.expiring())
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
        self.operations.iter().filter(|op| !op.taken).count() + self.p2p.outstanding()
    }

    /// Whether an operation was submitted and its result not taken.
    #[must_use]
    pub fn has(&self, ticket: Ticket) -> bool {
        if ticket.is_message() {
            return self.p2p.has(ticket);
        }
        let index = ticket.0.checked_sub(self.first);
        index
            .and_then(|index| self.operations.get(usize::try_from(index).ok()?))
            .is_some_and(|op| !op.taken)
    }

    /// Why it has failed, if it has.
    #[must_use]
    pub fn failed(&self) -> Option<&Failed> {
        self.failed.as_ref().map(|broken| &broken.why)
    }
}
