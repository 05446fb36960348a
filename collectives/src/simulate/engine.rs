//! The discrete-event simulation: threads that execute their steps, and what they wait for.
//!
//! A *thread* is one strand of one channel of one rank. It is in the event queue while the time of
//! its next step is known; a thread that waits for a message is queued by its sender.
//!
//! The receiving thread grants the next few messages when an operation begins and with each message
//! that it receives. A thread completes an operation once all its messages are acknowledged; a rank
//! begins its next operation when all its threads have completed the previous one.

mod costs;
mod messages;

use core::hash::{BuildHasherDefault, Hasher};
use std::collections::{HashMap, VecDeque};

use costs::LinkCosts;

use super::links::Links;
use super::queue::Queue;
use super::{Fabric, Outcome, RankUse, SimulationError, Time, Wait, Work};
use crate::plan::{BlockForm, PlanMemory, Schedule, Span, Step};
use crate::protocol::EAGER_BYTES;
use crate::types::Rank;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    All,
    /// The first rank of the order, for all: in a symmetric schedule, a message that it sends to
    /// the rank `k` positions onwards equals the one that it receives from `k` positions before.
    Representative,
}

#[derive(Clone, Copy)]
struct PendingReceive {
    from: Rank,
    bytes: f64,
    reduces: bool,
    /// The message in flight, with which the thread is in the event queue.
    arrival: Option<Arrival>,
    since: u64,
}

#[derive(Clone, Copy)]
struct Arrival {
    /// Arrival of its first part; and of its last.
    at: u64,
    last: u64,
    /// Whether its sender had only just written it.
    forwarded: bool,
}

struct UngrantedMessage {
    posted: u64,
    /// ps in which the sender's processor moves it.
    packed: f64,
    bytes: f64,
    forwarded: bool,
}

#[derive(Default)]
struct Grants {
    unused: VecDeque<u64>,
    ungranted: VecDeque<UngrantedMessage>,
}

// fields: the state of one plan thread in virtual time.
struct Thread<'a> {
    rank: u32,
    strand: u32,
    slices: u64,
    /// `senders` are of a slice's granted messages; `granted` counts those of the operation.
    receives: bool,
    sends: bool,
    senders: Vec<Rank>,
    granted: u64,
    /// Whether messages are received into scratch memory, of which there is one slice's: then those
    /// of a slice are granted when the previous slice is done.
    into_scratch: bool,
    /// Whether another processor has written what its last step made.
    received: bool,
    /// Unacknowledged messages, and the time of the last acknowledgement.
    unconfirmed: u32,
    confirmed: u64,
    /// The time since which it waits for acknowledgements only.
    over: Option<u64>,
    steps: Box<dyn Iterator<Item = Step> + Send + 'a>,
    held_step: Option<Step>,
    awaited: Option<PendingReceive>,
    slices_left: u64,
    taken: u64,
    finished: bool,
}

struct Arrivals {
    first: Arrival,
    more: VecDeque<Arrival>,
}

// fields: the whole simulated group: plan, costs, resources, events and results.
struct Simulation<'a> {
    schedule: &'a dyn Schedule,
    fabric: &'a Fabric,
    scope: Scope,
    position: Vec<u32>,
    connections: u32,
    threads: Vec<Thread<'a>>,
    queue: Queue,
    inbox: HashMap<u64, Arrivals, BuildHasherDefault<KeyHasher>>,
    /// By thread and sender, where messages need grants.
    grants: HashMap<u64, Grants, BuildHasherDefault<KeyHasher>>,
    links: Links,
    ranks: Vec<Processor>,
    element_bytes: f64,
    partial_bytes: f64,
    work: &'a Work,
    /// The operation that `work` is a part of.
    operation: &'a Work,
    messages: u64,
    steps: u64,
    local: LinkCosts,
    remote: LinkCosts,
}

#[derive(Clone, Default)]
struct Processor {
    holder: Option<u32>,
    ready_threads: VecDeque<u32>,
    free: u64,
    busy: u64,
    finished: u64,
    slowness: f64,
    /// Threads that have not completed the operation, and operations after it.
    threads_left: u32,
    operations_left: u32,
    sent: Option<u64>,
}

/// Messages granted before the first of them has arrived: the executor's staging slots.
const GRANTS_AHEAD: u64 = 4;

/// Runs the work so many times; it may be a part of an operation, which determines memory cost.
pub(super) fn run(
    schedule: &dyn Schedule,
    fabric: &Fabric,
    (work, operation): (&Work, &Work),
    scope: Scope,
    times: u32,
) -> Result<Outcome, SimulationError> {
    let mut run = Simulation::new(schedule, fabric, (work, operation), scope, times);
    let mut batch = Vec::new();
    let mut last = 0;
    while let Some(now) = run.queue.pop(&mut batch) {
        last = now;
        for &thread in &batch {
            run.advance(thread as usize, now);
        }
    }
    run.end(last)
}

impl<'a> Simulation<'a> {
    fn new(
        schedule: &'a dyn Schedule,
        fabric: &'a Fabric,
        (work, operation): (&'a Work, &'a Work),
        scope: Scope,
        times: u32,
    ) -> Self {
        let shape = schedule.shape();
        let (strands, channels, slices) = (schedule.strands(), work.busy_channels(shape), work.slices(shape));
        let mut position = vec![0; shape.order.len()];
        for (place, rank) in shape.order.iter().enumerate() {
            position[rank.index()] = place as u32;
        }
        let mut ranks = vec![
            Processor {
                slowness: 1.0,
                threads_left: channels * strands,
                operations_left: times.saturating_sub(1),
                ..Processor::default()
            };
            shape.order.len()
        ];
        let begin = Time::from_ns(fabric.compute.begin_ns).0;
        for rank in &mut ranks {
            (rank.free, rank.busy) = (begin, begin);
        }
        for slow in &fabric.stragglers {
            if let Some(rank) = ranks.get_mut(slow.rank as usize) {
                rank.slowness = slow.slowness;
                rank.busy = Time::from_ns(fabric.compute.begin_ns * slow.slowness).0;
                rank.free = Time::from_ns(slow.late_ns).0.saturating_add(rank.busy);
            }
        }
        let local = LinkCosts::of(fabric.local.data_mover, fabric.local.cost(work.protocol), work.protocol);
        let remote = LinkCosts::of(
            fabric.remote.data_mover,
            fabric.remote.cost(work.protocol),
            work.protocol,
        );
        let element_bytes = work.block_bytes(shape) / slices as f64;
        let partial_bytes = element_bytes * work.data.accumulator().bytes() as f64 / work.data.bytes() as f64;
        let grants = local.grant > 0 || remote.grant > 0;
        let mut threads = Vec::new();
        let mut queue = Queue::new();
        for rank in running(schedule, scope) {
            for channel in 0..channels {
                let slices = (slices - u64::from(channel)).div_ceil(u64::from(channels));
                for strand in 0..strands {
                    queue.push(ranks[rank.index()].free, threads.len() as u32);
                    let (mut receives, mut into_scratch, mut senders) = (false, false, Vec::new());
                    let lone = local.lone.max(remote.lone) > 0.0;
                    let measured = local.cost.bytes.or(remote.cost.bytes).is_some();
                    let sends = !(lone || measured)
                        || schedule
                            .steps(strand, rank)
                            .any(|step| matches!(step, Step::Send { .. }));
                    if grants {
                        let steps = schedule.steps(strand, rank);
                        let received = steps.filter(|step| !matches!(step, Step::Send { .. }));
                        for (from, form, span) in received.filter_map(|step| step.message()) {
                            receives = true;
                            let each = if form == BlockForm::Element {
                                element_bytes
                            } else {
                                partial_bytes
                            };
                            if each * f64::from(span.blocks) > EAGER_BYTES as f64 {
                                senders.push(from);
                                into_scratch |= span.place == PlanMemory::Scratch;
                            }
                        }
                    }
                    threads.push(Thread {
                        rank: rank.0,
                        strand,
                        slices,
                        receives,
                        sends,
                        senders,
                        granted: 0,
                        into_scratch,
                        received: false,
                        unconfirmed: 0,
                        confirmed: 0,
                        over: None,
                        steps: schedule.steps(strand, rank),
                        held_step: None,
                        awaited: None,
                        slices_left: slices - 1,
                        taken: 0,
                        finished: false,
                    });
                }
            }
        }
        let mut run = Self {
            schedule,
            fabric,
            scope,
            position,
            connections: channels * strands,
            threads,
            queue,
            inbox: HashMap::default(),
            grants: HashMap::default(),
            links: Links::new(fabric, work.protocol),
            ranks,
            element_bytes,
            partial_bytes,
            work,
            operation,
            messages: 0,
            steps: 0,
            local,
            remote,
        };
        for id in 0..run.threads.len() {
            let begins = run.ranks[run.threads[id].rank as usize].free;
            run.grant_first(id, begins);
        }
        run
    }

    /// ps per byte reduced, and copied, by this rank.
    fn own(&self, bytes: f64) -> (f64, f64) {
        let (compute, whole) = (&self.fabric.compute, self.touched(bytes));
        (compute.gamma(bytes, whole) * 1e3, compute.copy(bytes, whole) * 1e3)
    }

    /// ps of a thread's reduction of these sources into so many bytes. What another processor has
    /// written into this rank's memory costs more to read; reads of several such sources overlap.
    fn reduction(&self, id: usize, sources: &[Span], least: f64) -> f64 {
        let Thread { rank, sends, .. } = self.threads[id];
        let prices = self.prices(rank, rank);
        let bytes = |span: &Span| self.bytes(span.place.form(), *span);
        let is_moved = |span: &&Span| {
            let (given, taken) = prices.parts(bytes(span));
            span.place == PlanMemory::Scratch && given > taken
        };
        let received = sources.iter().filter(is_moved).map(bytes).fold(0.0, f64::max);
        let operands = sources.iter().skip(1).map(bytes).sum::<f64>().max(least);
        let Some(gathering) = prices
            .cost
            .gathering(received, self.touched(received), sends)
            .filter(|_| received > 0.0)
        else {
            return operands * self.own(least).0;
        };
        let own = self.own(least).0;
        received * own.max(gathering * 1e3) + (operands - received).max(0.0) * own
    }

    fn prices(&self, from: u32, to: u32) -> LinkCosts {
        if self.links.are_on_one_host(from, to) {
            self.local
        } else {
            self.remote
        }
    }

    /// Occupies `rank`'s processor for `ps`, from `from` on at the earliest; returns the end.
    fn work(&mut self, rank: u32, from: u64, ps: f64) -> u64 {
        let processor = &mut self.ranks[rank as usize];
        let ps = (ps * processor.slowness).round() as u64;
        processor.free = processor.free.max(from).saturating_add(ps);
        processor.busy = processor.busy.saturating_add(ps);
        processor.free
    }

    /// Advances a thread until it has to wait. It keeps the processor until it waits for a message.
    fn advance(&mut self, id: usize, now: u64) {
        let rank = self.threads[id].rank;
        let processor = &mut self.ranks[rank as usize];
        match processor.holder {
            Some(holder) if holder != id as u32 => return processor.ready_threads.push_back(id as u32),
            _ => processor.holder = Some(id as u32),
        }
        if processor.free > now {
            return self.queue.push(processor.free, id as u32);
        }
        let mut at = now;
        if let Some(awaited) = self.threads[id].awaited.take() {
            at = self.receive(id, awaited, now);
        } else if self.threads[id].over.is_some() {
            return self.done(id, now);
        }
        while let Some(step) = self.next(id, at) {
            if !matches!(step, Step::Send { .. }) {
                self.threads[id].received = matches!(step, Step::Recv { .. });
            }
            match step {
                Step::Recv { from, into } => {
                    return self.expect(id, at, from, self.bytes(into.place.form(), into), false);
                }
                Step::RecvReduce { from, form, into, .. } => {
                    return self.expect(id, at, from, self.bytes(form, into), true);
                }
                // Begun from the event queue, so that links serve messages in order of time.
                step if at > now => {
                    self.threads[id].held_step = Some(step);
                    return self.queue.push(at, id as u32);
                }
                Step::Send { to, span } => {
                    let forwarded = span.place != PlanMemory::Input && self.threads[id].received;
                    at = self.send(id, now, to, self.bytes(span.place.form(), span), forwarded);
                }
                Step::Reduce { sources, into } => {
                    let least = self.bytes(into.place.form(), into);
                    at = self.work(rank, now, self.reduction(id, &sources, least));
                }
                Step::Copy { from, .. } => {
                    let bytes = self.bytes(from.place.form(), from);
                    at = self.work(rank, now, bytes * self.own(bytes).1);
                }
            }
        }
        let thread = &mut self.threads[id];
        thread.over = Some(at);
        let ends = (thread.unconfirmed == 0).then_some(thread.confirmed.max(at));
        if ends == Some(now) {
            return self.done(id, now);
        }
        if let Some(ends) = ends {
            self.queue.push(ends, id as u32);
        }
        self.release(rank, at);
    }

    /// A thread completes an operation; the last one completes its rank's, and the next one begins.
    fn done(&mut self, id: usize, at: u64) {
        let rank = self.threads[id].rank;
        let thread = &mut self.threads[id];
        (thread.over, thread.finished) = (None, true);
        let processor = &mut self.ranks[rank as usize];
        processor.finished = processor.finished.max(at);
        processor.threads_left -= 1;
        self.release(rank, at);
        let processor = &mut self.ranks[rank as usize];
        if processor.threads_left > 0 || processor.operations_left == 0 {
            return;
        }
        processor.threads_left = self.connections;
        processor.operations_left -= 1;
        let begins = self.work(rank, at, self.fabric.compute.begin_ns * 1e3);
        let first = match self.scope {
            Scope::All => rank as usize * self.connections as usize,
            Scope::Representative => 0,
        };
        for id in first..first + self.connections as usize {
            let thread = &mut self.threads[id];
            thread.steps = self.schedule.steps(thread.strand, Rank(rank));
            (thread.slices_left, thread.granted, thread.finished) = (thread.slices - 1, 0, false);
            self.queue.push(begins, id as u32);
            self.grant_first(id, begins);
        }
    }

    fn release(&mut self, rank: u32, at: u64) {
        let processor = &mut self.ranks[rank as usize];
        processor.holder = processor.ready_threads.pop_front();
        if let Some(next) = processor.holder {
            self.queue.push(at, next);
        }
    }

    fn next(&mut self, id: usize, now: u64) -> Option<Step> {
        loop {
            let thread = &mut self.threads[id];
            if let Some(step) = thread.held_step.take() {
                return Some(step);
            }
            if let Some(step) = thread.steps.next() {
                thread.taken += 1;
                self.steps += 1;
                return Some(step);
            }
            if thread.slices_left == 0 {
                return None;
            }
            thread.slices_left -= 1;
            thread.steps = self.schedule.steps(thread.strand, Rank(thread.rank));
            if thread.into_scratch {
                let each = thread.senders.len() as u64;
                self.grant(id, now, each);
            }
        }
    }

    fn expect(&mut self, id: usize, since: u64, from: Rank, bytes: f64, reduces: bool) {
        let mut awaited = PendingReceive {
            from,
            bytes,
            reduces,
            arrival: None,
            since,
        };
        let key = key(id, from);
        if let Some(arrivals) = self.inbox.get_mut(&key) {
            let arrival = arrivals.first;
            match arrivals.more.pop_front() {
                Some(next) => arrivals.first = next,
                None => drop(self.inbox.remove(&key)),
            }
            awaited.arrival = Some(arrival);
            self.queue.push(arrival.at.max(since), id as u32);
            if arrival.at <= since {
                self.threads[id].awaited = Some(awaited);
                return;
            }
        }
        self.threads[id].awaited = Some(awaited);
        self.release(self.threads[id].rank, since);
    }

    fn end(self, last: u64) -> Result<Outcome, SimulationError> {
        if self.threads.iter().any(|thread| !thread.finished) {
            return Err(SimulationError::Stuck {
                at: Time(last),
                waiting: self.waiting(),
            });
        }
        if let Some((&key, _)) = self.inbox.iter().min_by_key(|(key, _)| **key) {
            let thread = (key >> 32) as usize;
            return Err(SimulationError::LeftOver {
                from: Rank(key as u32),
                to: Rank(self.threads[thread].rank),
                count: self.inbox.values().map(|arrivals| 1 + arrivals.more.len() as u64).sum(),
            });
        }
        let times = match self.scope {
            Scope::All => 1,
            Scope::Representative => self.ranks.len() as u64,
        };
        let mut ranks = self.ranks;
        if self.scope == Scope::Representative
            && let Some(thread) = self.threads.first()
        {
            let one = ranks[thread.rank as usize].clone();
            ranks.fill(one);
        }
        let one = self
            .threads
            .first()
            .map(|thread| thread.rank)
            .filter(|_| self.scope == Scope::Representative);
        Ok(Outcome {
            time: Time(ranks.iter().map(|rank| rank.finished).max().unwrap_or(0)),
            ranks: ranks
                .iter()
                .map(|rank| RankUse {
                    finished: Time(rank.finished),
                    busy: Time(rank.busy),
                })
                .collect(),
            links: self.links.used(one),
            messages: self.messages * times,
            steps: self.steps * times,
        })
    }

    /// Some of the waiting threads: a cycle of waits, if there is one.
    fn waiting(&self) -> Vec<Wait> {
        let wait = |id: usize| {
            let thread = &self.threads[id];
            thread.awaited.map(|awaited| Wait {
                rank: Rank(thread.rank),
                connection: id as u32 % self.connections,
                step: thread.taken.saturating_sub(1),
                from: awaited.from,
            })
        };
        let Some(first) = (0..self.threads.len()).find(|&id| wait(id).is_some()) else {
            return Vec::new();
        };
        let mut path = vec![first];
        loop {
            let id = path[path.len() - 1];
            let Some(next) = wait(id) else { break };
            let next = next.from.index() * self.connections as usize + id % self.connections as usize;
            if let Some(seen) = path.iter().position(|&id| id == next) {
                path.drain(..seen);
                break;
            }
            if next >= self.threads.len() {
                break;
            }
            path.push(next);
        }
        path.truncate(8);
        path.into_iter().filter_map(wait).collect()
    }
}

fn running(schedule: &dyn Schedule, scope: Scope) -> Vec<Rank> {
    let shape = schedule.shape();
    match scope {
        Scope::All => (0..shape.ranks()).map(Rank).collect(),
        Scope::Representative => shape.order.first().copied().into_iter().collect(),
    }
}

fn key(thread: usize, from: Rank) -> u64 {
    (thread as u64) << 32 | u64::from(from.0)
}

/// Hashes a key of the inbox: one multiplication, the upper half folded into the lower.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        let product = u128::from(self.0 ^ value) * 0x9E37_79B9_7F4A_7C15_u128;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}
