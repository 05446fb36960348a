//! Transfers between ranks: protocols, grants ahead of receives, sends, and received messages.

use doorbell_verbs::BufferAlias;

use super::actions::{Action, MemoryRef, Slices, Work};
use super::staging::STAGING_SLOTS;
use super::{Position, StrandRunner, is_confirmed, link};
use crate::executor::error::Failed;
use crate::executor::link::Link;
use crate::executor::operation::ActiveOperation;
use crate::executor::program::StepRef;
use crate::protocol::LineProtocol;
use crate::types::Rank;

/// A message of which fragments have not left.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingSend {
    pub(super) to: Rank,
    pub(super) slice: u32,
    pub(super) step: u32,
    /// The actions that are left.
    next: u32,
    end: u32,
}

/// Memory that a device reads, until the completion of requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlight {
    pub(super) to: Rank,
    /// The number of requests.
    pub(super) number: u64,
    memory: (usize, usize),
}

fn overlap(a: (usize, usize), b: (usize, usize)) -> bool {
    a.0 < b.1 && b.0 < a.1
}

/// How messages travel. Those that are not granted take a slot of a ring.
pub(super) trait SlotProtocol: Copy {
    fn is_granted(self, len: usize) -> bool;

    /// Sends a message; false if no slot is free.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes, not written meanwhile.
    unsafe fn send(self, to: &mut Link, from: *const u8, len: usize) -> Result<bool, Failed>;

    /// Receives a message. Returns its address, valid until something is sent to the peer; `None`
    /// if it has not arrived.
    ///
    /// # Safety
    /// `into` is valid for writes of `len` bytes (4, if that is 0), and not accessed by others.
    unsafe fn receive(self, from: &mut Link, into: *mut u8, len: usize) -> Option<*mut u8>;
}

#[derive(Clone, Copy)]
pub(super) struct LineSlots(pub(super) LineProtocol);

impl SlotProtocol for LineSlots {
    #[inline(always)]
    fn is_granted(self, _: usize) -> bool {
        false
    }

    #[inline(always)]
    unsafe fn send(self, to: &mut Link, from: *const u8, len: usize) -> Result<bool, Failed> {
        let may = to.may_send_lines(self.0);
        if may {
            // SAFETY: by contract.
            unsafe { to.send_lines(self.0, from, len) }?;
        }
        Ok(may)
    }

    #[inline(always)]
    unsafe fn receive(self, from: &mut Link, into: *mut u8, len: usize) -> Option<*mut u8> {
        // SAFETY: by contract.
        unsafe { from.receive_lines(self.0, into, len) }.then_some(into)
    }
}

#[derive(Clone, Copy)]
pub(super) struct SimpleSlots {
    /// The length of messages from which on they are granted.
    pub(super) granted_from: usize,
}

impl SlotProtocol for SimpleSlots {
    #[inline(always)]
    fn is_granted(self, len: usize) -> bool {
        len >= self.granted_from
    }

    #[inline(always)]
    unsafe fn send(self, to: &mut Link, from: *const u8, len: usize) -> Result<bool, Failed> {
        let may = to.may_send_eager();
        if may {
            // SAFETY: by contract.
            unsafe { to.send_eager(from, len) }?;
        }
        Ok(may)
    }

    #[inline(always)]
    unsafe fn receive(self, from: &mut Link, _into: *mut u8, len: usize) -> Option<*mut u8> {
        from.receive_eager(len)
    }
}

impl StrandRunner {
    /// Grants memory for messages at and ahead of execution. Returns whether there was progress.
    pub(super) fn grant(
        &mut self,
        op: &ActiveOperation,
        slices: &Slices,
        links: &mut [Option<Link>],
    ) -> Result<bool, Failed> {
        let mut moved = false;
        while let Some(slice) = slices.get(op, self.strand, self.grants.slice) {
            let Some(action) = slice.actions.get(self.grants.action as usize) else {
                self.grants = self.grants.next_slice();
                continue;
            };
            let (from, into) = match action.work {
                Work::Recv { from, into } => (from, Some(into)),
                Work::RecvReduce { from, .. } => (from, None),
                _ => {
                    self.grants.action += 1;
                    continue;
                }
            };
            if op.transport.is_granted(action.len) {
                if !link(links, from)?.may_grant() {
                    break;
                }
                let Some((addr, rkey)) = self.granted_memory(op, (action, into), slices, links) else {
                    break;
                };
                link(links, from)?.grant(addr, rkey, action.len as u32, action.rest);
                moved = true;
            }
            self.grants.action += 1;
        }
        Ok(moved)
    }

    /// Address and key of memory for a message: its target, if that is registered, or a staging
    /// buffer; `None` while it is in use.
    fn granted_memory(
        &mut self,
        op: &ActiveOperation,
        (action, into): (&Action, Option<MemoryRef>),
        slices: &Slices,
        links: &[Option<Link>],
    ) -> Option<(u64, u32)> {
        if action.len == 0 {
            return Some((0, 0));
        }
        if let Some((segment, rail, offset)) = into.and_then(|into| self.registered(op, into)) {
            let strand = &op.ready.program.strands[self.strand as usize];
            let free_after = strand.instructions[action.step as usize].free_after;
            let free = self.has_passed(op, free_after, slices);
            if !free || self.reader_of_target(op, action, slices, links).is_some() {
                return None;
            }
            return Some((segment.start().addr() as u64 + offset as u64, segment.rkey(rail)));
        }
        let staging = &mut self.receive_staging;
        let number = staging.acquire()?;
        let rkey = staging.memory.as_ref()?.rkey(0);
        Some((staging.start(number).addr() as u64, rkey))
    }

    /// Whether execution is behind this step, seen from the position of grants.
    fn has_passed(&self, op: &ActiveOperation, step: Option<StepRef>, slices: &Slices) -> bool {
        let Some(step) = step else { return true };
        let Some(slice) = self.grants.slice.checked_sub(step.slices_back) else {
            return true;
        };
        let Position { slice: current, action } = self.execution;
        let actions = slices.get(op, self.strand, current);
        let at = actions.and_then(|slice| slice.actions.get(action as usize));
        slice < current || slice == current && at.is_none_or(|action| action.step > step.step)
    }

    /// The target of a send that reads what the action writes: a pending one, or one that a device
    /// still carries out.
    pub(super) fn reader_of_target(
        &self,
        op: &ActiveOperation,
        action: &Action,
        slices: &Slices,
        links: &[Option<Link>],
    ) -> Option<Rank> {
        let memory = |memory: MemoryRef, len: usize| {
            let start = self.address(op, memory).addr();
            (start, start + len)
        };
        let target = match action.work {
            Work::Send { .. } => return None,
            Work::Copy { from, into } if self.address(op, from) == self.address(op, into) => return None,
            Work::RecvReduce { into, .. } => memory(into, action.elements * op.function.bytes(into.place.form())),
            Work::Recv { into, .. } | Work::Reduce { into, .. } | Work::Copy { into, .. } => memory(into, action.len),
        };
        let reads_target = |send: &&PendingSend| {
            let slice = slices.get(op, self.strand, send.slice);
            let actions = slice.and_then(|slice| slice.actions.get(send.next as usize..send.end as usize));
            actions.unwrap_or_default().iter().any(|action| match action.work {
                Work::Send { from, .. } => overlap(memory(from, action.len), target),
                _ => false,
            })
        };
        let in_flight = |send: &&InFlight| overlap(send.memory, target) && !is_confirmed(links, send.to, send.number);
        let pending = self.pending.iter().find(reads_target).map(|send| send.to);
        pending.or_else(|| self.in_flight.iter().find(in_flight).map(|send| send.to))
    }

    /// Sends the action at execution, or leaves it pending.
    #[inline(always)]
    pub(super) fn begin_send(
        &mut self,
        op: &ActiveOperation,
        protocol: impl SlotProtocol,
        (action, to): (&Action, Rank),
        links: &mut [Option<Link>],
    ) -> Result<(), Failed> {
        let waits = !self.pending.is_empty() && self.pending.iter().any(|before| before.to == to);
        if waits || !self.send(op, protocol, action, links)? {
            self.leave_pending(action.step, to);
        }
        Ok(())
    }

    #[cold]
    fn leave_pending(&mut self, step: u32, to: Rank) {
        let Position { slice, action } = self.execution;
        match self.pending.last_mut() {
            Some(last) if (last.slice, last.step, last.end) == (slice, step, action) => last.end += 1,
            _ => self.pending.push(PendingSend {
                to,
                slice,
                step,
                next: action,
                end: action + 1,
            }),
        }
    }

    /// Continues the pending sends; those to one rank in order. Returns whether there was progress.
    pub(super) fn send_pending(
        &mut self,
        op: &ActiveOperation,
        protocol: impl SlotProtocol,
        slices: &Slices,
        links: &mut [Option<Link>],
    ) -> Result<bool, Failed> {
        let mut moved = false;
        let mut index = 0;
        while let Some(&PendingSend {
            to, slice, next, end, ..
        }) = self.pending.get(index)
        {
            let actions = slices
                .get(op, self.strand, slice)
                .map_or(&[][..], |slice| &slice.actions);
            let mut next = next;
            if !self.pending[..index].iter().any(|before| before.to == to) {
                while next < end && self.send(op, protocol, &actions[next as usize], links)? {
                    next += 1;
                    moved = true;
                }
            }
            if next == end {
                self.pending.remove(index);
            } else {
                self.pending[index].next = next;
                index += 1;
            }
        }
        Ok(moved)
    }

    /// False if it would block.
    #[inline(always)]
    fn send(
        &mut self,
        op: &ActiveOperation,
        protocol: impl SlotProtocol,
        action: &Action,
        links: &mut [Option<Link>],
    ) -> Result<bool, Failed> {
        let Work::Send { to, from } = action.work else {
            return Ok(true);
        };
        if protocol.is_granted(action.len) {
            return self.send_granted(op, (action, to, from), links);
        }
        let source = self.address(op, from).cast_const();
        // SAFETY: the message lies in its memory, which the operation owns; later actions of this
        // rank that write it wait for the send, and it is granted to no peer.
        unsafe { protocol.send(link(links, to)?, source, action.len) }
    }

    fn send_granted(
        &mut self,
        op: &ActiveOperation,
        (action, to, from): (&Action, Rank, MemoryRef),
        links: &mut [Option<Link>],
    ) -> Result<bool, Failed> {
        let len = action.len;
        let peer = link(links, to)?;
        if !peer.is_granted() || self.awaits_lengths_from(to) {
            return Ok(false);
        }
        let expected = peer.granted_rest();
        if expected != action.rest {
            return Err(Failed::Parts {
                operation: self.next,
                collective: op.collective,
                from: self.rank,
                to,
                bytes: action.rest,
                expected,
            });
        }
        let registered = self.registered(op, from);
        let registered = registered.map(|(segment, rail, offset)| segment.alias(rail, offset, len));
        let (source, staged) = match registered {
            _ if len == 0 => (None, false),
            Some(source) => (source, false),
            None => (self.staged_copy(op, from, len, links), true),
        };
        if source.is_none() && len > 0 {
            return Ok(false);
        }
        let number = link(links, to)?.send_granted(source.map(|source| (source, len)))?;
        if staged {
            let copy = self.send_staging.acquired - 1;
            self.send_staging_use[(copy % STAGING_SLOTS) as usize] = (to, number);
        } else {
            let start = self.address(op, from).addr();
            self.in_flight.retain(|send| !is_confirmed(links, send.to, send.number));
            self.in_flight.push(InFlight {
                to,
                number,
                memory: (start, start + len),
            });
        }
        Ok(true)
    }

    /// A copy of a message in the send staging buffer; `None` while no slot is free.
    fn staged_copy(
        &mut self,
        op: &ActiveOperation,
        from: MemoryRef,
        len: usize,
        links: &[Option<Link>],
    ) -> Option<BufferAlias> {
        let from = self.address(op, from).cast_const();
        let staging = &mut self.send_staging;
        while staging.released < staging.acquired {
            let (to, number) = self.send_staging_use[(staging.released % STAGING_SLOTS) as usize];
            if !is_confirmed(links, to, number) {
                break;
            }
            staging.released += 1;
        }
        let number = staging.acquire()?;
        // SAFETY: the message lies in its memory, which the operation owns and nothing writes; a
        // slot is as long as a fragment, and its last message has been acknowledged.
        unsafe { core::ptr::copy_nonoverlapping(from, staging.start(number), len) };
        staging.memory.as_ref()?.alias(0, staging.offset(number), len)
    }

    /// Receives a message, `into` its target if that is where it can be. Returns its address, valid
    /// until something is sent to the peer; `None` if it has not arrived.
    #[inline(always)]
    pub(super) fn receive(
        &mut self,
        op: &ActiveOperation,
        protocol: impl SlotProtocol,
        (action, from, into): (&Action, Rank, Option<*mut u8>),
        links: &mut [Option<Link>],
    ) -> Result<Option<*mut u8>, Failed> {
        if self.awaits_lengths_from(from) {
            return Ok(None);
        }
        let peer = link(links, from)?;
        if protocol.is_granted(action.len) {
            return Ok(self.receive_granted(op, action, into, peer));
        }
        let target = match into {
            Some(into) if action.len >= 4 => into,
            _ => self.lines.as_mut_ptr().cast(),
        };
        // SAFETY: the message's target lies in its memory, of which nothing is being sent; or it is
        // the buffer for a slot's lines, as short messages write four bytes at least.
        Ok(unsafe { protocol.receive(peer, target, action.len) })
    }

    fn receive_granted(
        &mut self,
        op: &ActiveOperation,
        action: &Action,
        into: Option<*mut u8>,
        peer: &mut Link,
    ) -> Option<*mut u8> {
        if !peer.has_arrived() {
            return None;
        }
        peer.receive_granted();
        let target = match action.work {
            Work::Recv { into, .. } => self.registered(op, into).is_some(),
            _ => false,
        };
        match into {
            Some(into) if target || action.len == 0 => Some(into),
            _ => {
                let staged = self.receive_staging.start(self.receive_staging.released);
                self.receive_staging.released += 1;
                Some(staged)
            }
        }
    }
}
