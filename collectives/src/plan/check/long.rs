//! Long messages (rendezvous): whether all ranks complete if no message leaves its sender's memory
//! before its receiver takes it.
//!
//! The first run lets a message that is to be reduced leave its sender's memory as soon as it is
//! staged. But staging memory is limited, and if a rank writes memory that it is still sending, two
//! ranks may deadlock that would not with short messages. So the plan is executed once more with
//! messages of which nothing is staged in advance:
//!
//! - `Send` only begins a message; execution continues. Messages to one rank leave in order.
//! - A message *flows* while its receiver is at the step that takes it, part after part. Its target
//!   must be free of all messages that the receiver has begun and not ended: they have none of
//!   those blocks, or exactly these blocks, one for one, and flow as well; then each part is
//!   written when the same part has left.
//! - A part for `RecvReduce` is staged, and may leave before its target is free; a part for `Recv`
//!   goes straight to its destination, and leaves after. So messages tied in that way must not form
//!   a cycle.
//! - `Reduce` and `Copy` wait until all messages of their target have ended.
//!
//! All flowing messages end together, and the strands continue. If they complete, so do the ranks
//! of an executor, for messages of any lengths and numbers of parts:
//!
//! 1. *There is an order that completes.* Let messages that flow together proceed part by part:
//!    part *j* of all is granted, then sent, then received, before part *j* + 1 of any. It needs
//!    memory for one part of a message per strand, staged when its receiver is at that step, and
//!    one slot in each queue. Slices and later operations start from the initial state.
//! 2. *So every order completes.* Everything that an executor waits for (an earlier message or
//!    grant, a part in a queue, memory whose turn it is, an acknowledgement, a completed step)
//!    remains true until the waiting strand continues; grants, sends and receives are in program
//!    order. So no action takes anything from another: a strand that is not at the end can act as
//!    long as the order of 1 has a first event that has not happened.
//! 3. More memory only lets more happen, and earlier. Messages in slots (LL, LL128, and eager ones
//!    of Simple) are staged on arrival, and a ring has a free slot whenever all earlier ones have
//!    been consumed.
//!
//! An executor that compares the memory of parts, as ours does, completes some plans that this
//! rejects: here a message is in the way of a write to any of its memory, unless both flow and are
//! alike.
//!
//! Assumptions: devices acknowledge what arrives, both ends cut a message alike, staging memory is
//! granted in the order of the receives, and each strand has its own. Time, and missing ranks, are
//! handled by deadlines.

use std::collections::{HashMap, VecDeque};

use super::memory::Memory;
use super::{At, Fault, Flaw, StrandState, Why, wait_cycle};
use crate::plan::{Plan, Span, Step};
use crate::types::Rank;

#[derive(Clone, Copy)]
pub(super) struct Rules {
    /// Messages staged before their receiver is at them, if they are next and reduced.
    pub(super) ahead: usize,
    /// Whether a part is free once the same part of a message of the same memory has left.
    pub(super) by_parts: fn(sent: Span, written: Span) -> bool,
}

impl Rules {
    pub(super) const LEAST: Self = Self {
        ahead: 0,
        by_parts: |_, _| true,
    };
}

struct Message {
    to: Rank,
    span: Span,
    cells: Vec<usize>,
}

type Number = usize;

struct Receive {
    strand: u32,
    rank: Rank,
    message: Number,
    direct: bool,
    span: Span,
    cells: Vec<usize>,
}

pub(super) struct Run<'a> {
    plan: &'a Plan,
    rules: Rules,
    ranks: u32,
    memories: Vec<Memory>,
    messages: Vec<Message>,
    /// Messages begun and not ended, by strand, sender and receiver.
    queues: HashMap<(u32, Rank, Rank), VecDeque<Number>>,
    /// By rank and cell: the messages that have not left it.
    pending: Vec<HashMap<usize, Vec<Number>>>,
    strand_states: Vec<StrandState>,
    moved: bool,
}

impl<'a> Run<'a> {
    /// For a plan that has no other flaw.
    pub(super) fn new(plan: &'a Plan, in_place: bool, rules: Rules) -> Self {
        let ranks = plan.shape.ranks();
        let strands = plan.programs.first().map_or(0, |program| program.strands.len());
        let memory = |(program, rank)| Memory::new(&plan.shape, Rank(rank), program, in_place);
        let strand_state = StrandState {
            next: 0,
            waits: None,
            is_ready: false,
        };
        Self {
            plan,
            rules,
            ranks,
            memories: plan.programs.iter().zip(0..).map(memory).collect(),
            messages: Vec::new(),
            queues: HashMap::new(),
            pending: vec![HashMap::new(); ranks as usize],
            strand_states: vec![strand_state; strands * ranks as usize],
            moved: false,
        }
    }

    pub(super) fn run(mut self) -> Result<(), Flaw> {
        loop {
            self.moved = false;
            let mut receives = Vec::new();
            for at in 0..self.strand_states.len() {
                let (strand, rank) = (at as u32 / self.ranks, Rank(at as u32 % self.ranks));
                let receive = self.advance(at, strand, rank).map_err(|fault| {
                    let step = self.strand_states[at].next;
                    Flaw {
                        at: At::Step { rank, strand, step },
                        fault,
                    }
                })?;
                receives.extend(receive);
            }
            for receive in self.flowing(receives) {
                self.end(&receive);
            }
            if !self.moved {
                break;
            }
        }
        let Some(stuck) = self
            .strand_states
            .iter()
            .position(|strand_state| strand_state.waits.is_some())
        else {
            return Ok(());
        };
        let waits = wait_cycle(&self.strand_states, self.ranks, stuck);
        let (rank, strand, step) = (waits[0].rank, waits[0].strand, waits[0].step);
        Err(Flaw {
            at: At::Step { rank, strand, step },
            fault: Fault::LongCycle(waits),
        })
    }

    /// Advances a strand up to its next receive, which is returned if its message was begun.
    fn advance(&mut self, at: usize, strand: u32, rank: Rank) -> Result<Option<Receive>, Fault> {
        let steps = &self.plan.programs[rank.index()].strands[strand as usize];
        loop {
            self.strand_states[at].waits = None;
            let Some(step) = steps.get(self.strand_states[at].next as usize) else {
                return Ok(None);
            };
            let memory = &self.memories[rank.index()];
            match step {
                Step::Send { to, span } => {
                    let cells = memory.cells(*span)?;
                    self.begin(strand, rank, *to, *span, cells);
                }
                Step::Reduce { into, .. } => {
                    let cells = memory.cells(*into)?;
                    if self.waits_for_cells(at, rank, &cells) {
                        return Ok(None);
                    }
                }
                Step::Copy { from, into } => {
                    let cells = memory.cells(*into)?;
                    if memory.cells(*from)? != cells && self.waits_for_cells(at, rank, &cells) {
                        return Ok(None);
                    }
                }
                Step::Recv { from, into } | Step::RecvReduce { from, into, .. } => {
                    let cells = memory.cells(*into)?;
                    self.stage(strand, rank, steps, self.strand_states[at].next as usize);
                    let begun = self
                        .queues
                        .get(&(strand, *from, rank))
                        .and_then(|queue| queue.front().copied());
                    // What it waits for, unless its message flows.
                    let overwrites = self
                        .pending_messages_on(rank, &cells)
                        .first()
                        .map(|tie| self.messages[*tie].to);
                    self.strand_states[at].waits = Some(match (begun, overwrites) {
                        (Some(_), Some(peer)) => (peer, Why::Overwrite),
                        _ => (*from, Why::Message),
                    });
                    return Ok(begun.map(|message| Receive {
                        strand,
                        rank,
                        message,
                        direct: matches!(step, Step::Recv { .. }),
                        span: *into,
                        cells,
                    }));
                }
            }
            self.strand_states[at].next += 1;
            self.moved = true;
        }
    }

    fn begin(&mut self, strand: u32, rank: Rank, to: Rank, span: Span, cells: Vec<usize>) {
        let number = self.messages.len();
        for cell in &cells {
            self.pending[rank.index()].entry(*cell).or_default().push(number);
        }
        self.messages.push(Message { to, span, cells });
        self.queues.entry((strand, rank, to)).or_default().push_back(number);
    }

    fn leave(&mut self, from: Rank, number: Number) {
        for cell in std::mem::take(&mut self.messages[number].cells) {
            self.moved = true;
            if let Some(pending) = self.pending[from.index()].get_mut(&cell) {
                pending.retain(|other| *other != number);
            }
        }
    }

    fn pending_messages_on(&self, rank: Rank, cells: &[usize]) -> Vec<Number> {
        let pending = &self.pending[rank.index()];
        let mut pending_messages_on: Vec<_> = cells
            .iter()
            .filter_map(|cell| pending.get(cell))
            .flatten()
            .copied()
            .collect();
        pending_messages_on.sort_unstable();
        pending_messages_on.dedup();
        pending_messages_on
    }

    fn waits_for_cells(&mut self, at: usize, rank: Rank, cells: &[usize]) -> bool {
        let first = self.pending_messages_on(rank, cells).first().copied();
        self.strand_states[at].waits = first.map(|tie| (self.messages[tie].to, Why::Overwrite));
        first.is_some()
    }

    /// Short messages that are next and reduced leave in advance.
    fn stage(&mut self, strand: u32, rank: Rank, steps: &[Step], next: usize) {
        let receives = steps[next..]
            .iter()
            .filter(|step| matches!(step, Step::Recv { .. } | Step::RecvReduce { .. }));
        let mut taken: HashMap<Rank, usize> = HashMap::new();
        for step in receives.take(self.rules.ahead) {
            let Step::RecvReduce { from, .. } = step else { return };
            let place = taken.entry(*from).or_default();
            let Some(&number) = self
                .queues
                .get(&(strand, *from, rank))
                .and_then(|queue| queue.get(*place))
            else {
                // Memory is granted in the order of the receives, but its users need not wait for
                // one another.
                continue;
            };
            *place += 1;
            self.leave(*from, number);
        }
    }

    fn flowing(&self, mut receives: Vec<Receive>) -> Vec<Receive> {
        loop {
            let before = receives.len();
            let flows: HashMap<Number, usize> = receives.iter().map(|one| one.message).zip(0..).collect();
            let pending_messages_on: Vec<_> = receives
                .iter()
                .map(|one| self.pending_messages_on(one.rank, &one.cells))
                .collect();
            let tied = |one: &Receive, tie: &Number| {
                let sent = &self.messages[*tie];
                flows.contains_key(tie) && sent.cells == one.cells && (self.rules.by_parts)(sent.span, one.span)
            };
            let mut may: Vec<bool> = receives
                .iter()
                .zip(&pending_messages_on)
                .map(|(one, pending_messages_on)| pending_messages_on.iter().all(|tie| tied(one, tie)))
                .collect();
            // Straight to the destination, each part leaves after the data that it overwrites.
            let mut leaves: Vec<bool> = receives
                .iter()
                .zip(&may)
                .map(|(one, may)| *may && !one.direct)
                .collect();
            loop {
                let mut more = false;
                for index in 0..receives.len() {
                    let after = || pending_messages_on[index].iter().all(|tie| leaves[flows[tie]]);
                    if may[index] && !leaves[index] && after() {
                        leaves[index] = true;
                        more = true;
                    }
                }
                if !more {
                    break;
                }
            }
            may.copy_from_slice(&leaves);
            let mut may = may.into_iter();
            receives.retain(|_| may.next() == Some(true));
            if receives.len() == before {
                return receives;
            }
        }
    }

    fn end(&mut self, receive: &Receive) {
        let Receive {
            strand, rank, message, ..
        } = *receive;
        let at = (strand * self.ranks + rank.0) as usize;
        let step = &self.plan.programs[rank.index()].strands[strand as usize][self.strand_states[at].next as usize];
        if let Step::Recv { from, .. } | Step::RecvReduce { from, .. } = step {
            self.leave(*from, message);
            if let Some(queue) = self.queues.get_mut(&(strand, *from, rank)) {
                queue.pop_front();
            }
        }
        self.strand_states[at].next += 1;
        self.moved = true;
    }
}

#[cfg(test)]
#[path = "long_tests.rs"]
mod tests;
