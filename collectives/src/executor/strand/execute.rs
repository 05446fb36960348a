//! Execution: the one loop that carries out actions.

use super::StrandRunner;
use super::actions::{MemoryRef, Slices, Work};
use super::transfer::SlotProtocol;
use crate::executor::error::Failed;
use crate::executor::link::Link;
use crate::executor::operation::{ActiveOperation, Transport};
use crate::plan::BlockForm;
use crate::protocol::EAGER_LINE;

/// Loads of a message's last word between two steps: some hundred nanoseconds.
const POLLS: u32 = 400;

impl StrandRunner {
    /// Carries out actions until one blocks. Returns whether there was progress.
    #[inline(always)]
    pub(super) fn execute(
        &mut self,
        op: &ActiveOperation,
        protocol: impl SlotProtocol,
        slices: &mut Slices,
        links: &mut [Option<Link>],
    ) -> Result<bool, Failed> {
        let begun = self.execution;
        while !self.is_executed() && self.carry_out(op, protocol, slices, links)? {
            // Bounds the pending sends.
            let oldest = self.pending.first().map_or(u32::MAX, |send| send.slice);
            if oldest < self.execution.slice {
                break;
            }
            self.execution = self.execution.next_slice();
            if op.ready.only_slice.is_none() {
                slices.advance(op, self.place(), oldest.min(self.execution.slice));
            }
        }
        Ok(self.execution != begun)
    }

    /// Returns whether the slice is at its end.
    #[inline(always)]
    fn carry_out(
        &mut self,
        op: &ActiveOperation,
        protocol: impl SlotProtocol,
        slices: &Slices,
        links: &mut [Option<Link>],
    ) -> Result<bool, Failed> {
        let Some(slice) = slices.get(op, self.strand, self.execution.slice) else {
            return Ok(false);
        };
        while let Some(action) = slice.actions.get(self.execution.action as usize) {
            if self.has_readers() && self.reader_of_target(op, action, slices, links).is_some() {
                break;
            }
            match action.work {
                Work::Send { to, .. } => self.begin_send(op, protocol, (action, to), links)?,
                Work::Recv { from, into } => {
                    let into = self.address(op, into);
                    let Some(received) = self.receive(op, protocol, (action, from, Some(into)), links)? else {
                        break;
                    };
                    if received != into {
                        // SAFETY: the target lies in its memory, of which nothing is being sent;
                        // what was received is as long, complete, and disjoint from it.
                        unsafe { core::ptr::copy_nonoverlapping(received, into, action.len) };
                    }
                }
                Work::RecvReduce { from, form, with, into } => {
                    let Some(received) = self.receive(op, protocol, (action, from, None), links)? else {
                        break;
                    };
                    let sources = [(form, received.cast_const()), self.operand(op, with)];
                    let into = (into.place.form(), self.address(op, into));
                    // SAFETY: all are as long as the message; the two in memory of the operation
                    // are the same or disjoint, and not written by others now; the received data is
                    // complete.
                    unsafe { op.function.reduce(&sources, into, action.elements) };
                }
                Work::Reduce { sources, into } => {
                    let mut operands = core::mem::take(&mut self.operands);
                    operands.clear();
                    operands.extend(slice.sources(sources).iter().map(|source| self.operand(op, *source)));
                    let into = (into.place.form(), self.address(op, into));
                    // SAFETY: all hold data blocks of one length; they are the same or disjoint,
                    // and not written by others now.
                    unsafe { op.function.reduce(&operands, into, action.elements) };
                    self.operands = operands;
                }
                Work::Copy { from, into } => {
                    let (from, into) = (self.address(op, from), self.address(op, into));
                    // In place they may be the same.
                    if from != into {
                        // SAFETY: both hold data blocks of one length, are disjoint, and not
                        // written by others now.
                        unsafe { core::ptr::copy_nonoverlapping(from, into, action.len) };
                    }
                }
            }
            self.execution.action += 1;
        }
        Ok(self.execution.action as usize == slice.actions.len())
    }

    /// Polls for the message that execution waits for, and for nothing else: a step takes longer
    /// than a cache line from another processor. Returns whether it has arrived; `None` if nothing
    /// is awaited, or a message of Simple of several lines, which polling would delay.
    pub(in crate::executor) fn await_message(&self, op: &ActiveOperation, links: &[Option<Link>]) -> Option<bool> {
        let slice = op.ready.only_slice.as_ref()?.get(self.strand as usize)?;
        let action = slice.actions.get(self.execution.action as usize)?;
        let (Work::Recv { from, .. } | Work::RecvReduce { from, .. }) = action.work else {
            return None;
        };
        if !self.pending.is_empty() {
            return None;
        }
        let link = links.get(from.index())?.as_ref()?;
        match op.transport {
            Transport::Lines(lines) => Some(link.await_lines(lines, action.len, POLLS)),
            Transport::Simple { granted_from, .. } if action.len < granted_from.min(EAGER_LINE + 1) => {
                Some(link.await_eager(POLLS))
            }
            Transport::Simple { .. } | Transport::Window => None,
        }
    }

    #[inline(always)]
    fn operand(&self, op: &ActiveOperation, memory: MemoryRef) -> (BlockForm, *const u8) {
        (memory.place.form(), self.address(op, memory).cast_const())
    }

    /// Whether sends may read what an action writes.
    #[inline(always)]
    fn has_readers(&self) -> bool {
        !(self.pending.is_empty() && self.in_flight.is_empty())
    }
}
