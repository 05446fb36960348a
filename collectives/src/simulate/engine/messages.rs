//! Messages between threads: grants, sends, receives and acknowledgements.

use std::collections::VecDeque;

use super::{Arrival, Arrivals, GRANTS_AHEAD, PendingReceive, Scope, Simulation, Thread, UngrantedMessage, key};
use crate::plan::{BlockForm, Span};
use crate::protocol::EAGER_BYTES;
use crate::types::Rank;

impl Simulation<'_> {
    /// Grants memory for the first messages of an operation.
    pub(super) fn grant_first(&mut self, id: usize, now: u64) {
        let thread = &self.threads[id];
        let ahead = match thread.into_scratch {
            true => thread.senders.len() as u64,
            false => GRANTS_AHEAD,
        };
        self.grant(id, now, ahead);
    }

    pub(super) fn grant(&mut self, id: usize, now: u64, more: u64) {
        let thread = &self.threads[id];
        let (rank, each) = (thread.rank, thread.senders.len() as u64);
        let last = (thread.granted + more).min(each * thread.slices);
        for next in thread.granted..last {
            let from = self.threads[id].senders[(next % each) as usize];
            let there = now.saturating_add(self.prices(from.0, rank).grant);
            let grants = self.grants.entry(key(id, from)).or_default();
            match grants.ungranted.pop_front() {
                Some(ungranted) => self.leave_granted(id, from, &ungranted, there),
                None => grants.unused.push_back(there),
            }
        }
        self.threads[id].granted = last;
    }

    fn sender_of(&self, id: usize, from: Rank) -> usize {
        match self.scope {
            Scope::All => from.index() * self.connections as usize + id % self.connections as usize,
            Scope::Representative => id,
        }
    }

    pub(super) fn bytes(&self, form: BlockForm, span: Span) -> f64 {
        let each = match form {
            BlockForm::Element => self.element_bytes,
            BlockForm::Partial => self.partial_bytes,
        };
        each * f64::from(span.blocks)
    }

    pub(super) fn touched(&self, message: f64) -> f64 {
        let shape = self.schedule.shape();
        self.operation.touched(shape.collective, shape.ranks(), message)
    }

    pub(super) fn others(&self, rank: u32, now: u64) -> f64 {
        let measured = self.fabric.local.cost(self.work.protocol).bytes.is_some();
        if !measured || self.scope == Scope::Representative {
            return 1.0;
        }
        let here = |other: &u32| *other != rank && self.links.are_on_one_host(rank, *other);
        let all = (0..self.ranks.len() as u32).filter(here);
        let (mut others, mut busy) = (0u32, 0u32);
        for other in all {
            others += 1;
            busy += u32::from(self.ranks[other as usize].free > now || self.coming_at(other, now));
        }
        f64::from(busy) / f64::from(others.max(1))
    }

    pub(super) fn coming_at(&self, rank: u32, now: u64) -> bool {
        let first = rank as usize * self.connections as usize;
        let threads = &self.threads[first..first + self.connections as usize];
        let arrival = |thread: &Thread<'_>| thread.awaited.and_then(|awaited| awaited.arrival);
        threads.iter().filter_map(arrival).any(|message| message.at <= now)
    }

    /// The number of parts of a message that its sender packs and its receiver unpacks.
    fn packs(&self, bytes: f64) -> f64 {
        let lines = self.work.protocol.lines();
        lines.map_or(1.0, |lines| (bytes / lines.capacity() as f64).ceil().max(1.0))
    }

    pub(super) fn receive(&mut self, id: usize, awaited: PendingReceive, now: u64) -> u64 {
        let rank = self.threads[id].rank;
        let prices = self.prices(awaited.from.0, rank);
        let forwarded = awaited.arrival.is_some_and(|message| message.forwarded);
        let moving = prices.moving(
            awaited.bytes,
            self.touched(awaited.bytes),
            forwarded,
            self.others(rank, now),
        );
        let parts = prices.parts(awaited.bytes);
        let mut ps = prices.receive + moving * parts.1;
        if !self.threads[id].sends {
            ps += prices.lone;
        }
        let left = awaited.arrival.map_or(0, |message| message.at) as f64 - prices.latency;
        if self.ranks[rank as usize]
            .sent
            .is_some_and(|sent| sent as f64 > left - prices.latency)
        {
            ps += prices.both;
        }
        if awaited.reduces {
            let reducing = prices
                .cost
                .reducing(awaited.bytes, self.touched(awaited.bytes), self.threads[id].sends);
            // At least what data of this rank's own caches costs.
            let per_byte = self.own(awaited.bytes).0.max(reducing.unwrap_or(0.0) * 1e3);
            ps += awaited.bytes * per_byte;
        }
        let taken = self.work(rank, now, ps);
        let last = awaited.arrival.map_or(0, |message| message.last);
        let unpacks = moving * parts.1 / self.packs(awaited.bytes);
        let taken = match last.saturating_add(unpacks.round() as u64) {
            later if later > taken => self.work(rank, later, 0.0),
            _ => taken,
        };
        if prices.grant > 0 && awaited.bytes > EAGER_BYTES as f64 && !self.threads[id].into_scratch {
            self.grant(id, taken, 1);
        }
        let confirm = prices.confirm(awaited.bytes);
        if confirm > 0 {
            let sender = self.sender_of(id, awaited.from);
            let quiet = if !self.threads[sender].receives {
                prices.quiet
            } else {
                0
            };
            self.confirm(sender, taken.saturating_add(confirm + quiet));
        }
        taken
    }

    fn confirm(&mut self, id: usize, at: u64) {
        let thread = &mut self.threads[id];
        thread.unconfirmed -= 1;
        thread.confirmed = thread.confirmed.max(at);
        if thread.unconfirmed == 0
            && let Some(since) = thread.over
        {
            self.queue.push(thread.confirmed.max(since), id as u32);
        }
    }

    pub(super) fn send(&mut self, id: usize, now: u64, to: Rank, bytes: f64, forwarded: bool) -> u64 {
        let rank = self.threads[id].rank;
        let prices = self.prices(rank, to.0);
        let moving = prices.moving(bytes, self.touched(bytes), forwarded, self.others(rank, now));
        let packed = moving * prices.parts(bytes).0;
        let connection = id as u32 % self.connections;
        let (receiver, from) = match self.scope {
            Scope::All => (to.index() * self.connections as usize + connection as usize, Rank(rank)),
            Scope::Representative => {
                let order = &self.schedule.shape().order;
                let onwards = self.position[to.index()] as usize + order.len() - self.position[rank as usize] as usize;
                (id, order[(2 * order.len() - onwards) % order.len()])
            }
        };
        self.messages += 1;
        if prices.confirm(bytes) > 0 {
            self.threads[id].unconfirmed += 1;
        }
        if prices.grant == 0 || bytes <= EAGER_BYTES as f64 {
            let posted = self.work(rank, now, prices.send + packed);
            self.ranks[rank as usize].sent = Some(posted);
            let later = (packed - packed / self.packs(bytes)).round() as u64;
            self.leave(receiver, from, (posted.saturating_sub(later), posted), bytes, forwarded);
            return posted;
        }
        let posted = self.work(rank, now, prices.send);
        self.ranks[rank as usize].sent = Some(posted);
        let message = UngrantedMessage {
            posted,
            packed,
            bytes,
            forwarded,
        };
        let grants = self.grants.entry(key(receiver, from)).or_default();
        match grants.unused.pop_front() {
            Some(there) => self.leave_granted(receiver, from, &message, there),
            None => grants.ungranted.push_back(message),
        }
        self.ranks[rank as usize].free
    }

    /// A message leaves that was granted at the sender at this time; its processor may move it.
    fn leave_granted(&mut self, receiver: usize, from: Rank, message: &UngrantedMessage, there: u64) {
        let sender = match self.scope {
            Scope::All => from.0,
            Scope::Representative => self.threads[receiver].rank,
        };
        let leaves = message.posted.max(there);
        let leaves = match message.packed {
            0.0 => leaves,
            packed => self.work(sender, leaves, packed),
        };
        self.leave(receiver, from, (leaves, leaves), message.bytes, message.forwarded);
    }

    /// A message from `from` to a thread leaves: its first part, and its last one.
    fn leave(&mut self, receiver: usize, from: Rank, (first, last): (u64, u64), bytes: f64, forwarded: bool) {
        let landing = self.threads.get(receiver).map_or(from.0, |thread| thread.rank);
        let (sender, together) = match self.scope {
            Scope::All => (from.0, self.links.are_on_one_host(from.0, landing)),
            // All ranks do the same, and a message from one leaves this one for another.
            Scope::Representative => (landing, self.links.are_on_one_host(landing, from.0)),
        };
        let connection = receiver as u32 % self.connections;
        let prices = if together { self.local } else { self.remote };
        let arrival = self.links.carry(sender, landing, together, connection, first, bytes);
        let latency = (prices.latency.round() as u64).saturating_add(self.links.jitter());
        let at = arrival.saturating_add(latency);
        let last = at.saturating_add(last - first);
        self.deliver(receiver, from, Arrival { at, last, forwarded });
    }

    fn deliver(&mut self, id: usize, from: Rank, arrival: Arrival) {
        match &mut self.threads[id].awaited {
            Some(awaited) if awaited.from == from && awaited.arrival.is_none() => {
                awaited.arrival = Some(arrival);
                self.queue.push(arrival.at.max(awaited.since), id as u32);
            }
            _ => {
                self.inbox
                    .entry(key(id, from))
                    .and_modify(|arrivals| arrivals.more.push_back(arrival))
                    .or_insert(Arrivals {
                        first: arrival,
                        more: VecDeque::new(),
                    });
            }
        }
    }
}
