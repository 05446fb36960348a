//! The plan checker: symbolic execution of a plan, which proves it for every count, type and
//! operator.
//!
//! Every block holds a data block and the set of its contributions, each of which may occur once.
//! At the end every rank's output must hold the right data blocks with all contributions.
//!
//! One run suffices. Strands only wait for messages, queue slots and their own memory, and receive
//! messages of one sender in order: each strand sees the same in any interleaving. So if one
//! interleaving completes, all do; the run also checks the premise that strands share no block that
//! one of them writes.
//!
//! That run has short messages. A second one, `long`, proves freedom from deadlock for messages of
//! any length, which stay at the sender until their receivers are at them (rendezvous).

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
use memory::{Accumulation, Memory, Value, missing};

use crate::plan::{BlockForm, Collective, Plan, Shape, Span, Step};
use crate::types::Rank;

/// The proof that a plan is correct.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Proof {
    /// Whether it also holds in place.
    pub in_place: bool,
    /// Steps of all ranks.
    pub steps: u64,
    /// Messages of all ranks.
    pub messages: u64,
}

/// Blocks of all inputs, and of all outputs, that are checked: more take gigabytes.
const MAX_BLOCKS: u64 = 1 << 23;

/// Proves `plan`: each data block ends where it belongs with each rank's contribution exactly once;
/// no cycle of waits; nothing is read before it is written; the input is not written; strands share
/// no block that one writes. If it may run in place, that is proved too.
///
/// # Errors
/// The first flaw found.
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
    // A rank has the whole of what is reduced or broadcast, and a part for each rank of the others.
    let parts = match shape.collective {
        Collective::AllReduce | Collective::Broadcast | Collective::Reduce => 1,
        _ => ranks as u64,
    };
    match (ranks as u64 * parts).checked_mul(u64::from(shape.blocks)) {
        Some(blocks) if blocks <= MAX_BLOCKS => Ok(()),
        _ => Err(Fault::Shape("there are too many blocks to check")),
    }
}

struct Message {
    form: BlockForm,
    values: Vec<Value>,
    pending: Vec<usize>,
    /// Of a barrier: the ranks known to have entered.
    entered: Box<[u64]>,
}

#[derive(Default)]
struct Queue {
    sends: Vec<u32>,
    /// Receiving steps; if reducing, with the step from which on the message is staged.
    receives: Vec<(u32, Option<u32>)>,
    sent: usize,
    in_flight: Option<Message>,
}

#[derive(Clone, Copy)]
struct StrandState {
    next: u32,
    waits: Option<(Rank, Why)>,
    is_ready: bool,
}

enum Outcome {
    Done,
    Waits(Rank, Why),
}

struct Run<'a> {
    plan: &'a Plan,
    in_place: bool,
    ranks: u32,
    memories: Vec<Memory>,
    queues: HashMap<(u32, Rank, Rank), Queue>,
    strand_states: Vec<StrandState>,
    ready: Vec<(u32, Rank)>,
    /// Of a barrier, by rank: the ranks known to have entered.
    entered: Vec<Box<[u64]>>,
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
            .any(|&length_of| length_of >= data_blocks)
        {
            let fault = Fault::Shape("memory is as long as a data block that there is not");
            return Err(Flaw { at: At::Plan, fault });
        }
        let memory = |(program, rank)| Memory::new(&plan.shape, Rank(rank), program, in_place);
        let entered = |rank: u32| {
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
        let strand_state = StrandState {
            next: 0,
            waits: None,
            is_ready: true,
        };
        Ok(Self {
            plan,
            in_place,
            ranks,
            memories: plan.programs.iter().zip(0..).map(memory).collect(),
            queues: queues(plan)?,
            strand_states: vec![strand_state; strands * ranks as usize],
            ready: (0..strands as u32)
                .flat_map(|strand| (0..ranks).map(move |rank| (strand, Rank(rank))))
                .collect(),
            entered: (0..ranks).map(entered).collect(),
        })
    }

    fn strand_state(&self, strand: u32, rank: Rank) -> usize {
        strand as usize * self.ranks as usize + rank.index()
    }

    fn wake(&mut self, strand: u32, rank: Rank) {
        let at = self.strand_state(strand, rank);
        if !std::mem::replace(&mut self.strand_states[at].is_ready, true) {
            self.ready.push((strand, rank));
        }
    }

    fn run(mut self) -> Result<Proof, Flaw> {
        while let Some((strand, rank)) = self.ready.pop() {
            let at = self.strand_state(strand, rank);
            self.strand_states[at].is_ready = false;
            let steps = &self.plan.programs[rank.index()].strands[strand as usize];
            while let Some(step) = steps.get(self.strand_states[at].next as usize) {
                let next = self.strand_states[at].next;
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
                        self.strand_states[at].waits = Some((peer, why));
                        break;
                    }
                    Outcome::Done => {}
                }
                self.strand_states[at].next += 1;
                self.strand_states[at].waits = None;
            }
        }
        self.finish()
    }

    fn step(&mut self, strand: u32, rank: Rank, step: &Step) -> Result<Outcome, Fault> {
        let shape = &self.plan.shape;
        let memory = &mut self.memories[rank.index()];
        match step {
            Step::Send { to, span } => {
                let queue = self.queues.get_mut(&(strand, rank, *to)).ok_or(Fault::Peer(*to))?;
                if queue.in_flight.is_some() {
                    return Ok(Outcome::Waits(*to, Why::QueueSlot));
                }
                let cells = memory.cells(*span)?;
                let values = memory.read(strand, *span, &cells)?;
                let receiver = self.strand_states[strand as usize * self.ranks as usize + to.index()];
                let staged = queue.receives[queue.sent].1.is_some_and(|from| receiver.next >= from);
                let pending = if staged { Vec::new() } else { cells };
                memory.add_pending(&pending, *to);
                queue.sent += 1;
                queue.in_flight = Some(Message {
                    form: span.place.form(),
                    values,
                    pending,
                    entered: self.entered[rank.index()].clone(),
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
                if let Some(peer) = memory.pending(&cells) {
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
                    return Err(Fault::FormMismatch {
                        from: rank,
                        sent,
                        expected,
                    });
                }
                let values = memory.read(strand, *from, &sources)?;
                if sources == cells {
                    return Ok(Outcome::Done);
                }
                if let Some(peer) = memory.pending(&cells) {
                    return Ok(Outcome::Waits(peer, Why::Overwrite));
                }
                memory.check_disjoint(&cells, &[sources])?;
                memory.write(shape, strand, *into, &cells, values)?;
                Ok(Outcome::Done)
            }
        }
    }

    /// Receives `from`'s message if it has arrived and the cells of `into` can be written.
    fn take(
        &mut self,
        strand: u32,
        rank: Rank,
        from: Rank,
        form: BlockForm,
        into: Span,
        cells: &[usize],
    ) -> Result<Result<Message, Outcome>, Fault> {
        let queue = self.queues.get_mut(&(strand, from, rank)).ok_or(Fault::Peer(from))?;
        let Some(message) = queue.in_flight.as_ref() else {
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
            return Err(Fault::FormMismatch {
                from,
                sent,
                expected: form,
            });
        }
        if let Some(peer) = self.memories[rank.index()].pending(cells) {
            return Ok(Err(Outcome::Waits(peer, Why::Overwrite)));
        }
        let Some(message) = queue.in_flight.take() else {
            return Ok(Err(Outcome::Waits(from, Why::Message)));
        };
        self.memories[from.index()].release(&message.pending);
        for (mine, theirs) in self.entered[rank.index()].iter_mut().zip(&message.entered) {
            *mine |= theirs;
        }
        Ok(Ok(message))
    }

    fn received(&mut self, strand: u32, rank: Rank, from: Rank) {
        self.wake(strand, from);
        let steps = &self.plan.programs[rank.index()].strands[strand as usize];
        let later = &steps[self.strand_states[self.strand_state(strand, rank)].next as usize + 1..];
        let next = later
            .iter()
            .find(|step| matches!(step, Step::Recv { .. } | Step::RecvReduce { .. }));
        if let Some(&Step::RecvReduce { from, .. }) = next
            && let Some(queue) = self.queues.get_mut(&(strand, from, rank))
            && let Some(message) = &mut queue.in_flight
        {
            self.memories[from.index()].release(&std::mem::take(&mut message.pending));
            self.wake(strand, from);
        }
    }

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
        memory.check_disjoint(cells, sources)?;
        let sum = |index: usize| {
            let mut sum = Accumulation::new(self.ranks);
            operands.iter().try_for_each(|operand| sum.add(&operand[index]))?;
            sum.finish(into.place, self.ranks)
        };
        let values = (0..cells.len()).map(sum).collect::<Result<_, _>>()?;
        memory.write(shape, strand, into, cells, values)
    }

    /// With no strand ready: whether all are at the end, with the right contents.
    fn finish(self) -> Result<Proof, Flaw> {
        if let Some(stuck) = self
            .strand_states
            .iter()
            .position(|strand_state| strand_state.waits.is_some())
        {
            let waits = wait_cycle(&self.strand_states, self.ranks, stuck);
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
                && let Some(other) = missing(&self.entered[rank.index()], self.ranks)
            {
                return Err(flaw(Fault::NotEntered(other)));
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

/// The cycle of waits that a waiting strand leads to. Every wait is for a later action of some
/// strand, since messages match in number, so the chain closes.
fn wait_cycle(strand_states: &[StrandState], ranks: u32, stuck: usize) -> Vec<Wait> {
    let mut wait_cycle: Vec<(usize, Wait)> = Vec::new();
    let mut at = stuck;
    while let (None, Some((peer, why))) = (
        wait_cycle.iter().position(|(seen, _)| *seen == at),
        strand_states[at].waits,
    ) {
        let (strand, rank) = (at as u32 / ranks, Rank(at as u32 % ranks));
        let step = strand_states[at].next;
        wait_cycle.push((
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
    let begin = wait_cycle.iter().position(|(seen, _)| *seen == at).unwrap_or(0);
    wait_cycle.into_iter().skip(begin).map(|(_, wait)| wait).collect()
}

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
