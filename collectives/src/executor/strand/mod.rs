//! A strand runner executes one strand of the operations on one channel: their slices in order,
//! step by step, until it would block.
//!
//! Three activities proceed independently: *execution* runs the steps in order; *sends* are only
//! begun by execution, and leave as the peer grants memory or credits slots; *grants* run ahead of
//! execution as far as memory is free. A send blocks only steps that write the memory it reads.

mod cursor;
mod fast_path;
mod lengths;
mod staging;
mod transfer;

use doorbell_verbs::{MemoryError, ProtectionDomain};

use self::cursor::{Fragment, MessageCursor};
pub(super) use self::fast_path::{FastPath, SlotTransport};
pub(super) use self::lengths::ExpectedLengths;
use self::staging::{STAGING_SLOTS, StagingSlots};
use super::error::Failed;
use super::link::Link;
use super::operation::{ActiveOperation, Data};
use super::program::{Instruction, StepRef, StrandProgram};
use crate::failure::Awaited;
use crate::memory::Segment;
use crate::plan::{BlockForm, PlanMemory, Span, Step};
use crate::protocol::LineProtocol;
use crate::types::Rank;

const NOT_SENT: u64 = u64::MAX;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
struct Position {
    slice_index: u32,
    step: u32,
}

#[derive(Clone, Copy, Debug)]
struct PendingSend {
    at: Position,
    to: Rank,
    cursor: MessageCursor,
    /// The number of requests whose completion frees what has been sent of it.
    last: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DriveResult {
    Moved,
    Idle,
    Done,
}

// fields: position, grants, sends, and memory of one runner
pub(super) struct StrandRunner {
    pub(super) channel: u32,
    pub(super) strand: u32,
    pub(super) rail: usize,
    pub(super) next: u64,
    running: bool,
    execution: Position,
    next_action: usize,
    /// Control writes are queued that did not fit in the send queue.
    control_writes_pending: bool,
    /// Number of peers to which lengths have been sent, and the lengths still awaited from peers.
    lengths_sent: usize,
    awaited_lengths: Vec<ExpectedLengths>,
    cursor: MessageCursor,
    /// The position of grants, at the `receive`th receiving step of a slice.
    grants: Position,
    receive: usize,
    grant_cursor: MessageCursor,
    sends: Vec<PendingSend>,
    /// By step, the requests whose completion frees the message; [`NOT_SENT`] while pending.
    sent: Vec<u64>,
    scratch_memory: Option<Segment>,
    partial_offset: usize,
    receive_staging: StagingSlots,
    /// Staging of messages from plain memory, with targets and the requests that free slots.
    send_staging: StagingSlots,
    send_staging_use: [(Rank, u64); STAGING_SLOTS as usize],
    lines: Vec<u64>,
    operands: Vec<(BlockForm, *const u8)>,
}

// SAFETY: its pointers are into segments of its own; operands are cleared after use.
unsafe impl Send for StrandRunner {}

struct DriveContext<'a> {
    op: &'a ActiveOperation,
    links: &'a mut [Option<Link>],
}

/// The link to a rank: checked plans name no other.
fn link(links: &mut [Option<Link>], rank: Rank) -> Result<&mut Link, Failed> {
    links
        .get_mut(rank.index())
        .and_then(Option::as_mut)
        .ok_or_else(|| Failed::Refused {
            peer: rank,
            what: "there is no connection to it".to_owned(),
        })
}

fn flush_control_writes(links: &mut [Option<Link>]) -> Result<(), Failed> {
    links.iter_mut().flatten().try_for_each(Link::flush_control_writes)
}

fn has_confirmed(links: &[Option<Link>], to: Rank, requests: u64) -> bool {
    links[to.index()]
        .as_ref()
        .is_some_and(|link| link.completed >= requests)
}

impl StrandRunner {
    pub(super) fn new(channel: u32, strand: u32, rail: usize) -> Self {
        Self {
            channel,
            strand,
            rail,
            next: 0,
            running: false,
            execution: Position::default(),
            next_action: 0,
            control_writes_pending: false,
            lengths_sent: 0,
            awaited_lengths: Vec::new(),
            cursor: MessageCursor::default(),
            grants: Position::default(),
            receive: 0,
            grant_cursor: MessageCursor::default(),
            sends: Vec::new(),
            sent: Vec::new(),
            scratch_memory: None,
            partial_offset: 0,
            receive_staging: StagingSlots::default(),
            send_staging: StagingSlots::default(),
            send_staging_use: [(Rank(0), 0); STAGING_SLOTS as usize],
            lines: vec![0; LineProtocol::Ll128.slot() / 8],
            operands: Vec::new(),
        }
    }

    fn begin(&mut self, op: &ActiveOperation, domain: &ProtectionDomain) -> Result<(), MemoryError> {
        self.running = true;
        (self.execution, self.next_action, self.cursor) = (Position::default(), 0, MessageCursor::default());
        (self.grants, self.receive, self.grant_cursor) = (Position::default(), 0, MessageCursor::default());
        if let Some(lengths) = &op.ready.lengths {
            self.begin_length_exchange(&lengths[self.strand as usize]);
        }
        let steps = op.ready.program.strands[self.strand as usize].instructions.len();
        self.sends.clear();
        self.sends.reserve(steps);
        self.sent.clear();
        self.sent.resize(steps, 0);
        let layout = &op.ready.layout;
        if layout.scratch_len + layout.partial_len > 0 {
            let scratch = layout.scratch_len as usize * op.function.bytes(BlockForm::Element);
            self.partial_offset = scratch.next_multiple_of(64);
            let len = self.partial_offset + layout.partial_len as usize * op.function.bytes(BlockForm::Partial);
            if self
                .scratch_memory
                .as_ref()
                .is_none_or(|scratch_memory| scratch_memory.len() < len)
            {
                self.scratch_memory = None;
                self.scratch_memory = Some(Segment::new([domain], len.next_multiple_of(4096))?);
            }
        }
        if op.lines.is_none() && op.ready.fast_path.is_none() {
            self.receive_staging.ensure(domain, op.fragment)?;
            let plain = |data: &Data| matches!(data, Data::Plain(_));
            if plain(&op.input) || plain(&op.output) {
                self.send_staging.ensure(domain, op.fragment)?;
            }
        }
        Ok(())
    }

    /// # Errors
    /// Device errors, as the engine's failure.
    pub(super) fn drive(
        &mut self,
        op: &ActiveOperation,
        links: &mut [Option<Link>],
        domain: &ProtectionDomain,
    ) -> Result<DriveResult, Failed> {
        if !self.running {
            self.begin(op, domain)
                .map_err(|error| Failed::Device(error.to_string()))?;
        }
        if let Some(fast_path) = &op.ready.fast_path {
            return self.drive_fast_path(op, &fast_path[self.strand as usize], links);
        }
        let mut moved = false;
        if let Some(lengths) = &op.ready.lengths {
            let lengths = &lengths[self.strand as usize];
            moved = self.exchange_lengths(op, lengths, links)?;
            if self.lengths_sent < lengths.len() {
                flush_control_writes(links)?;
                return Ok(if moved { DriveResult::Moved } else { DriveResult::Idle });
            }
        }
        let mut context = DriveContext { op, links };
        loop {
            let mut further = false;
            if op.lines.is_none() {
                further |= self.grant(&mut context)?;
            }
            further |= self.execute(&mut context)?;
            further |= self.send_pending(&mut context)?;
            if !further {
                break;
            }
            moved = true;
        }
        flush_control_writes(context.links)?;
        if self.is_executed(op)
            && self.sends.is_empty()
            && self.awaited_lengths.is_empty()
            && self.unconfirmed(op, context.links).is_none()
        {
            self.running = false;
            // A fast path flushes control writes only as it receives, and relies on this flag.
            self.control_writes_pending = context.links.iter().flatten().any(Link::has_control_writes);
            return Ok(DriveResult::Done);
        }
        Ok(if moved { DriveResult::Moved } else { DriveResult::Idle })
    }

    fn slice_count(&self, op: &ActiveOperation) -> u32 {
        let slices = op.ready.layout.extent.slices;
        (slices - self.channel.min(slices)).div_ceil(op.channels)
    }

    fn is_executed(&self, op: &ActiveOperation) -> bool {
        self.execution.slice_index >= self.slice_count(op)
    }

    fn slice(&self, op: &ActiveOperation, slice_index: u32) -> u32 {
        self.channel + slice_index * op.channels
    }

    fn unconfirmed(&self, op: &ActiveOperation, links: &[Option<Link>]) -> Option<Rank> {
        let strand = &op.ready.program.strands[self.strand as usize];
        let send_staging = (self.send_staging.released..self.send_staging.acquired)
            .map(|copy| self.send_staging_use[(copy % STAGING_SLOTS) as usize]);
        let sent = strand
            .instructions
            .iter()
            .zip(&self.sent)
            .filter_map(|(instruction, &sent)| {
                let (to, ..) = instruction.step.message()?;
                Some((to, sent))
            });
        send_staging
            .chain(sent)
            .find(|(to, sent)| *sent > 0 && links[to.index()].as_ref().is_some_and(|link| link.completed < *sent))
            .map(|(to, _)| to)
    }

    pub(super) fn waits_for(&self, op: &ActiveOperation, links: &[Option<Link>]) -> Option<(u32, u32, Rank, Awaited)> {
        if !self.running {
            return None;
        }
        let of_send = |send: &PendingSend| {
            (
                self.slice(op, send.at.slice_index),
                send.at.step,
                send.to,
                Awaited::Credit,
            )
        };
        if let Some(wait) = self.waits_for_lengths(op) {
            return Some(wait);
        }
        if self.is_executed(op) {
            let acknowledgement = || {
                let last = self.slice_count(op).saturating_sub(1);
                Some((
                    self.slice(op, last),
                    self.sent.len() as u32,
                    self.unconfirmed(op, links)?,
                    Awaited::Acknowledgement,
                ))
            };
            return self.sends.first().map(of_send).or_else(acknowledgement);
        }
        let slice_index = self.execution.slice_index;
        let strand = &op.ready.program.strands[self.strand as usize];
        let instruction = strand.instructions.get(self.execution.step as usize)?;
        let behind = instruction
            .sends
            .iter()
            .find(|edge| !self.is_sent(**edge, slice_index, strand, links));
        if let Some(edge) = behind {
            let (to, ..) = strand.instructions[edge.step as usize].step.message()?;
            let room = self.sends.iter().find(|send| send.to == to).map(of_send);
            return room.or(Some((
                self.slice(op, slice_index),
                self.execution.step,
                to,
                Awaited::Acknowledgement,
            )));
        }
        let (peer, ..) = instruction.step.message()?;
        let awaited = match instruction.step {
            Step::Send { .. } => Awaited::Credit,
            _ => Awaited::Message,
        };
        Some((self.slice(op, slice_index), self.execution.step, peer, awaited))
    }

    fn is_sent(&self, edge: StepRef, slice_index: u32, strand: &StrandProgram, links: &[Option<Link>]) -> bool {
        if edge.slices_back > slice_index {
            return true;
        }
        let sent = self.sent[edge.step as usize];
        if sent == 0 {
            return true;
        }
        let message = strand.instructions[edge.step as usize].step.message();
        sent != NOT_SENT && message.is_some_and(|(to, ..)| has_confirmed(links, to, sent))
    }

    /// Whether a part of a step's target is free of all sends that read it. It also is if a pending
    /// send has exactly the same span, and the part has been sent and acknowledged: two ranks that
    /// exchange more than the staging memory would otherwise wait for each other.
    fn is_free(
        &self,
        op: &ActiveOperation,
        instruction: &Instruction,
        into: Span,
        part: Option<Fragment>,
        slice_index: u32,
        links: &[Option<Link>],
    ) -> bool {
        let strand = &op.ready.program.strands[self.strand as usize];
        instruction.sends.iter().all(|edge| {
            if self.is_sent(*edge, slice_index, strand, links) {
                return true;
            }
            let Some(part) = part else { return false };
            let at = Position {
                slice_index: slice_index.wrapping_sub(edge.slices_back),
                step: edge.step,
            };
            self.sends.iter().any(|send| {
                let behind = (send.cursor.piece, send.cursor.at) >= (part.piece, part.at + part.len);
                send.at == at
                    && behind
                    && self.is_same_memory(
                        op,
                        (&strand.instructions[edge.step as usize], at.slice_index),
                        (instruction, slice_index),
                        into,
                        part,
                    )
                    && has_confirmed(links, send.to, send.last)
            })
        })
    }

    /// Whether both parts are the same memory: in place, different buffers share it.
    fn is_same_memory(
        &self,
        op: &ActiveOperation,
        (send, sent): (&Instruction, u32),
        (step, slice_index): (&Instruction, u32),
        into: Span,
        part: Fragment,
    ) -> bool {
        let Some((.., of)) = send.step.message() else {
            return false;
        };
        let start = |instruction, span: Span, slice_index| {
            let at = cursor::byte_offset(
                &op.ready.layout,
                &op.function,
                instruction,
                span,
                self.slice(op, slice_index),
                part,
            );
            self.place_start(op, span.place).wrapping_add(at)
        };
        let bytes = |span: Span| op.function.bytes(span.place.form());
        let alike = of.blocks == into.blocks && send.pieces == step.pieces && bytes(of) == bytes(into);
        of == into || alike && start(send, of, sent) == start(step, into, slice_index)
    }

    fn place_start(&self, op: &ActiveOperation, place: PlanMemory) -> *mut u8 {
        let scratch_memory = || {
            self.scratch_memory
                .as_ref()
                .map_or(core::ptr::null_mut(), Segment::start)
        };
        match place {
            PlanMemory::Input => op.input.start(),
            PlanMemory::Output => op.output.start(),
            PlanMemory::Scratch => scratch_memory(),
            PlanMemory::Partial => scratch_memory().wrapping_add(self.partial_offset),
        }
    }

    /// A memory's segment, this runner's device in it, and the offset; `None` for plain memory.
    fn registered<'s>(&'s self, op: &'s ActiveOperation, place: PlanMemory) -> Option<(&'s Segment, usize, usize)> {
        let of = |data: &'s Data| data.segment().map(|(segment, offset)| (segment, self.rail, offset));
        match place {
            PlanMemory::Input => of(&op.input),
            PlanMemory::Output => of(&op.output),
            PlanMemory::Scratch => Some((self.scratch_memory.as_ref()?, 0, 0)),
            PlanMemory::Partial => Some((self.scratch_memory.as_ref()?, 0, self.partial_offset)),
        }
    }

    fn has_passed(&self, edge: Option<StepRef>, slice_index: u32) -> bool {
        let Some(edge) = edge else { return true };
        if edge.slices_back > slice_index {
            return true;
        }
        self.execution
            > Position {
                slice_index: slice_index - edge.slices_back,
                step: edge.step,
            }
    }

    fn execute(&mut self, context: &mut DriveContext<'_>) -> Result<bool, Failed> {
        let op = context.op;
        let strand = &op.ready.program.strands[self.strand as usize];
        let slice_count = self.slice_count(op);
        let mut moved = false;
        while self.execution.slice_index < slice_count {
            let Some(instruction) = strand.instructions.get(self.execution.step as usize) else {
                self.execution = Position {
                    slice_index: self.execution.slice_index + 1,
                    step: 0,
                };
                moved = true;
                continue;
            };
            let slice = self.slice(op, self.execution.slice_index);
            let done = match &instruction.step {
                Step::Send { to, .. } => self.begin_send(context, *to)?,
                Step::Recv { .. } | Step::RecvReduce { .. } => {
                    self.receive_message(context, instruction, slice, &mut moved)?
                }
                Step::Reduce { sources, into } => {
                    let slice_index = self.execution.slice_index;
                    let free = self.is_free(op, instruction, *into, None, slice_index, context.links);
                    if free {
                        self.reduce(op, instruction, sources, *into, slice);
                    }
                    free
                }
                Step::Copy { from, into } => {
                    let slice_index = self.execution.slice_index;
                    let free = self.is_free(op, instruction, *into, None, slice_index, context.links);
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
            self.cursor = MessageCursor::default();
            moved = true;
        }
        Ok(moved)
    }

    fn reduce(&mut self, op: &ActiveOperation, instruction: &Instruction, sources: &[Span], into: Span, slice: u32) {
        let mut operands = core::mem::take(&mut self.operands);
        for (piece, &(first, blocks)) in (0..).zip(&instruction.pieces) {
            let run = op
                .ready
                .layout
                .element_range(into.place, into.first + first, blocks, slice);
            let whole = Fragment {
                piece,
                at: 0,
                len: run.len,
            };
            let at = |span: Span| {
                self.place_start(op, span.place).wrapping_add(cursor::byte_offset(
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
            // SAFETY: all pieces hold data blocks of one length; they are the same or disjoint, and
            // not written by others now.
            unsafe {
                op.function
                    .reduce(&operands, (into.place.form(), at(into)), run.len as usize)
            };
        }
        self.operands = operands;
    }

    fn copy(&self, op: &ActiveOperation, instruction: &Instruction, from: Span, into: Span, slice: u32) {
        for (piece, &(first, blocks)) in instruction.pieces.iter().enumerate() {
            let run = op
                .ready
                .layout
                .element_range(into.place, into.first + first, blocks, slice);
            let whole = Fragment {
                piece: piece as u32,
                at: 0,
                len: run.len,
            };
            let at = |span: Span| {
                self.place_start(op, span.place).wrapping_add(cursor::byte_offset(
                    &op.ready.layout,
                    &op.function,
                    instruction,
                    span,
                    slice,
                    whole,
                ))
            };
            let bytes = run.len as usize * op.function.bytes(into.place.form());
            // In place they may be the same.
            if at(from) != at(into) {
                // SAFETY: both hold data blocks of one length, are disjoint, and not written by
                // others now.
                unsafe { core::ptr::copy_nonoverlapping(at(from), at(into), bytes) };
            }
        }
    }
}
