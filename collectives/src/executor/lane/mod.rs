//! A lane runs one strand of the operations on one channel: their slices one after another, each step by step, as far as it comes without waiting.
//!
//! Three things go on at their own pace: *execution*, which does the steps in order; *sends*, which execution only begins, and which leave as the peer grants memory or empties slots; and *grants*, which go ahead of execution
//! as far as memory is free. A send never holds up what does not write the memory it reads.

mod short;
mod slots;
mod terms;
mod transfer;
mod walk;

use doorbell_verbs::{MemoryError, ProtectionDomain};

pub(super) use self::short::{By, Short};
use self::slots::{STAGING, Slots};
pub(super) use self::terms::Terms;
use self::walk::{Fragment, Walk};
use super::code::{Edge, Instruction, Strand, message};
use super::error::Failed;
use super::link::Link;
use super::operation::{Data, Running};
use crate::failure::Awaited;
use crate::memory::Segment;
use crate::plan::{Form, Place, Span, Step};
use crate::protocol::Lines;
use crate::types::Rank;

/// A send that has not left.
const PENDING: u64 = u64::MAX;

/// How far something has come in a lane's slices.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
struct At {
    /// The slice: which of the lane's, counted from 0.
    turn: u32,
    step: u32,
}

/// A send under way.
#[derive(Clone, Copy, Debug)]
struct Pending {
    at: At,
    to: Rank,
    walk: Walk,
    /// The requests that have to be confirmed until what has left of it is out of the way.
    last: u64,
}

/// What came of driving a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Drive {
    /// It has done something, and waits now.
    Moved,
    /// It waits.
    Idle,
    /// It is done with the operation.
    Done,
}

/// One strand of one channel.
pub(super) struct Lane {
    pub(super) channel: u32,
    pub(super) strand: u32,
    pub(super) rail: usize,
    /// The operation that is run, or comes next.
    pub(super) next: u64,
    running: bool,
    execution: At,
    /// What is next of a short operation.
    act: usize,
    /// Something has been noted for a peer, and there was no room to send it.
    notes_wait: bool,
    /// To how many peers this side's terms have been said, and those that theirs are to be the same as.
    said: usize,
    unheard: Vec<Terms>,
    walk: Walk,
    /// Where grants are: at the `receive`th receiving step of a slice.
    grants: At,
    receive: usize,
    grant_walk: Walk,
    sends: Vec<Pending>,
    /// For each step, the requests that have to be confirmed until its message is out of the way.
    sent: Vec<u64>,
    /// Scratch, then partial results.
    private: Option<Segment>,
    partial_at: usize,
    /// Messages on their way to be reduced or copied.
    staging: Slots,
    /// Copies of messages from plain memory: their targets, and the requests that free them.
    copies: Slots,
    copied: [(Rank, u64); STAGING as usize],
    /// Lines taken apart.
    lines: Vec<u64>,
    /// Operands of a reduction, while it is told.
    operands: Vec<(Form, *const u8)>,
}

// SAFETY: what it holds pointers into are segments of its own; operands are told and forgotten.
unsafe impl Send for Lane {}

/// What a lane works on: the operation, and the ends of this lane's connections by rank.
struct Scene<'a> {
    op: &'a Running,
    links: &'a mut [Option<Link>],
}

/// The connection to a rank: plans are checked to name no other.
fn link(links: &mut [Option<Link>], rank: Rank) -> Result<&mut Link, Failed> {
    links
        .get_mut(rank.index())
        .and_then(Option::as_mut)
        .ok_or_else(|| Failed::Refused {
            peer: rank,
            what: "there is no connection to it".to_owned(),
        })
}

/// Sends what has been noted for all ranks.
fn send_notes(links: &mut [Option<Link>]) -> Result<(), Failed> {
    links.iter_mut().flatten().try_for_each(Link::send_notes)
}

/// Whether so many requests to a rank are confirmed.
fn has_confirmed(links: &[Option<Link>], to: Rank, requests: u64) -> bool {
    links[to.index()]
        .as_ref()
        .is_some_and(|link| link.completed >= requests)
}

impl Lane {
    pub(super) fn new(channel: u32, strand: u32, rail: usize) -> Self {
        Self {
            channel,
            strand,
            rail,
            next: 0,
            running: false,
            execution: At::default(),
            act: 0,
            notes_wait: false,
            said: 0,
            unheard: Vec::new(),
            walk: Walk::default(),
            grants: At::default(),
            receive: 0,
            grant_walk: Walk::default(),
            sends: Vec::new(),
            sent: Vec::new(),
            private: None,
            partial_at: 0,
            staging: Slots::default(),
            copies: Slots::default(),
            copied: [(Rank(0), 0); STAGING as usize],
            lines: vec![0; Lines::Ll128.slot() / 8],
            operands: Vec::new(),
        }
    }

    /// Begins an operation. Its memory is what it needs; nothing of an operation before is under way.
    fn begin(&mut self, op: &Running, domain: &ProtectionDomain) -> Result<(), MemoryError> {
        self.running = true;
        (self.execution, self.act, self.walk) = (At::default(), 0, Walk::default());
        (self.grants, self.receive, self.grant_walk) = (At::default(), 0, Walk::default());
        if let Some(terms) = &op.ready.terms {
            self.begin_terms(&terms[self.strand as usize]);
        }
        let steps = op.ready.code.strands[self.strand as usize].instructions.len();
        self.sends.clear();
        self.sends.reserve(steps);
        self.sent.clear();
        self.sent.resize(steps, 0);
        let layout = &op.ready.layout;
        if layout.scratch_len + layout.partial_len > 0 {
            let scratch = layout.scratch_len as usize * op.function.bytes(Form::Element);
            self.partial_at = scratch.next_multiple_of(64);
            let len = self.partial_at + layout.partial_len as usize * op.function.bytes(Form::Partial);
            if self.private.as_ref().is_none_or(|private| private.len() < len) {
                self.private = None;
                self.private = Some(Segment::new([domain], len.next_multiple_of(4096))?);
            }
        }
        if op.lines.is_none() && op.ready.short.is_none() {
            self.staging.fit(domain, op.fragment)?;
            let plain = |data: &Data| matches!(data, Data::Plain(_));
            if plain(&op.input) || plain(&op.output) {
                self.copies.fit(domain, op.fragment)?;
            }
        }
        Ok(())
    }

    /// Runs the operation as far as it goes.
    ///
    /// # Errors
    /// What the devices say, as the engine's failure.
    pub(super) fn drive(
        &mut self,
        op: &Running,
        links: &mut [Option<Link>],
        domain: &ProtectionDomain,
    ) -> Result<Drive, Failed> {
        if !self.running {
            self.begin(op, domain)
                .map_err(|error| Failed::Device(error.to_string()))?;
        }
        if let Some(short) = &op.ready.short {
            return self.drive_short(op, &short[self.strand as usize], links);
        }
        let mut moved = false;
        if let Some(terms) = &op.ready.terms {
            let terms = &terms[self.strand as usize];
            moved = self.come_to_terms(op, terms, links)?;
            if self.said < terms.len() {
                send_notes(links)?;
                return Ok(if moved { Drive::Moved } else { Drive::Idle });
            }
        }
        let mut scene = Scene { op, links };
        loop {
            let mut further = false;
            if op.lines.is_none() {
                further |= self.grant(&mut scene)?;
            }
            further |= self.execute(&mut scene)?;
            further |= self.send_pending(&mut scene)?;
            if !further {
                break;
            }
            moved = true;
        }
        send_notes(scene.links)?;
        if self.is_over(op)
            && self.sends.is_empty()
            && self.unheard.is_empty()
            && self.unconfirmed(op, scene.links).is_none()
        {
            self.running = false;
            // A short operation that comes next sends what is noted as it receives, and would not look at this.
            self.notes_wait = scene.links.iter().flatten().any(Link::has_notes);
            return Ok(Drive::Done);
        }
        Ok(if moved { Drive::Moved } else { Drive::Idle })
    }

    /// How many slices are the lane's.
    fn turns(&self, op: &Running) -> u32 {
        let slices = op.ready.layout.extent.slices;
        (slices - self.channel.min(slices)).div_ceil(op.channels)
    }

    fn is_over(&self, op: &Running) -> bool {
        self.execution.turn >= self.turns(op)
    }

    fn slice(&self, op: &Running, turn: u32) -> u32 {
        self.channel + turn * op.channels
    }

    /// A rank that has not confirmed all that was sent to it.
    fn unconfirmed(&self, op: &Running, links: &[Option<Link>]) -> Option<Rank> {
        let strand = &op.ready.code.strands[self.strand as usize];
        let copies = (self.copies.given..self.copies.taken).map(|copy| self.copied[(copy % STAGING) as usize]);
        let sent = strand
            .instructions
            .iter()
            .zip(&self.sent)
            .filter_map(|(instruction, &sent)| {
                let (to, ..) = message(&instruction.step)?;
                Some((to, sent))
            });
        copies
            .chain(sent)
            .find(|(to, sent)| *sent > 0 && links[to.index()].as_ref().is_some_and(|link| link.completed < *sent))
            .map(|(to, _)| to)
    }

    /// What the lane waits for: at which slice and step, from whom, and what.
    pub(super) fn waits_for(&self, op: &Running, links: &[Option<Link>]) -> Option<(u32, u32, Rank, Awaited)> {
        if !self.running {
            return None;
        }
        let of_send = |send: &Pending| (self.slice(op, send.at.turn), send.at.step, send.to, Awaited::Credit);
        if let Some(wait) = self.waits_for_terms(op) {
            return Some(wait);
        }
        if self.is_over(op) {
            let acknowledgement = || {
                let last = self.turns(op).saturating_sub(1);
                Some((
                    self.slice(op, last),
                    self.sent.len() as u32,
                    self.unconfirmed(op, links)?,
                    Awaited::Acknowledgement,
                ))
            };
            return self.sends.first().map(of_send).or_else(acknowledgement);
        }
        let turn = self.execution.turn;
        let strand = &op.ready.code.strands[self.strand as usize];
        let instruction = strand.instructions.get(self.execution.step as usize)?;
        let behind = instruction
            .sends
            .iter()
            .find(|edge| !self.is_sent(**edge, turn, strand, links));
        if let Some(edge) = behind {
            let (to, ..) = message(&strand.instructions[edge.step as usize].step)?;
            let room = self.sends.iter().find(|send| send.to == to).map(of_send);
            return room.or(Some((
                self.slice(op, turn),
                self.execution.step,
                to,
                Awaited::Acknowledgement,
            )));
        }
        let (peer, ..) = message(&instruction.step)?;
        let awaited = match instruction.step {
            Step::Send { .. } => Awaited::Credit,
            _ => Awaited::Message,
        };
        Some((self.slice(op, turn), self.execution.step, peer, awaited))
    }

    /// Whether the message of an earlier send is out of the way.
    fn is_sent(&self, edge: Edge, turn: u32, strand: &Strand, links: &[Option<Link>]) -> bool {
        if edge.back > turn {
            return true;
        }
        let sent = self.sent[edge.step as usize];
        if sent == 0 {
            return true;
        }
        let to = message(&strand.instructions[edge.step as usize].step).map(|(to, ..)| to);
        sent != PENDING && to.is_some_and(|to| has_confirmed(links, to, sent))
    }

    /// Whether a part of what a step writes is out of the way of all sends that read it. A send that has not left yet is, if it is of the very same span, and what has left of it is beyond the part and has arrived: two
    /// ranks that exchange more than there is memory for on the way would else wait for each other.
    fn is_free(
        &self,
        op: &Running,
        instruction: &Instruction,
        into: Span,
        part: Option<Fragment>,
        turn: u32,
        links: &[Option<Link>],
    ) -> bool {
        let strand = &op.ready.code.strands[self.strand as usize];
        instruction.sends.iter().all(|edge| {
            if self.is_sent(*edge, turn, strand, links) {
                return true;
            }
            let Some(part) = part else { return false };
            let at = At {
                turn: turn.wrapping_sub(edge.back),
                step: edge.step,
            };
            self.sends.iter().any(|send| {
                let behind = (send.walk.piece, send.walk.at) >= (part.piece, part.at + part.len);
                send.at == at
                    && behind
                    && self.is_same(
                        op,
                        (&strand.instructions[edge.step as usize], at.turn),
                        (instruction, turn),
                        into,
                        part,
                    )
                    && has_confirmed(links, send.to, send.last)
            })
        })
    }

    /// Whether a part of what a step writes is the same part of what an earlier one sends. In place they lie together, though they are of different places.
    fn is_same(
        &self,
        op: &Running,
        (send, sent): (&Instruction, u32),
        (step, turn): (&Instruction, u32),
        into: Span,
        part: Fragment,
    ) -> bool {
        let Some((.., of)) = message(&send.step) else {
            return false;
        };
        let start = |instruction, span: Span, turn| {
            let at = walk::bytes_at(
                &op.ready.layout,
                &op.function,
                instruction,
                span,
                self.slice(op, turn),
                part,
            );
            self.place(op, span.place).wrapping_add(at)
        };
        let bytes = |span: Span| op.function.bytes(span.place.form());
        let alike = of.blocks == into.blocks && send.pieces == step.pieces && bytes(of) == bytes(into);
        of == into || alike && start(send, of, sent) == start(step, into, turn)
    }

    /// The first byte of a place.
    fn place(&self, op: &Running, place: Place) -> *mut u8 {
        let private = || self.private.as_ref().map_or(core::ptr::null_mut(), Segment::start);
        match place {
            Place::Input => op.input.start(),
            Place::Output => op.output.start(),
            Place::Scratch => private(),
            Place::Partial => private().wrapping_add(self.partial_at),
        }
    }

    /// The segment that a place lies in, which device of it is the lane's, and where it begins there; `None` for plain memory.
    fn registered<'s>(&'s self, op: &'s Running, place: Place) -> Option<(&'s Segment, usize, usize)> {
        let of = |data: &'s Data| data.segment().map(|(segment, offset)| (segment, self.rail, offset));
        match place {
            Place::Input => of(&op.input),
            Place::Output => of(&op.output),
            Place::Scratch => Some((self.private.as_ref()?, 0, 0)),
            Place::Partial => Some((self.private.as_ref()?, 0, self.partial_at)),
        }
    }

    /// Whether execution is behind a step.
    fn has_passed(&self, edge: Option<Edge>, turn: u32) -> bool {
        let Some(edge) = edge else { return true };
        if edge.back > turn {
            return true;
        }
        self.execution
            > At {
                turn: turn - edge.back,
                step: edge.step,
            }
    }

    /// Executes steps, until one has to wait.
    fn execute(&mut self, scene: &mut Scene<'_>) -> Result<bool, Failed> {
        let op = scene.op;
        let strand = &op.ready.code.strands[self.strand as usize];
        let turns = self.turns(op);
        let mut moved = false;
        while self.execution.turn < turns {
            let Some(instruction) = strand.instructions.get(self.execution.step as usize) else {
                self.execution = At {
                    turn: self.execution.turn + 1,
                    step: 0,
                };
                moved = true;
                continue;
            };
            let slice = self.slice(op, self.execution.turn);
            let done = match &instruction.step {
                Step::Send { to, .. } => self.begin_send(scene, *to)?,
                Step::Recv { .. } | Step::RecvReduce { .. } => {
                    self.receive_message(scene, instruction, slice, &mut moved)?
                }
                Step::Reduce { sources, into } => {
                    let turn = self.execution.turn;
                    let free = self.is_free(op, instruction, *into, None, turn, scene.links);
                    if free {
                        self.reduce(op, instruction, sources, *into, slice);
                    }
                    free
                }
                Step::Copy { from, into } => {
                    let turn = self.execution.turn;
                    let free = self.is_free(op, instruction, *into, None, turn, scene.links);
                    if free {
                        self.copy(op, instruction, *from, *into, slice);
                    }
                    free
                }
            };
            if !done {
                break;
            }
            self.execution.step += 1;
            self.walk = Walk::default();
            moved = true;
        }
        Ok(moved)
    }

    /// Reduces spans of this rank's.
    fn reduce(&mut self, op: &Running, instruction: &Instruction, sources: &[Span], into: Span, slice: u32) {
        let mut operands = core::mem::take(&mut self.operands);
        for (piece, &(first, blocks)) in (0..).zip(&instruction.pieces) {
            let run = op.ready.layout.run(into.place, into.first + first, blocks, slice);
            let whole = Fragment {
                piece,
                at: 0,
                len: run.len,
            };
            let at = |span: Span| {
                self.place(op, span.place).wrapping_add(walk::bytes_at(
                    &op.ready.layout,
                    &op.function,
                    instruction,
                    span,
                    slice,
                    whole,
                ))
            };
            operands.clear();
            operands.extend(
                sources
                    .iter()
                    .map(|source| (source.place.form(), at(*source).cast_const())),
            );
            // SAFETY: all pieces hold data blocks of one length; they are the same or apart, and nobody else writes them now.
            unsafe {
                op.function
                    .reduce(&operands, (into.place.form(), at(into)), run.len as usize)
            };
        }
        self.operands = operands;
    }

    /// Copies a span of this rank's.
    fn copy(&self, op: &Running, instruction: &Instruction, from: Span, into: Span, slice: u32) {
        for (piece, &(first, blocks)) in instruction.pieces.iter().enumerate() {
            let run = op.ready.layout.run(into.place, into.first + first, blocks, slice);
            let whole = Fragment {
                piece: piece as u32,
                at: 0,
                len: run.len,
            };
            let at = |span: Span| {
                self.place(op, span.place).wrapping_add(walk::bytes_at(
                    &op.ready.layout,
                    &op.function,
                    instruction,
                    span,
                    slice,
                    whole,
                ))
            };
            let bytes = run.len as usize * op.function.bytes(into.place.form());
            // In place they may be one.
            if at(from) != at(into) {
                // SAFETY: both hold data blocks of one length, are apart, and nobody else writes them now.
                unsafe { core::ptr::copy_nonoverlapping(at(from), at(into), bytes) };
            }
        }
    }
}
