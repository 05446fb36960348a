//! A strand runner executes one strand of the operations on one channel: their slices in order,
//! action by action, until it would block.
//!
//! Three activities proceed independently: *execution* runs the actions in order; *sends* that
//! lack a slot or a grant are pending, and leave as the peer credits slots or grants memory;
//! *grants* run ahead of execution as far as memory is free. An action waits for the sends that
//! read what it writes, as long as they are pending or a device reads their memory.

mod actions;
mod execute;
mod lengths;
mod staging;
mod transfer;

use doorbell_verbs::{MemoryError, ProtectionDomain};

use self::actions::{MemoryRef, Slices, Work};
pub(super) use self::actions::{SliceActions, SliceOf};
pub(super) use self::lengths::ExpectedLengths;
use self::staging::{STAGING_SLOTS, StagingSlots};
use self::transfer::{InFlight, LineSlots, PendingSend, SimpleSlots, SlotProtocol};
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

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DriveResult {
    Moved,
    Idle,
    Done,
}

// fields: position, grants, sends, and memory of one runner
pub(super) struct StrandRunner {
    rank: Rank,
    pub(super) channel: u32,
    pub(super) strand: u32,
    rail: usize,
    domain: ProtectionDomain,
    /// The number of the operation that it runs, or comes to.
    pub(super) next: u64,
    running: bool,
    slices: Slices,
    /// The number of slices of the operation on this channel.
    slice_count: u32,
    execution: Position,
    grants: Position,
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
    /// Staging of messages from plain memory, with targets and the requests that free slots.
    send_staging: StagingSlots,
    send_staging_use: [(Rank, u64); STAGING_SLOTS as usize],
    lines: Vec<u64>,
    operands: Vec<(BlockForm, *const u8)>,
}

// SAFETY: its pointers are into segments of its own; operands are cleared before use.
unsafe impl Send for StrandRunner {}

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

fn is_confirmed(links: &[Option<Link>], to: Rank, requests: u64) -> bool {
    links[to.index()].as_ref().is_none_or(|link| link.completed >= requests)
}

impl StrandRunner {
    pub(super) fn new(rank: Rank, (channel, strand): (u32, u32), (rail, domain): (usize, &ProtectionDomain)) -> Self {
        Self {
            rank,
            channel,
            strand,
            rail,
            domain: domain.clone(),
            next: 0,
            running: false,
            slices: Slices::default(),
            slice_count: 0,
            execution: Position::default(),
            grants: Position::default(),
            control_writes_pending: false,
            lengths_sent: 0,
            awaited_lengths: Vec::new(),
            pending: Vec::new(),
            in_flight: Vec::new(),
            scratch_memory: None,
            partial_offset: 0,
            receive_staging: StagingSlots::default(),
            send_staging: StagingSlots::default(),
            send_staging_use: [(Rank(0), 0); STAGING_SLOTS as usize],
            lines: vec![0; LineProtocol::Ll128.slot() / 8],
            operands: Vec::new(),
        }
    }

    fn begin(&mut self, op: &ActiveOperation) -> Result<(), MemoryError> {
        self.running = true;
        (self.execution, self.grants) = (Position::default(), Position::default());
        if let Some(lengths) = &op.ready.lengths {
            self.begin_length_exchange(&lengths[self.strand as usize]);
        }
        let slices = op.ready.layout.extent.slices;
        self.slice_count = (slices - self.channel.min(slices)).div_ceil(op.channels);
        if slices > 1 {
            self.slices.begin(op, self.place());
        }
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
                self.scratch_memory = Some(Segment::new([&self.domain], len.next_multiple_of(4096))?);
            }
        }
        if op.ready.has_granted {
            let fragment = op.transport.fragment();
            self.receive_staging.ensure(&self.domain, fragment)?;
            let plain = |data: &Data| matches!(data, Data::Plain(_));
            if plain(&op.input) || plain(&op.output) {
                self.send_staging.ensure(&self.domain, fragment)?;
            }
        }
        Ok(())
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
        let mut moved = false;
        while let Some(op) = operations.get_mut((self.next - first) as usize) {
            if op.uses(self.channel, self.strand) {
                match self.drive_operation(op, links)? {
                    DriveResult::Idle => break,
                    DriveResult::Moved => return Ok(true),
                    DriveResult::Done => {
                        moved = true;
                        op.complete_runner();
                    }
                }
            }
            self.next += 1;
        }
        Ok(moved)
    }

    #[inline]
    fn drive_operation(&mut self, op: &ActiveOperation, links: &mut [Option<Link>]) -> Result<DriveResult, Failed> {
        if !self.running {
            self.begin(op).map_err(|error| Failed::Device(error.to_string()))?;
        }
        if op.ready.only_slice.is_some() {
            return self.run_by_transport(op, &mut Slices::default(), links);
        }
        // Not changed while actions are carried out; a report after a failure needs them.
        let mut slices = core::mem::take(&mut self.slices);
        let driven = self.run_by_transport(op, &mut slices, links);
        self.slices = slices;
        driven
    }

    #[inline(always)]
    fn run_by_transport(
        &mut self,
        op: &ActiveOperation,
        slices: &mut Slices,
        links: &mut [Option<Link>],
    ) -> Result<DriveResult, Failed> {
        match op.transport {
            Transport::Lines(lines) => self.run(op, LineSlots(lines), slices, links),
            Transport::Simple { granted_from, .. } => self.run(op, SimpleSlots { granted_from }, slices, links),
        }
    }

    #[inline(always)]
    fn run(
        &mut self,
        op: &ActiveOperation,
        protocol: impl SlotProtocol,
        slices: &mut Slices,
        links: &mut [Option<Link>],
    ) -> Result<DriveResult, Failed> {
        let (mut moved, mut blocked, mut done) = (false, false, false);
        if let Some(lengths) = &op.ready.lengths {
            let lengths = &lengths[self.strand as usize];
            moved = self.exchange_lengths(op, lengths, links)?;
            blocked = self.lengths_sent < lengths.len();
        }
        while !blocked {
            let mut further = op.ready.has_granted && self.grant(op, slices, links)?;
            further |= self.execute(op, protocol, slices, links)?;
            if !self.pending.is_empty() {
                further |= self.send_pending(op, protocol, slices, links)?;
            }
            moved |= further;
            done = self.is_executed() && self.pending.is_empty();
            blocked = done || !further;
        }
        if moved || self.control_writes_pending {
            self.control_writes_pending = false;
            for to in links.iter_mut().flatten() {
                to.flush_control_writes()?;
                // Otherwise the peer would wait for the credits in them, and this rank for the
                // peer's next message.
                self.control_writes_pending |= to.has_control_writes();
            }
        }
        if done && self.awaited_lengths.is_empty() && self.unconfirmed(links).is_none() {
            self.running = false;
            self.in_flight.clear();
            return Ok(DriveResult::Done);
        }
        Ok(if moved { DriveResult::Moved } else { DriveResult::Idle })
    }

    #[inline]
    fn is_executed(&self) -> bool {
        self.execution.slice == self.slice_count
    }

    #[inline]
    fn place(&self) -> (u32, u32) {
        (self.channel, self.strand)
    }

    /// A rank that has not acknowledged what a device sends it.
    #[inline]
    fn unconfirmed(&self, links: &[Option<Link>]) -> Option<Rank> {
        let staged = (self.send_staging.released..self.send_staging.acquired)
            .map(|copy| self.send_staging_use[(copy % STAGING_SLOTS) as usize]);
        let in_flight = self.in_flight.iter().map(|send| (send.to, send.number));
        staged
            .chain(in_flight)
            .find(|(to, number)| !is_confirmed(links, *to, *number))
            .map(|(to, _)| to)
    }

    /// The slice, step and rank that it waits for, and what.
    pub(super) fn waits_for(&self, op: &ActiveOperation, links: &[Option<Link>]) -> Option<(u32, u32, Rank, Awaited)> {
        if !self.running {
            return None;
        }
        let slice = |index| self.channel + index * op.channels;
        let of_send = |send: &PendingSend| (slice(send.slice), send.step, send.to, Awaited::Credit);
        if let Some(wait) = self.waits_for_lengths(op) {
            return Some(wait);
        }
        let actions = self.slices.get(op, self.strand, self.execution.slice);
        let Some(action) = actions.and_then(|slice| slice.actions.get(self.execution.action as usize)) else {
            let steps = op.ready.program.strands[self.strand as usize].instructions.len();
            let acknowledgement = || {
                let last = self.slice_count.saturating_sub(1);
                let to = self.unconfirmed(links)?;
                Some((slice(last), steps as u32, to, Awaited::Acknowledgement))
            };
            return self.pending.first().map(of_send).or_else(acknowledgement);
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
