//! A strand runner executes one strand of the operations on one channel: their slices in order,
//! action by action, until it would block.
//!
//! Three activities proceed independently: *execution* runs the actions in order; *sends* that
//! lack a slot or a grant are pending, and leave as the peer credits slots or grants memory;
//! *grants* run ahead of execution as far as memory is free. An action waits for the sends that
//! read what it writes, as long as they are pending or a device reads their memory.
//!
//! Operations overlap: the next one runs when all of one has left, which is complete when its sends
//! are acknowledged; and grants run ahead into later operations.

mod actions;
mod execute;
mod lengths;
mod staging;
mod transfer;

use core::mem::ManuallyDrop;
use core::ops::Range;

use doorbell_verbs::{BufferAlias, ProtectionDomain};

use self::actions::{MemoryRef, Slices, Work};
pub(super) use self::actions::{SliceActions, SliceOf};
pub(super) use self::lengths::ExpectedLengths;
use self::staging::StagingSlots;
use self::transfer::{InFlight, LineSlots, PendingSend, SimpleSlots, SlotProtocol, WindowPuts};
use super::error::Failed;
use super::link::Link;
use super::operation::{ActiveOperation, Data, Transport};
use crate::failure::Awaited;
use crate::memory::Segment;
use crate::plan::{BlockForm, PlanMemory};
use crate::protocol::LineProtocol;
use crate::types::Rank;

/// An action: the index of its slice among those of the channel, and its own in the slice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
struct Position {
    slice: u32,
    action: u32,
}

impl Position {
    fn next_slice(self) -> Self {
        Self {
            slice: self.slice + 1,
            action: 0,
        }
    }
}

// fields: position, grants, sends, and memory of one runner
pub(super) struct StrandRunner {
    rank: Rank,
    pub(super) channel: u32,
    pub(super) strand: u32,
    rail: usize,
    domain: ProtectionDomain,
    /// The ranks that it exchanges messages with are among these.
    peers: Range<usize>,
    /// The number of the operation that it runs, or comes to; those from `first_open` to it await
    /// acknowledgements.
    next: u64,
    first_open: u64,
    running: bool,
    slices: Slices,
    /// The number of slices of the operation on this channel.
    slice_count: u32,
    execution: Position,
    /// The operation of which messages are granted memory, the running or a later one, and where.
    grants: (u64, Position),
    /// Control writes are queued that did not fit in the send queue.
    control_writes_pending: bool,
    /// Number of peers to which lengths have been sent, and the lengths still awaited from peers.
    lengths_sent: usize,
    awaited_lengths: Vec<ExpectedLengths>,
    pending: Vec<PendingSend>,
    in_flight: Vec<InFlight>,
    scratch_memory: Option<Segment>,
    partial_offset: usize,
    receive_staging: StagingSlots,
    /// Staging of messages from plain memory.
    send_staging: StagingSlots,
    lines: Vec<u64>,
    operands: Vec<(BlockForm, *const u8)>,
}

// SAFETY: its pointers are into segments of its own; operands are cleared before use.
unsafe impl Send for StrandRunner {}

/// The link to a rank: checked plans name no other.
#[inline]
fn link(links: &mut [Option<Link>], rank: Rank) -> Result<&mut Link, Failed> {
    match links.get_mut(rank.index()) {
        Some(Some(link)) => Ok(link),
        _ => Err(no_link(rank)),
    }
}

#[cold]
fn no_link(rank: Rank) -> Failed {
    Failed::Refused {
        peer: rank,
        what: "there is no connection to it".to_owned(),
    }
}

impl StrandRunner {
    pub(super) fn new(
        rank: Rank,
        (channel, strand): (u32, u32),
        (rail, domain): (usize, &ProtectionDomain),
        peers: Range<usize>,
    ) -> Self {
        Self {
            rank,
            channel,
            strand,
            rail,
            domain: domain.clone(),
            peers,
            next: 0,
            first_open: 0,
            running: false,
            slices: Slices::default(),
            slice_count: 0,
            execution: Position::default(),
            grants: (0, Position::default()),
            control_writes_pending: false,
            lengths_sent: 0,
            awaited_lengths: Vec::new(),
            pending: Vec::new(),
            in_flight: Vec::new(),
            scratch_memory: None,
            partial_offset: 0,
            receive_staging: StagingSlots::default(),
            send_staging: StagingSlots::default(),
            lines: vec![0; LineProtocol::Ll128.slot() / 8],
            operands: Vec::new(),
        }
    }

    /// False while what is sent from memory that it replaces is not acknowledged.
    fn begin(&mut self, op: &ActiveOperation) -> Result<bool, Failed> {
        let layout = &op.ready.layout;
        if layout.scratch_len + layout.partial_len > 0 {
            let scratch = layout.scratch_len as usize * op.function.bytes(BlockForm::Element);
            let partial = scratch.next_multiple_of(64);
            let len = partial + layout.partial_len as usize * op.function.bytes(BlockForm::Partial);
            let scratch_memory = self.scratch_memory.as_ref();
            if scratch_memory.is_none_or(|scratch_memory| scratch_memory.len() < len) {
                if self.first_open < self.next {
                    return Ok(false);
                }
                self.scratch_memory = None;
                self.scratch_memory = Some(Segment::new([&self.domain], len.next_multiple_of(4096))?);
            }
            self.partial_offset = partial;
        }
        self.running = true;
        self.execution = Position::default();
        self.grants = self.grants.max((self.next, Position::default()));
        if let Some(lengths) = &op.ready.lengths {
            self.begin_length_exchange(&lengths[self.strand as usize]);
        }
        self.slice_count = self.slices_of(op);
        if layout.extent.slices > 1 {
            self.slices.begin(op, self.place());
        }
        Ok(true)
    }

    /// The number of slices of an operation on this channel.
    #[inline]
    fn slices_of(&self, op: &ActiveOperation) -> u32 {
        let slices = op.ready.layout.extent.slices;
        (slices - self.channel.min(slices)).div_ceil(op.channels)
    }

    /// Runs the operations from its next one on until it would block; the first of them has number
    /// `first`. Returns whether there was progress.
    ///
    /// # Errors
    /// Device errors, as the engine's failure.
    #[inline]
    pub(super) fn drive(
        &mut self,
        first: u64,
        operations: &mut [ActiveOperation],
        links: &mut [Option<Link>],
    ) -> Result<bool, Failed> {
        self.next = self.next.max(first);
        self.first_open = self.first_open.max(first);
        let mut moved = false;
        while let Some(op) = operations.get((self.next - first) as usize) {
            if op.uses(self.channel, self.strand) {
                let (further, has_left) = self.drive_operation(op, links)?;
                moved |= further;
                if !has_left {
                    break;
                }
                self.running = false;
            }
            self.next += 1;
        }
        if self.next + 1 < first + operations.len() as u64 {
            moved |= self.grant_ahead(first, operations, links)?;
        }
        if moved || self.control_writes_pending {
            self.flush_control_writes(links)?;
        }
        Ok(self.complete(first, operations, links) || moved)
    }

    /// Returns whether there was progress, and whether all of the operation has left.
    #[inline]
    fn drive_operation(&mut self, op: &ActiveOperation, links: &mut [Option<Link>]) -> Result<(bool, bool), Failed> {
        if !self.running && !self.begin(op)? {
            return Ok((false, false));
        }
        if op.ready.only_slice.is_some() {
            // It stays empty, so there is nothing to drop, which takes a tenth of a turn.
            return self.run_by_transport(op, &mut ManuallyDrop::new(Slices::default()), links);
        }
        // Not changed while actions are carried out; a report after a failure needs them.
        let mut slices = core::mem::take(&mut self.slices);
        let driven = self.run_by_transport(op, &mut slices, links);
        self.slices = slices;
        driven
    }

    /// Completes operations that have left and are acknowledged. Returns whether there are any.
    #[inline]
    fn complete(&mut self, first: u64, operations: &mut [ActiveOperation], links: &[Option<Link>]) -> bool {
        let unconfirmed = self.unconfirmed(links);
        if unconfirmed.is_none() {
            self.in_flight.clear();
        }
        let until = unconfirmed.map_or(self.next, |send| send.operation.min(self.next));
        let before = self.first_open;
        while self.first_open < until {
            let op = &mut operations[(self.first_open - first) as usize];
            if op.uses(self.channel, self.strand) {
                op.complete_runner();
            }
            self.first_open += 1;
        }
        self.first_open > before
    }

    fn flush_control_writes(&mut self, links: &mut [Option<Link>]) -> Result<(), Failed> {
        self.control_writes_pending = false;
        for to in links[self.peers.clone()].iter_mut().flatten() {
            if to.has_control_writes() {
                to.flush_control_writes()?;
                // Otherwise the peer would wait for the credits in them, and this rank for the
                // peer's next message.
                self.control_writes_pending |= to.has_control_writes();
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn run_by_transport(
        &mut self,
        op: &ActiveOperation,
        slices: &mut Slices,
        links: &mut [Option<Link>],
    ) -> Result<(bool, bool), Failed> {
        match op.transport {
            Transport::Lines(lines) => self.run(op, LineSlots(lines), slices, links),
            Transport::Simple { granted_from, .. } => self.run(op, SimpleSlots { granted_from }, slices, links),
            Transport::Window => match &op.puts {
                Some(puts) => self.run(op, WindowPuts(puts), slices, links),
                None => Err(Failed::Aborted("a put exchange without puts".to_owned())),
            },
        }
    }

    #[inline(always)]
    fn run(
        &mut self,
        op: &ActiveOperation,
        protocol: impl SlotProtocol,
        slices: &mut Slices,
        links: &mut [Option<Link>],
    ) -> Result<(bool, bool), Failed> {
        let (mut moved, mut blocked, mut done) = (false, false, false);
        if let Some(lengths) = &op.ready.lengths {
            let lengths = &lengths[self.strand as usize];
            moved = self.exchange_lengths(op, lengths, links)?;
            blocked = self.lengths_sent < lengths.len();
        }
        while !blocked {
            let grants = op.ready.has_granted && self.grants.0 == self.next;
            let mut further = grants && self.grant(op, slices, links)?;
            further |= self.execute(op, protocol, slices, links)?;
            if !self.pending.is_empty() {
                further |= self.send_pending(op, protocol, slices, links)?;
            }
            moved |= further;
            done = self.is_executed() && self.pending.is_empty();
            blocked = done || !further;
        }
        Ok((moved, done && self.awaited_lengths.is_empty()))
    }

    #[inline]
    fn is_executed(&self) -> bool {
        self.execution.slice == self.slice_count
    }

    #[inline]
    fn place(&self) -> (u32, u32) {
        (self.channel, self.strand)
    }

    /// The first message that a device still reads.
    #[inline]
    fn unconfirmed(&self, links: &[Option<Link>]) -> Option<InFlight> {
        self.in_flight.iter().copied().find(|send| !send.is_confirmed(links))
    }

    /// The first operation that is not complete.
    pub(super) fn first_open(&self) -> u64 {
        self.first_open
    }

    /// Of the last message that it ran: its fragments that have left or arrived.
    pub(super) fn part(&self) -> u32 {
        self.pending.first().map_or(self.execution.action, |send| send.next)
    }

    /// The slice, step and rank that the first operation that is not complete waits for, and what.
    pub(super) fn waits_for(&self, op: &ActiveOperation, links: &[Option<Link>]) -> Option<(u32, u32, Rank, Awaited)> {
        let slice = |index| self.channel + index * op.channels;
        if self.first_open < self.next {
            let last = slice(self.slices_of(op).saturating_sub(1));
            let steps = op.ready.program.strands[self.strand as usize].instructions.len();
            let to = self.unconfirmed(links)?.to;
            return Some((last, steps as u32, to, Awaited::Acknowledgement));
        }
        if !self.running {
            return None;
        }
        let of_send = |send: &PendingSend| (slice(send.slice), send.step, send.to, Awaited::Credit);
        if let Some(wait) = self.waits_for_lengths(op) {
            return Some(wait);
        }
        let actions = self.slices.get(op, self.strand, self.execution.slice);
        let Some(action) = actions.and_then(|slice| slice.actions.get(self.execution.action as usize)) else {
            return self.pending.first().map(of_send);
        };
        let at = (slice(self.execution.slice), action.step);
        if let Some(to) = self.reader_of_target(op, action, &self.slices, links) {
            let pending = self.pending.iter().find(|send| send.to == to).map(of_send);
            return pending.or(Some((at.0, at.1, to, Awaited::Acknowledgement)));
        }
        match action.work {
            Work::Send { to, .. } => Some((at.0, at.1, to, Awaited::Credit)),
            Work::Recv { from, .. } | Work::RecvReduce { from, .. } => Some((at.0, at.1, from, Awaited::Message)),
            Work::Reduce { .. } | Work::Copy { .. } => None,
        }
    }

    #[inline]
    fn address(&self, op: &ActiveOperation, memory: MemoryRef) -> *mut u8 {
        let scratch_memory = || {
            self.scratch_memory
                .as_ref()
                .map_or(core::ptr::null_mut(), Segment::start)
        };
        let start = match memory.place {
            PlanMemory::Input => op.input.start(),
            PlanMemory::Output => op.output.start(),
            PlanMemory::Scratch => scratch_memory(),
            PlanMemory::Partial => scratch_memory().wrapping_add(self.partial_offset),
        };
        start.wrapping_add(memory.at)
    }

    /// Bytes for requests that read them; `None` if they are staged.
    fn source(&self, op: &ActiveOperation, memory: MemoryRef, len: usize) -> Option<BufferAlias> {
        if let Some((segment, rail, offset)) = self.registered(op, memory) {
            return segment.alias(rail, offset, len);
        }
        let address = self.address(op, memory).addr();
        op.lent
            .iter()
            .flatten()
            .find_map(|lent| lent.alias_at(self.rail, address, len))
    }

    /// A memory's segment, this runner's device in it, and the offset; `None` for plain memory.
    fn registered<'s>(&'s self, op: &'s ActiveOperation, memory: MemoryRef) -> Option<(&'s Segment, usize, usize)> {
        let of = |data: &'s Data| data.segment().map(|(segment, offset)| (segment, self.rail, offset));
        let (segment, rail, start) = match memory.place {
            PlanMemory::Input => of(&op.input)?,
            PlanMemory::Output => of(&op.output)?,
            PlanMemory::Scratch => (self.scratch_memory.as_ref()?, 0, 0),
            PlanMemory::Partial => (self.scratch_memory.as_ref()?, 0, self.partial_offset),
        };
        Some((segment, rail, start + memory.at))
    }
}
