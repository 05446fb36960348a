//! The checker: runs a plan with symbols for data, and so proves it for every count, type and operator.
//!
//! Every block holds a value: which data block it is, and whose contributions it has. A message carries the values of its blocks, and a reduction adds contributions up, each of which may come once. In the end every rank's output
//! must have the right data blocks, with all contributions.
//!
//! One run is enough. Strands only wait for messages, for room and for their own memory, and take messages from one sender in their order: whatever is done first, each strand sees the same. So if one order of events gets to the end, all do; and
//! the run finds that strands share no block that one of them writes, on which this rests. What an executor is taken to do is said in [`plan`](crate::plan).
//!
//! That run is with short messages, which says what is where in the end. A second one, `long`, is with messages longer than any memory for them, which stay where they are until their receivers come to them: it proves that all ranks come to
//! the end with messages of any lengths. What it takes the executor to do, and why it is enough, is said there.

#[cfg(test)]
mod damage;
mod flaw;
mod long;
mod memory;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

pub use flaw::{At, Fault, Flaw, Wait, Why};
use long::Rules;
use memory::{Memory, Sum, Value, missing};

use crate::plan::{Collective, Form, Plan, Shape, Span, Step};
use crate::types::Rank;

/// That a plan is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Proof {
    /// Whether in place, too.
    pub in_place: bool,
    /// Steps of all ranks.
    pub steps: u64,
    /// Messages of all ranks.
    pub messages: u64,
}

/// The most blocks that all ranks' inputs of a plan may have that is checked, and their outputs: more take gigabytes.
const MOST_BLOCKS: u64 = 1 << 23;

/// Proves `plan`: each data block ends where it belongs with each rank's contribution exactly once; messages match; no wait is in a cycle, however long messages are; nothing is read before it is written; nothing writes the input; no two strands use a block that one of
/// them writes. If it says that it may run in place, then in place as well.
///
/// # Errors
/// The first flaw that was found.
pub fn prove(plan: &Plan) -> Result<Proof, Flaw> {
    shape(&plan.shape).map_err(|fault| Flaw { at: At::Plan, fault })?;
    let proof = Run::new(plan, false)?.run()?;
    long::Run::new(plan, false, Rules::LEAST).run()?;
    if !plan.in_place {
        return Ok(proof);
    }
    if !plan.shape.collective.runs_in_place() {
        let fault = Fault::Shape("this collective does not run in place");
        return Err(Flaw { at: At::Plan, fault });
    }
    let proof = Run::new(plan, true)?.run()?;
    long::Run::new(plan, true, Rules::LEAST).run()?;
    Ok(proof)
}

/// Whether there can be such a shape.
fn shape(shape: &Shape) -> Result<(), Fault> {
    let ranks = shape.order.len();
    if ranks == 0 {
        return Err(Fault::Shape("there are no ranks"));
    }
    if shape.root.index() >= ranks {
        return Err(Fault::Shape("the root is no member"));
    }
    let mut there = vec![false; ranks];
    for rank in &shape.order {
        match there.get_mut(rank.index()) {
            Some(there) if !*there => *there = true,
            _ => return Err(Fault::Shape("the order is no permutation of the ranks")),
        }
    }
    if shape.blocks == 0 && shape.collective != Collective::Barrier {
        return Err(Fault::Shape("there are no blocks"));
    }
    // A rank has all of what is reduced or broadcast, and a part for each rank of the others.
    let parts = match shape.collective {
        Collective::AllReduce | Collective::Broadcast | Collective::Reduce => 1,
        _ => ranks as u64,
    };
    match (ranks as u64 * parts).checked_mul(u64::from(shape.blocks)) {
        Some(blocks) if blocks <= MOST_BLOCKS => Ok(()),
        _ => Err(Fault::Shape("there are too many blocks to check")),
    }
}

/// A message that is on its way.
struct Message {
    form: Form,
    values: Vec<Value>,
    /// The sender's cells that it has not left.
    held: Vec<usize>,
    /// Of a barrier: who is known to have come.
    come: Box<[u64]>,
}

/// The messages of a strand from one rank to another.
#[derive(Default)]
struct Queue {
    /// By number of the message: the step that sends it.
    sends: Vec<u32>,
    /// By number of the message: the step that receives it, and if that reduces, the one from which on the message is staged: that after the receive before.
    receives: Vec<(u32, Option<u32>)>,
    /// How many were sent.
    sent: usize,
    on_its_way: Option<Message>,
}

/// A strand of a rank.
#[derive(Clone, Copy)]
struct Actor {
    next: u32,
    waits: Option<(Rank, Why)>,
    /// Whether it is in the list of those to go on.
    listed: bool,
}

/// What a step came to.
enum Outcome {
    Done,
    Waits(Rank, Why),
}

/// A plan being run.
struct Run<'a> {
    plan: &'a Plan,
    in_place: bool,
    ranks: u32,
    memories: Vec<Memory>,
    queues: HashMap<(u32, Rank, Rank), Queue>,
    /// By strand and rank.
    actors: Vec<Actor>,
    /// Those that may be able to go on.
    ready: Vec<(u32, Rank)>,
    /// Of a barrier, by rank: who is known to have come.
    come: Vec<Box<[u64]>>,
}

impl<'a> Run<'a> {
    fn new(plan: &'a Plan, in_place: bool) -> Result<Self, Flaw> {
        let ranks = plan.shape.ranks();
        let strands = plan.programs.first().map_or(0, |program| program.strands.len());
        if plan.programs.len() != ranks as usize || plan.programs.iter().any(|program| program.strands.len() != strands)
        {
            return Err(Flaw {
                at: At::Plan,
                fault: Fault::Programs,
            });
        }
        let data_blocks = plan.shape.data_blocks();
        if plan
            .programs
            .iter()
            .flat_map(|program| program.scratch.iter().chain(&program.partial))
            .any(|&like| like >= data_blocks)
        {
            let fault = Fault::Shape("memory is as long as a data block that there is not");
            return Err(Flaw { at: At::Plan, fault });
        }
        let memory = |(program, rank)| Memory::new(&plan.shape, Rank(rank), program, in_place);
        let come = |rank: u32| {
            let mut set = vec![
                0;
                if plan.shape.collective == Collective::Barrier {
                    (ranks as usize).div_ceil(64)
                } else {
                    0
                }
            ];
            if let Some(word) = set.get_mut(rank as usize / 64) {
                *word = 1 << (rank % 64);
            }
            set.into_boxed_slice()
        };
        let actor = Actor {
            next: 0,
            waits: None,
            listed: true,
        };
        Ok(Self {
            plan,
            in_place,
            ranks,
            memories: plan.programs.iter().zip(0..).map(memory).collect(),
            queues: queues(plan)?,
            actors: vec![actor; strands * ranks as usize],
            ready: (0..strands as u32)
                .flat_map(|strand| (0..ranks).map(move |rank| (strand, Rank(rank))))
                .collect(),
            come: (0..ranks).map(come).collect(),
        })
    }

    /// The actor of `rank` in `strand`.
    fn actor(&self, strand: u32, rank: Rank) -> usize {
        strand as usize * self.ranks as usize + rank.index()
    }

    /// Has `rank` look whether it can go on.
    fn wake(&mut self, strand: u32, rank: Rank) {
        let at = self.actor(strand, rank);
        if !std::mem::replace(&mut self.actors[at].listed, true) {
            self.ready.push((strand, rank));
        }
    }

    fn run(mut self) -> Result<Proof, Flaw> {
        while let Some((strand, rank)) = self.ready.pop() {
            let at = self.actor(strand, rank);
            self.actors[at].listed = false;
            let steps = &self.plan.programs[rank.index()].strands[strand as usize];
            while let Some(step) = steps.get(self.actors[at].next as usize) {
                let next = self.actors[at].next;
                let outcome = self.step(strand, rank, step).map_err(|fault| Flaw {
                    at: At::Step {
                        rank,
                        strand,
                        step: next,
                    },
                    fault,
                })?;
                match outcome {
                    Outcome::Waits(peer, why) => {
                        self.actors[at].waits = Some((peer, why));
                        break;
                    }
                    Outcome::Done => {}
                }
                self.actors[at].next += 1;
                self.actors[at].waits = None;
            }
        }
        self.finish()
    }

    /// What one step does; nothing, if it has to wait.
    fn step(&mut self, strand: u32, rank: Rank, step: &Step) -> Result<Outcome, Fault> {
        let shape = &self.plan.shape;
        let memory = &mut self.memories[rank.index()];
        match step {
            Step::Send { to, span } => {
                let queue = self.queues.get_mut(&(strand, rank, *to)).ok_or(Fault::Peer(*to))?;
                if queue.on_its_way.is_some() {
                    return Ok(Outcome::Waits(*to, Why::Room));
                }
                let cells = memory.cells(*span)?;
                let values = memory.read(strand, *span, &cells)?;
                let receiver = self.actors[strand as usize * self.ranks as usize + to.index()];
                let staged = queue.receives[queue.sent].1.is_some_and(|from| receiver.next >= from);
                let held = if staged { Vec::new() } else { cells };
                memory.hold(&held, *to);
                queue.sent += 1;
                queue.on_its_way = Some(Message {
                    form: span.place.form(),
                    values,
                    held,
                    come: self.come[rank.index()].clone(),
                });
                self.wake(strand, *to);
                Ok(Outcome::Done)
            }
            Step::Recv { from, into } => {
                let cells = memory.cells(*into)?;
                let message = match self.take(strand, rank, *from, into.place.form(), *into, &cells)? {
                    Ok(message) => message,
                    Err(waits) => return Ok(waits),
                };
                self.memories[rank.index()].write(shape, strand, *into, &cells, message.values)?;
                self.received(strand, rank, *from);
                Ok(Outcome::Done)
            }
            Step::RecvReduce { from, form, with, into } => {
                let sources = memory.cells(*with)?;
                let cells = memory.cells(*into)?;
                let message = match self.take(strand, rank, *from, *form, *into, &cells)? {
                    Ok(message) => message,
                    Err(waits) => return Ok(waits),
                };
                let operands = self.memories[rank.index()].read(strand, *with, &sources)?;
                self.reduce(strand, rank, *into, &cells, &[sources], &[message.values, operands])?;
                self.received(strand, rank, *from);
                Ok(Outcome::Done)
            }
            Step::Reduce { sources, into } => {
                let cells = memory.cells(*into)?;
                if let Some(peer) = memory.held(&cells) {
                    return Ok(Outcome::Waits(peer, Why::Overwrite));
                }
                let from = sources
                    .iter()
                    .map(|source| memory.cells(*source))
                    .collect::<Result<Vec<_>, _>>()?;
                let operands = sources
                    .iter()
                    .zip(&from)
                    .map(|(source, cells)| memory.read(strand, *source, cells));
                let operands = operands.collect::<Result<Vec<_>, _>>()?;
                self.reduce(strand, rank, *into, &cells, &from, &operands)?;
                Ok(Outcome::Done)
            }
            Step::Copy { from, into } => {
                let (sources, cells) = (memory.cells(*from)?, memory.cells(*into)?);
                if from.blocks != into.blocks {
                    return Err(Fault::Blocks {
                        from: from.blocks,
                        into: into.blocks,
                    });
                }
                if from.place.form() != into.place.form() {
                    let (sent, expected) = (from.place.form(), into.place.form());
                    return Err(Fault::Forms {
                        from: rank,
                        sent,
                        expected,
                    });
                }
                let values = memory.read(strand, *from, &sources)?;
                if sources == cells {
                    return Ok(Outcome::Done);
                }
                if let Some(peer) = memory.held(&cells) {
                    return Ok(Outcome::Waits(peer, Why::Overwrite));
                }
                memory.apart(&cells, &[sources])?;
                memory.write(shape, strand, *into, &cells, values)?;
                Ok(Outcome::Done)
            }
        }
    }

    /// Takes the message from `from` for `cells`, those of `into`, if it is there and they can be written.
    fn take(
        &mut self,
        strand: u32,
        rank: Rank,
        from: Rank,
        form: Form,
        into: Span,
        cells: &[usize],
    ) -> Result<Result<Message, Outcome>, Fault> {
        let queue = self.queues.get_mut(&(strand, from, rank)).ok_or(Fault::Peer(from))?;
        let Some(message) = queue.on_its_way.as_ref() else {
            return Ok(Err(Outcome::Waits(from, Why::Message)));
        };
        if message.values.len() != into.blocks as usize {
            let from = message.values.len() as u32;
            return Err(Fault::Blocks {
                from,
                into: into.blocks,
            });
        }
        if message.form != form && into.blocks > 0 {
            let sent = message.form;
            return Err(Fault::Forms {
                from,
                sent,
                expected: form,
            });
        }
        if let Some(peer) = self.memories[rank.index()].held(cells) {
            return Ok(Err(Outcome::Waits(peer, Why::Overwrite)));
        }
        let Some(message) = queue.on_its_way.take() else {
            return Ok(Err(Outcome::Waits(from, Why::Message)));
        };
        self.memories[from.index()].release(&message.held);
        for (mine, theirs) in self.come[rank.index()].iter_mut().zip(&message.come) {
            *mine |= theirs;
        }
        Ok(Ok(message))
    }

    /// After a message from `from` was received: it may send the next; and the message for the receive that follows, if that reduces, leaves its sender's memory.
    fn received(&mut self, strand: u32, rank: Rank, from: Rank) {
        self.wake(strand, from);
        let steps = &self.plan.programs[rank.index()].strands[strand as usize];
        let later = &steps[self.actors[self.actor(strand, rank)].next as usize + 1..];
        let next = later
            .iter()
            .find(|step| matches!(step, Step::Recv { .. } | Step::RecvReduce { .. }));
        if let Some(&Step::RecvReduce { from, .. }) = next
            && let Some(queue) = self.queues.get_mut(&(strand, from, rank))
            && let Some(message) = &mut queue.on_its_way
        {
            self.memories[from.index()].release(&std::mem::take(&mut message.held));
            self.wake(strand, from);
        }
    }

    /// Reduces `operands`, which come from `sources` as far as they come from memory, to `cells`, those of `into`.
    fn reduce(
        &mut self,
        strand: u32,
        rank: Rank,
        into: Span,
        cells: &[usize],
        sources: &[Vec<usize>],
        operands: &[Vec<Value>],
    ) -> Result<(), Fault> {
        let shape = &self.plan.shape;
        if !shape.collective.reduces() {
            return Err(Fault::Reduces(shape.collective));
        }
        if let Some(other) = operands.iter().find(|operand| operand.len() != cells.len()) {
            return Err(Fault::Blocks {
                from: other.len() as u32,
                into: into.blocks,
            });
        }
        let memory = &mut self.memories[rank.index()];
        memory.apart(cells, sources)?;
        let sum = |index: usize| {
            let mut sum = Sum::new(self.ranks);
            operands.iter().try_for_each(|operand| sum.add(&operand[index]))?;
            sum.finish(into.place, self.ranks)
        };
        let values = (0..cells.len()).map(sum).collect::<Result<_, _>>()?;
        memory.write(shape, strand, into, cells, values)
    }

    /// When nobody can go on: whether all are at the end, with what belongs there.
    fn finish(self) -> Result<Proof, Flaw> {
        if let Some(stuck) = self.actors.iter().position(|actor| actor.waits.is_some()) {
            let waits = chain(&self.actors, self.ranks, stuck);
            let Wait { rank, strand, step, .. } = waits[0];
            return Err(Flaw {
                at: At::Step { rank, strand, step },
                fault: Fault::Cycle(waits),
            });
        }
        for (rank, memory) in (0..).map(Rank).zip(&self.memories) {
            let flaw = |fault| Flaw {
                at: At::End { rank },
                fault,
            };
            memory.output(&self.plan.shape, rank).map_err(flaw)?;
            if self.plan.shape.collective == Collective::Barrier
                && let Some(other) = missing(&self.come[rank.index()], self.ranks)
            {
                return Err(flaw(Fault::NotCome(other)));
            }
        }
        let steps = self
            .plan
            .programs
            .iter()
            .flat_map(|program| &program.strands)
            .map(|strand| strand.len() as u64);
        Ok(Proof {
            in_place: self.in_place,
            steps: steps.sum(),
            messages: self.queues.values().map(|queue| queue.sent as u64).sum(),
        })
    }
}

/// Who waits for whom, in a circle, from an actor that waits. All that anybody waits for is something that a strand has yet to do, since messages match in number: so the chain comes back to itself.
fn chain(actors: &[Actor], ranks: u32, stuck: usize) -> Vec<Wait> {
    let mut chain: Vec<(usize, Wait)> = Vec::new();
    let mut at = stuck;
    while let (None, Some((peer, why))) = (chain.iter().position(|(seen, _)| *seen == at), actors[at].waits) {
        let (strand, rank) = (at as u32 / ranks, Rank(at as u32 % ranks));
        let step = actors[at].next;
        chain.push((
            at,
            Wait {
                rank,
                strand,
                step,
                peer,
                why,
            },
        ));
        at = (strand * ranks + peer.0) as usize;
    }
    let begin = chain.iter().position(|(seen, _)| *seen == at).unwrap_or(0);
    chain.into_iter().skip(begin).map(|(_, wait)| wait).collect()
}

/// The queues of a plan, with who sends and receives what.
fn queues(plan: &Plan) -> Result<HashMap<(u32, Rank, Rank), Queue>, Flaw> {
    let ranks = plan.shape.ranks();
    let mut queues: HashMap<(u32, Rank, Rank), Queue> = HashMap::new();
    for (rank, program) in (0..).map(Rank).zip(&plan.programs) {
        for (strand, steps) in (0..).zip(&program.strands) {
            let mut after_receive = 0;
            for (number, step) in (0..).zip(steps) {
                let (peer, receives) = match step {
                    Step::Send { to, .. } => (*to, None),
                    Step::Recv { from, .. } => (*from, Some(None)),
                    Step::RecvReduce { from, .. } => (*from, Some(Some(after_receive))),
                    Step::Reduce { .. } | Step::Copy { .. } => continue,
                };
                if peer.0 >= ranks || peer == rank {
                    let at = At::Step {
                        rank,
                        strand,
                        step: number,
                    };
                    return Err(Flaw {
                        at,
                        fault: Fault::Peer(peer),
                    });
                }
                match receives {
                    None => queues.entry((strand, rank, peer)).or_default().sends.push(number),
                    Some(staged) => {
                        let queue = queues.entry((strand, peer, rank)).or_default();
                        queue.receives.push((number, staged));
                        after_receive = number + 1;
                    }
                }
            }
        }
    }
    for (&(strand, from, to), queue) in &queues {
        let (sent, received) = (queue.sends.len(), queue.receives.len());
        let at = match sent.cmp(&received) {
            std::cmp::Ordering::Equal => continue,
            std::cmp::Ordering::Greater => At::Step {
                rank: from,
                strand,
                step: queue.sends[received],
            },
            std::cmp::Ordering::Less => At::Step {
                rank: to,
                strand,
                step: queue.receives[sent].0,
            },
        };
        let (sent, received) = (sent as u32, received as u32);
        return Err(Flaw {
            at,
            fault: Fault::Unmatched {
                from,
                to,
                sent,
                received,
            },
        });
    }
    Ok(queues)
}
