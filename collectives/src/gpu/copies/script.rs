//! A script: one rank's stream operations for a collective, i.e. a plan lowered to copies, flag
//! words, reductions and events. It is constant, so a graph that captured it can be launched
//! repeatedly.
//!
//! # Flag words
//! Ranks synchronize only by words that become nonzero. The waiting rank resets the word before it
//! proceeds, and the writer writes it again only once that is known:
//! - *ready*, at the beginning: the receiver is done with earlier operations.
//! - *credit*, for a message into memory already used in the same operation: it may be overwritten.
//! - *full*: the message has arrived.
//!
//! # Order
//! A step's *depth* is the length of the longest chain of messages before it. Tasks are enqueued by
//! slice plus depth, so that the first sends of a slice overlap with reductions of the slice before
//! it. All ranks do so: whatever a task waits for, on any rank, precedes it in this order. So
//! operations complete even if a driver serializes the streams' work in enqueue order.

use super::plan::{Message, Plan};
use super::tasks::{Task, TaskKind};
use crate::gpu::peers::WORDS;
use crate::plan::{BlockForm, Schedule};
use crate::types::{DataType, Rank};

pub(super) const READY: u32 = WORDS as u32 - 1;

/// The caller's stream, on which reductions run.
pub(super) const CALLER: u8 = 0;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct ScriptParams {
    pub(super) data: DataType,
    pub(super) count: u64,
    /// Whether messages may be stored directly in the peers' outputs.
    pub(super) direct: bool,
    pub(super) in_place: bool,
    pub(super) staging: u64,
    pub(super) slice: u64,
    pub(super) copiers: u8,
    /// The number of parts into which reductions, and the messages next to them, are divided.
    pub(super) tail_parts: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Location {
    Input(u64),
    Output(u64),
    Staging(u64),
    TheirOutput(Rank, u64),
    TheirStaging(Rank, u64),
}

/// A flag word: the peer at the other end, and its index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FlagWord {
    pub(super) peer: Rank,
    /// Whether it grants a credit, rather than signaling a message.
    pub(super) is_credit: bool,
    pub(super) index: u32,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum StreamOp {
    Signal(FlagWord),
    Await(FlagWord),
    Copy {
        from: Location,
        into: Location,
        bytes: u64,
    },
    Reduce {
        sources: Box<[(Location, BlockForm)]>,
        into: (Location, BlockForm),
        elements: u64,
    },
    Record(u32),
    Wait(u32),
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Script {
    /// Each with its stream index.
    pub(super) ops: Vec<(u8, StreamOp)>,
    pub(super) events: u32,
    /// The caller's, those for copies, and one for waits that nothing local depends on.
    pub(super) streams: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the operation does not fit {staging} bytes of staging memory and {WORDS} words with any slice size")]
pub(super) struct DoesNotFit {
    pub(super) staging: u64,
}

impl Script {
    pub(super) fn new(schedule: &dyn Schedule, rank: Rank, params: ScriptParams) -> Result<Self, DoesNotFit> {
        let plan = Plan::new(schedule, params)?;
        Ok(plan.script(rank))
    }
}

struct Item {
    stream: u8,
    ops: Vec<StreamOp>,
    after: Vec<usize>,
}

impl Plan {
    fn script(&self, rank: Rank) -> Script {
        let me = rank.index();
        let mut script = Script {
            streams: self.params.copiers + 2,
            ..Script::default()
        };
        self.begin(me, &mut script);
        let mut tasks: Vec<Task> = (0..self.slices).flat_map(|slice| self.tasks(me, slice)).collect();
        tasks.sort_by_key(|task| {
            let (slice, strand, step, part) = task.place;
            (slice + u64::from(task.depth), task.depth, strand, step, part)
        });
        let items = self.items(tasks);
        emit(&items, &mut script);
        script
    }

    /// Signals readiness to the senders, and waits for the receivers. A barrier consists of this
    /// plus a reply, as a word must not be written twice before it was read.
    fn begin(&self, me: usize, script: &mut Script) {
        let ranks = self.programs.len();
        // Rotated by rank, so that ranks do not all start with the same peer.
        let others = (1..ranks).map(|distance| (me + distance) % ranks);
        let sends = |from: usize, to: usize| {
            let between = |message: &&Message| message.from.index() == from && message.to.index() == to;
            self.is_barrier
                || self
                    .messages
                    .iter()
                    .filter(between)
                    .any(|message| self.message_bytes(*message, 0) > 0)
        };
        let word = |peer: usize, is_credit: bool| FlagWord {
            peer: Rank(peer as u32),
            is_credit,
            index: if is_credit { READY } else { 0 },
        };
        let senders: Vec<_> = others.clone().filter(|peer| sends(*peer, me)).collect();
        let receivers: Vec<_> = others.filter(|peer| sends(me, *peer)).collect();
        let mut put = |op| script.ops.push((CALLER, op));
        senders.iter().for_each(|peer| put(StreamOp::Signal(word(*peer, true))));
        receivers
            .iter()
            .for_each(|peer| put(StreamOp::Await(word(*peer, true))));
        if self.is_barrier {
            receivers
                .iter()
                .for_each(|peer| put(StreamOp::Signal(word(*peer, false))));
            senders.iter().for_each(|peer| put(StreamOp::Await(word(*peer, false))));
        }
    }

    /// Assigns streams to tasks, and moves each receive right before its first use.
    fn items(&self, tasks: Vec<Task>) -> Vec<Item> {
        let last = self.params.copiers + 1;
        let mut streams = vec![CALLER; tasks.len()];
        let mut copier = 0;
        for (task, stream) in tasks.iter().zip(&mut streams) {
            if matches!(task.kind, TaskKind::Send { .. }) {
                *stream = 1 + copier;
                copier = (copier + 1) % self.params.copiers.max(1);
            }
        }
        let mut before: Vec<Vec<usize>> = vec![Vec::new(); tasks.len()];
        let mut is_moved = vec![false; tasks.len()];
        for at in 0..tasks.len() {
            if !matches!(tasks[at].kind, TaskKind::Receive { .. }) {
                continue;
            }
            let user = (at + 1..tasks.len()).find(|&user| {
                tasks[user].place.0 == tasks[at].place.0
                    && !matches!(tasks[user].kind, TaskKind::Receive { .. })
                    && tasks[user].follows(&tasks[at])
            });
            match user {
                Some(user) => {
                    // Copies to peers have streams of their own: nothing else delays the link.
                    streams[at] = if streams[user] == CALLER { CALLER } else { last };
                    before[user].push(at);
                    is_moved[at] = true;
                }
                None => streams[at] = last,
            }
        }
        let mut order = Vec::with_capacity(tasks.len());
        for at in (0..tasks.len()).filter(|at| !is_moved[*at]) {
            order.append(&mut before[at]);
            order.push(at);
        }
        self.with_credits(&tasks, &streams, &order)
    }

    /// Adds the credit signals to senders, behind the last task that used the memory.
    fn with_credits(&self, tasks: &[Task], streams: &[u8], order: &[usize]) -> Vec<Item> {
        let follows: Vec<Vec<usize>> = order
            .iter()
            .map(|&at| {
                (0..order.len())
                    .filter(|&other| tasks[at].follows(&tasks[order[other]]))
                    .collect()
            })
            .collect();
        let mut rooms: Vec<Vec<usize>> = vec![Vec::new(); order.len() + 1];
        for (position, &at) in order.iter().enumerate() {
            if let TaskKind::Receive { needs_credit: true, .. } = tasks[at].kind {
                let behind = follows[position].iter().max().map_or(0, |last| last + 1);
                rooms[behind].push(position);
            }
        }
        let mut items: Vec<Item> = Vec::new();
        let mut item_of = vec![0; order.len()];
        for position in 0..=order.len() {
            for &receive in &rooms[position] {
                let TaskKind::Receive { from, word, .. } = tasks[order[receive]].kind else {
                    continue;
                };
                let after: Vec<usize> = follows[receive].iter().map(|&other| item_of[other]).collect();
                items.push(Item {
                    stream: after.iter().max().map_or(CALLER, |&last| items[last].stream),
                    ops: vec![StreamOp::Signal(FlagWord {
                        peer: from,
                        is_credit: true,
                        index: word,
                    })],
                    after,
                });
            }
            let Some(&at) = order.get(position) else { break };
            let task = &tasks[at];
            let full = |peer, index| FlagWord {
                peer,
                is_credit: false,
                index,
            };
            let (ops, after) = match task.kind {
                TaskKind::Send { to, word, needs_credit } => {
                    let credit = FlagWord {
                        peer: to,
                        is_credit: true,
                        index: word,
                    };
                    let wait_credit = needs_credit.then_some(StreamOp::Await(credit));
                    let signal = StreamOp::Signal(full(to, word));
                    (
                        wait_credit
                            .into_iter()
                            .chain(task.ops.iter().cloned())
                            .chain([signal])
                            .collect(),
                        &follows[position][..],
                    )
                }
                TaskKind::Receive { from, word, .. } => (vec![StreamOp::Await(full(from, word))], &[][..]),
                TaskKind::Work => (task.ops.clone(), &follows[position][..]),
            };
            item_of[position] = items.len();
            items.push(Item {
                stream: streams[at],
                ops,
                after: after.iter().map(|&other| item_of[other]).collect(),
            });
        }
        items
    }
}

fn emit(items: &[Item], script: &mut Script) {
    let streams = usize::from(script.streams);
    // Per stream pair: the last item of the other stream known to be done, plus one.
    let mut known = vec![vec![0; streams]; streams];
    let mut waits: Vec<Vec<usize>> = vec![Vec::new(); items.len()];
    let mut events: Vec<Option<u32>> = vec![None; items.len()];
    let mut next = 1;
    for (at, item) in items.iter().enumerate() {
        let own = usize::from(item.stream);
        for &before in item.after.iter().rev() {
            let other = usize::from(items[before].stream);
            if other == own || known[own][other] > before {
                continue;
            }
            // `after` is sorted, so this is the last wait on that stream.
            known[own][other] = before + 1;
            events[before].get_or_insert_with(|| {
                next += 1;
                next - 1
            });
            waits[at].push(before);
        }
    }
    let mut is_used = vec![false; streams];
    is_used[usize::from(CALLER)] = true;
    // Event 0 is the operation's start.
    if items.iter().any(|item| item.stream != CALLER) {
        script.ops.push((CALLER, StreamOp::Record(0)));
    }
    for (at, item) in items.iter().enumerate() {
        let used = &mut is_used[usize::from(item.stream)];
        if !*used {
            *used = true;
            script.ops.push((item.stream, StreamOp::Wait(0)));
        }
        for &before in &waits[at] {
            script
                .ops
                .extend(events[before].map(|event| (item.stream, StreamOp::Wait(event))));
        }
        script.ops.extend(item.ops.iter().map(|op| (item.stream, op.clone())));
        script
            .ops
            .extend(events[at].map(|event| (item.stream, StreamOp::Record(event))));
    }
    for stream in (1..script.streams).filter(|stream| is_used[usize::from(*stream)]) {
        script.ops.push((stream, StreamOp::Record(next)));
        script.ops.push((CALLER, StreamOp::Wait(next)));
        next += 1;
    }
    script.events = next;
}

#[cfg(test)]
#[path = "script_tests.rs"]
mod tests;
