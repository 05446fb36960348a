//! The run itself: threads that go through their steps, and what they wait for.
//!
//! A *thread* is one strand of one channel of one rank. It is in the queue while it knows when it can go on, and in nobody's while it waits for a message that was not sent yet: then whoever sends it puts it there.

use core::hash::{BuildHasherDefault, Hasher};
use std::collections::{HashMap, VecDeque};

use super::links::Links;
use super::queue::Queue;
use super::{Fabric, Outcome, RankUse, SimulationError, Time, Wait, Work};
use crate::cost::{MessageCost, Mover};
use crate::plan::{Form, Schedule, Span, Step};
use crate::types::Rank;

/// Whose steps are run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    /// Every rank's.
    All,
    /// The first rank's of the order: all others do the same at the same time, so what it sends `k` ranks onwards is what it gets from `k` ranks before it.
    OneForAll,
}

/// A receive that was begun.
#[derive(Clone, Copy)]
struct Awaited {
    from: Rank,
    /// Bytes of the message.
    bytes: f64,
    /// Whether it is reduced into something.
    reduces: bool,
    /// Whether the message is on its way, and the thread in the queue.
    coming: bool,
    /// Since when the thread has been waiting.
    since: u64,
}

struct Thread<'a> {
    rank: u32,
    strand: u32,
    steps: Box<dyn Iterator<Item = Step> + Send + 'a>,
    /// A step that was taken and not begun.
    held: Option<Step>,
    awaited: Option<Awaited>,
    /// Slices after this one.
    slices_left: u64,
    taken: u64,
    finished: bool,
}

/// When messages arrive that nobody has asked for yet.
struct Arrivals {
    first: u64,
    more: VecDeque<u64>,
}

struct Run<'a> {
    schedule: &'a dyn Schedule,
    fabric: &'a Fabric,
    who: Who,
    /// Of order, by rank.
    position: Vec<u32>,
    connections: u32,
    threads: Vec<Thread<'a>>,
    queue: Queue,
    /// By thread and sender.
    inbox: HashMap<u64, Arrivals, BuildHasherDefault<Mix>>,
    links: Links,
    ranks: Vec<Processor>,
    element_bytes: f64,
    partial_bytes: f64,
    messages: u64,
    steps: u64,
    local: Prices,
    remote: Prices,
}

#[derive(Clone, Default)]
struct Processor {
    /// The thread that has it.
    holder: Option<u32>,
    /// Threads that could go on, in the order in which they could.
    asking: VecDeque<u32>,
    free: u64,
    busy: u64,
    finished: u64,
    slowness: f64,
}

/// A link's costs, ps.
#[derive(Clone, Copy)]
struct Prices {
    send: f64,
    receive: f64,
    receive_per_byte: f64,
    latency: f64,
}

impl Prices {
    fn of(mover: Mover, cost: &MessageCost) -> Self {
        Self {
            send: cost.send_ns * 1e3,
            receive: cost.receive_ns * 1e3,
            receive_per_byte: if mover == Mover::Receiver {
                cost.beta_ns_per_byte * 1e3
            } else {
                0.0
            },
            latency: cost.latency_ns() * 1e3,
        }
    }
}

/// Runs it to the end.
pub(super) fn run(schedule: &dyn Schedule, fabric: &Fabric, work: &Work, who: Who) -> Result<Outcome, SimulationError> {
    let mut run = Run::new(schedule, fabric, work, who);
    let mut batch = Vec::new();
    let mut last = 0;
    while let Some(now) = run.queue.pop(&mut batch) {
        last = now;
        for &thread in &batch {
            run.turn(thread as usize, now);
        }
    }
    run.end(last)
}

impl<'a> Run<'a> {
    fn new(schedule: &'a dyn Schedule, fabric: &'a Fabric, work: &Work, who: Who) -> Self {
        let shape = schedule.shape();
        let (strands, channels, slices) = (schedule.strands(), work.busy_channels(shape), work.slices(shape));
        let mut position = vec![0; shape.order.len()];
        for (place, rank) in shape.order.iter().enumerate() {
            position[rank.index()] = place as u32;
        }
        let mut ranks = vec![
            Processor {
                slowness: 1.0,
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
        let mut threads = Vec::new();
        let mut queue = Queue::new();
        for rank in running(schedule, who) {
            for channel in 0..channels {
                let slices = (slices - u64::from(channel)).div_ceil(u64::from(channels));
                for strand in 0..strands {
                    queue.push(ranks[rank.index()].free, threads.len() as u32);
                    threads.push(Thread {
                        rank: rank.0,
                        strand,
                        steps: schedule.steps(strand, rank),
                        held: None,
                        awaited: None,
                        slices_left: slices - 1,
                        taken: 0,
                        finished: false,
                    });
                }
            }
        }
        let element_bytes = work.block_bytes(shape) / slices as f64;
        Self {
            schedule,
            fabric,
            who,
            position,
            connections: channels * strands,
            threads,
            queue,
            inbox: HashMap::default(),
            links: Links::new(fabric, work.protocol),
            ranks,
            element_bytes,
            partial_bytes: element_bytes * work.data.accumulator().bytes() as f64 / work.data.bytes() as f64,
            messages: 0,
            steps: 0,
            local: Prices::of(fabric.local.mover, fabric.local.cost(work.protocol)),
            remote: Prices::of(fabric.remote.mover, fabric.remote.cost(work.protocol)),
        }
    }

    fn bytes(&self, form: Form, span: Span) -> f64 {
        let each = match form {
            Form::Element => self.element_bytes,
            Form::Partial => self.partial_bytes,
        };
        each * f64::from(span.blocks)
    }

    fn prices(&self, from: u32, to: u32) -> Prices {
        if self.links.are_together(from, to) {
            self.local
        } else {
            self.remote
        }
    }

    /// Has `rank`'s processor work for `ps`, as soon as it can from `from` on; gives the end.
    fn work(&mut self, rank: u32, from: u64, ps: f64) -> u64 {
        let processor = &mut self.ranks[rank as usize];
        let ps = (ps * processor.slowness).round() as u64;
        processor.free = processor.free.max(from).saturating_add(ps);
        processor.busy = processor.busy.saturating_add(ps);
        processor.free
    }

    /// Goes on with a thread whose time has come, until it must wait for another time. It keeps the processor until it waits for a message.
    fn turn(&mut self, id: usize, now: u64) {
        let rank = self.threads[id].rank;
        let processor = &mut self.ranks[rank as usize];
        match processor.holder {
            Some(holder) if holder != id as u32 => return processor.asking.push_back(id as u32),
            _ => processor.holder = Some(id as u32),
        }
        if processor.free > now {
            return self.queue.push(processor.free, id as u32);
        }
        let mut at = now;
        if let Some(awaited) = self.threads[id].awaited.take() {
            at = self.receive(id, awaited, now);
        }
        while let Some(step) = self.next(id) {
            match step {
                Step::Recv { from, into } => {
                    return self.expect(id, at, from, self.bytes(into.place.form(), into), false);
                }
                Step::RecvReduce { from, form, into, .. } => {
                    return self.expect(id, at, from, self.bytes(form, into), true);
                }
                // What is begun later is begun in its turn, so that links serve whoever comes first.
                step if at > now => {
                    self.threads[id].held = Some(step);
                    return self.queue.push(at, id as u32);
                }
                Step::Send { to, span } => at = self.send(id, now, to, self.bytes(span.place.form(), span)),
                Step::Reduce { sources, into } => {
                    let operands: f64 = sources
                        .iter()
                        .skip(1)
                        .map(|span| self.bytes(span.place.form(), *span))
                        .sum();
                    let least = self.bytes(into.place.form(), into);
                    let ps = operands.max(least) * self.fabric.compute.gamma_ns_per_byte * 1e3;
                    at = self.work(rank, now, ps);
                }
                Step::Copy { from, .. } => {
                    let ps = self.bytes(from.place.form(), from) * self.fabric.compute.copy_ns_per_byte * 1e3;
                    at = self.work(rank, now, ps);
                }
            }
        }
        self.threads[id].finished = true;
        let processor = &mut self.ranks[rank as usize];
        processor.finished = processor.finished.max(at);
        self.release(rank, at);
    }

    /// The processor is somebody else's from `at` on.
    fn release(&mut self, rank: u32, at: u64) {
        let processor = &mut self.ranks[rank as usize];
        processor.holder = processor.asking.pop_front();
        if let Some(next) = processor.holder {
            self.queue.push(at, next);
        }
    }

    /// The next step: of this slice or, where that is over, of the next one.
    fn next(&mut self, id: usize) -> Option<Step> {
        let thread = &mut self.threads[id];
        if let Some(step) = thread.held.take() {
            return Some(step);
        }
        loop {
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
        }
    }

    /// Begins to wait for a message.
    fn expect(&mut self, id: usize, since: u64, from: Rank, bytes: f64, reduces: bool) {
        let mut awaited = Awaited {
            from,
            bytes,
            reduces,
            coming: false,
            since,
        };
        let key = key(id, from);
        if let Some(arrivals) = self.inbox.get_mut(&key) {
            let arrival = arrivals.first;
            match arrivals.more.pop_front() {
                Some(next) => arrivals.first = next,
                None => drop(self.inbox.remove(&key)),
            }
            awaited.coming = true;
            self.queue.push(arrival.max(since), id as u32);
            if arrival <= since {
                self.threads[id].awaited = Some(awaited);
                return;
            }
        }
        self.threads[id].awaited = Some(awaited);
        self.release(self.threads[id].rank, since);
    }

    /// Takes a message that has arrived.
    fn receive(&mut self, id: usize, awaited: Awaited, now: u64) -> u64 {
        let rank = self.threads[id].rank;
        let prices = self.prices(awaited.from.0, rank);
        let mut ps = prices.receive + awaited.bytes * prices.receive_per_byte;
        if awaited.reduces {
            ps += awaited.bytes * self.fabric.compute.gamma_ns_per_byte * 1e3;
        }
        self.work(rank, now, ps)
    }

    /// Sends a message; gives when the sender can go on.
    fn send(&mut self, id: usize, now: u64, to: Rank, bytes: f64) -> u64 {
        let rank = self.threads[id].rank;
        let prices = self.prices(rank, to.0);
        let posted = self.work(rank, now, prices.send);
        let connection = id as u32 % self.connections;
        let (receiver, from) = match self.who {
            Who::All => (to.index() * self.connections as usize + connection as usize, Rank(rank)),
            Who::OneForAll => {
                let order = &self.schedule.shape().order;
                let onwards = self.position[to.index()] as usize + order.len() - self.position[rank as usize] as usize;
                (id, order[(2 * order.len() - onwards) % order.len()])
            }
        };
        let landing = self.threads.get(receiver).map_or(to.0, |thread| thread.rank);
        let arrival = self.links.carry(
            rank,
            landing,
            self.links.are_together(rank, to.0),
            connection,
            posted,
            bytes,
        );
        let latency = (prices.latency.round() as u64).saturating_add(self.links.jitter());
        self.messages += 1;
        self.deliver(receiver, from, arrival.saturating_add(latency));
        posted
    }

    fn deliver(&mut self, id: usize, from: Rank, arrival: u64) {
        match &mut self.threads[id].awaited {
            Some(awaited) if awaited.from == from && !awaited.coming => {
                awaited.coming = true;
                self.queue.push(arrival.max(awaited.since), id as u32);
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
        let times = match self.who {
            Who::All => 1,
            Who::OneForAll => self.ranks.len() as u64,
        };
        let mut ranks = self.ranks;
        if self.who == Who::OneForAll
            && let Some(thread) = self.threads.first()
        {
            let one = ranks[thread.rank as usize].clone();
            ranks.fill(one);
        }
        let one = self
            .threads
            .first()
            .map(|thread| thread.rank)
            .filter(|_| self.who == Who::OneForAll);
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

    /// Some who wait: a cycle of them, if following one after another comes to one.
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

fn running(schedule: &dyn Schedule, who: Who) -> Vec<Rank> {
    let shape = schedule.shape();
    match who {
        Who::All => (0..shape.ranks()).map(Rank).collect(),
        Who::OneForAll => shape.order.first().copied().into_iter().collect(),
    }
}

fn key(thread: usize, from: Rank) -> u64 {
    (thread as u64) << 32 | u64::from(from.0)
}

/// Hashes a key of the inbox: one multiplication, its upper half folded into the lower.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
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
