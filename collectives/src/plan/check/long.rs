//! Long messages: whether ranks come to the end when no message is out of its sender's memory before its receiver takes it.
//!
//! The first run of the checker lets a message that is to be reduced leave its sender's memory as soon as it is staged. But there is only so much memory to stage it in: of a message that is longer, the rest stays where it is until its
//! receiver has come to the step that takes it, and has taken what is before the rest. (A *rendezvous*.) Where a rank writes what it is still sending, as in place, two may then wait for each other that would not with short messages. So
//! the plan is run once more, as the executor runs it, with messages of which nothing is staged beforehand:
//!
//! - `Send` only begins a message: what follows goes on. Those to one rank leave in their order.
//! - A message *flows* while its receiver is at the step that takes it, part after part. What it is written over must be out of the way of all messages that the receiver has begun and not ended: either they have none of those blocks,
//!   or they are of exactly these blocks, one for one, and flow as well; then each part is written when the same part has left.
//! - A part for `RecvReduce` is staged, and may leave before what it is written over does; a part for `Recv` goes straight to its destination, and leaves after. So of those tied to each other in that way none may be in a circle.
//! - `Reduce` and `Copy` wait until all messages of what they write have ended.
//!
//! What flows ends, all of it together, and the strands go on. If they come to the end, then so do the ranks of an executor, for messages of any lengths, none of which needs to be like another, and any number of parts of each:
//!
//! 1. *There is an order that works.* Let those that flow together go part by part: part *j* of all is granted, then sent, then taken, before part *j* + 1 of any. It asks for memory for one part of a message per strand, which is staged when
//!    its receiver is at that step, and for a place in each queue. Slices and operations that follow start when all is as at first.
//! 2. *So every order does.* All that an executor waits for (a message or a grant before, a part in a queue, memory whose turn it is, a request confirmed, a step done) stays so once it is, until the one who waits has gone on; it is
//!    granted, sent and taken in the order of the program. So whatever is done first, nothing is taken from another: who is not at the end finds something to do as long as the order of 1 has a first event that has not happened.
//! 3. More memory only lets more happen, and earlier. Messages in slots (of LL and LL128, and eager ones of Simple) are staged where they arrive, and a ring has a free slot whenever all before has been taken. Where all messages of operations are short, a send does wait
//!    for its slot before what follows goes on, and always gets one: `executor::lane::short` says why.
//!
//! It is taken for granted that devices confirm what arrives, that both ends cut a message alike, that whatever is staged is granted in the order of the receives, and that strands have memory for it of their own. Time, and ranks that do not come,
//! are the deadline's.

use std::collections::{HashMap, VecDeque};

use super::memory::Memory;
use super::{Actor, At, Fault, Flaw, Why, chain};
use crate::plan::{Plan, Span, Step};
use crate::types::Rank;

/// What is known of the executor.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    /// So many messages are staged before their receiver has come to them, if they are next and it reduces them.
    pub(super) ahead: usize,
    /// Whether a part of a step's target is free when the same part has left of a message, of another span perhaps, that is of the same memory.
    pub(super) by_parts: fn(sent: Span, written: Span) -> bool,
}

impl Rules {
    /// The least that an executor does.
    pub(super) const LEAST: Self = Self {
        ahead: 0,
        by_parts: |_, _| true,
    };
}

/// A message, from when it was begun.
struct Message {
    to: Rank,
    span: Span,
    /// The sender's cells that it has not left.
    cells: Vec<usize>,
}

/// Which of the messages begun.
type Number = usize;

/// What a strand of a rank receives next.
struct Receive {
    strand: u32,
    rank: Rank,
    message: Number,
    /// Whether it goes straight to its destination.
    direct: bool,
    span: Span,
    cells: Vec<usize>,
}

/// A plan being run, with long messages.
pub(super) struct Run<'a> {
    plan: &'a Plan,
    rules: Rules,
    ranks: u32,
    memories: Vec<Memory>,
    messages: Vec<Message>,
    /// Those begun and not ended, by strand, sender and receiver: their numbers.
    queues: HashMap<(u32, Rank, Rank), VecDeque<Number>>,
    /// By rank and cell: the messages that have not left it.
    held: Vec<HashMap<usize, Vec<Number>>>,
    /// By strand and rank.
    actors: Vec<Actor>,
    /// Whether anything was done in this round.
    moved: bool,
}

impl<'a> Run<'a> {
    /// Of a plan that has no other flaw.
    pub(super) fn new(plan: &'a Plan, in_place: bool, rules: Rules) -> Self {
        let ranks = plan.shape.ranks();
        let strands = plan.programs.first().map_or(0, |program| program.strands.len());
        let memory = |(program, rank)| Memory::new(&plan.shape, Rank(rank), program, in_place);
        let actor = Actor {
            next: 0,
            waits: None,
            listed: false,
        };
        Self {
            plan,
            rules,
            ranks,
            memories: plan.programs.iter().zip(0..).map(memory).collect(),
            messages: Vec::new(),
            queues: HashMap::new(),
            held: vec![HashMap::new(); ranks as usize],
            actors: vec![actor; strands * ranks as usize],
            moved: false,
        }
    }

    pub(super) fn run(mut self) -> Result<(), Flaw> {
        loop {
            self.moved = false;
            let mut receives = Vec::new();
            for at in 0..self.actors.len() {
                let (strand, rank) = (at as u32 / self.ranks, Rank(at as u32 % self.ranks));
                let receive = self.advance(at, strand, rank).map_err(|fault| {
                    let step = self.actors[at].next;
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
        let Some(stuck) = self.actors.iter().position(|actor| actor.waits.is_some()) else {
            return Ok(());
        };
        let waits = chain(&self.actors, self.ranks, stuck);
        let (rank, strand, step) = (waits[0].rank, waits[0].strand, waits[0].step);
        Err(Flaw {
            at: At::Step { rank, strand, step },
            fault: Fault::LongCycle(waits),
        })
    }

    /// Goes on in a strand as far as nothing is received. Gives what is received next, if that was begun.
    fn advance(&mut self, at: usize, strand: u32, rank: Rank) -> Result<Option<Receive>, Fault> {
        let steps = &self.plan.programs[rank.index()].strands[strand as usize];
        loop {
            self.actors[at].waits = None;
            let Some(step) = steps.get(self.actors[at].next as usize) else {
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
                    self.stage(strand, rank, steps, self.actors[at].next as usize);
                    let begun = self
                        .queues
                        .get(&(strand, *from, rank))
                        .and_then(|queue| queue.front().copied());
                    // What it waits for, unless it turns out to flow.
                    let overwrites = self.ties(rank, &cells).first().map(|tie| self.messages[*tie].to);
                    self.actors[at].waits = Some(match (begun, overwrites) {
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
            self.actors[at].next += 1;
            self.moved = true;
        }
    }

    fn begin(&mut self, strand: u32, rank: Rank, to: Rank, span: Span, cells: Vec<usize>) {
        let number = self.messages.len();
        for cell in &cells {
            self.held[rank.index()].entry(*cell).or_default().push(number);
        }
        self.messages.push(Message { to, span, cells });
        self.queues.entry((strand, rank, to)).or_default().push_back(number);
    }

    /// A message has left its sender's memory.
    fn leave(&mut self, from: Rank, number: Number) {
        for cell in std::mem::take(&mut self.messages[number].cells) {
            self.moved = true;
            if let Some(held) = self.held[from.index()].get_mut(&cell) {
                held.retain(|other| *other != number);
            }
        }
    }

    /// Messages of the rank that have not left these cells.
    fn ties(&self, rank: Rank, cells: &[usize]) -> Vec<Number> {
        let held = &self.held[rank.index()];
        let mut ties: Vec<_> = cells
            .iter()
            .filter_map(|cell| held.get(cell))
            .flatten()
            .copied()
            .collect();
        ties.sort_unstable();
        ties.dedup();
        ties
    }

    /// Whether a step that writes these cells has to wait for a message to leave them.
    fn waits_for_cells(&mut self, at: usize, rank: Rank, cells: &[usize]) -> bool {
        let first = self.ties(rank, cells).first().copied();
        self.actors[at].waits = first.map(|tie| (self.messages[tie].to, Why::Overwrite));
        first.is_some()
    }

    /// Short messages leave beforehand that are next and to be reduced.
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
                // Memory is given in the order of the receives, but who is given some need not wait for another.
                continue;
            };
            *place += 1;
            self.leave(*from, number);
        }
    }

    /// Those of the receives whose messages flow.
    fn flowing(&self, mut receives: Vec<Receive>) -> Vec<Receive> {
        loop {
            let before = receives.len();
            let flows: HashMap<Number, usize> = receives.iter().map(|one| one.message).zip(0..).collect();
            let ties: Vec<_> = receives.iter().map(|one| self.ties(one.rank, &one.cells)).collect();
            let tied = |one: &Receive, tie: &Number| {
                let sent = &self.messages[*tie];
                flows.contains_key(tie) && sent.cells == one.cells && (self.rules.by_parts)(sent.span, one.span)
            };
            let mut may: Vec<bool> = receives
                .iter()
                .zip(&ties)
                .map(|(one, ties)| ties.iter().all(|tie| tied(one, tie)))
                .collect();
            // Of those that go straight to their destination, each part leaves after what it is written over.
            let mut leaves: Vec<bool> = receives
                .iter()
                .zip(&may)
                .map(|(one, may)| *may && !one.direct)
                .collect();
            loop {
                let mut more = false;
                for index in 0..receives.len() {
                    let after = || ties[index].iter().all(|tie| leaves[flows[tie]]);
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

    /// A message has come as a whole.
    fn end(&mut self, receive: &Receive) {
        let Receive {
            strand, rank, message, ..
        } = *receive;
        let at = (strand * self.ranks + rank.0) as usize;
        let step = &self.plan.programs[rank.index()].strands[strand as usize][self.actors[at].next as usize];
        if let Step::Recv { from, .. } | Step::RecvReduce { from, .. } = step {
            self.leave(*from, message);
            if let Some(queue) = self.queues.get_mut(&(strand, *from, rank)) {
                queue.pop_front();
            }
        }
        self.actors[at].next += 1;
        self.moved = true;
    }
}

#[cfg(test)]
#[path = "long_tests.rs"]
mod tests;
