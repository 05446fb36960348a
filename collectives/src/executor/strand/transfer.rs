//! Transfers between ranks: protocols, grants ahead of receives, sends, and received messages.

use doorbell_verbs::BufferAlias;

use super::actions::{Action, MemoryRef, Slices, Work};
use super::{Position, StrandRunner, link};
use crate::executor::error::Failed;
use crate::executor::link::Link;
use crate::executor::operation::ActiveOperation;
use crate::executor::program::StepRef;
use crate::executor::window::Puts;
use crate::plan::PlanMemory;
use crate::protocol::LineProtocol;
use crate::types::Rank;

/// A message of which fragments have not left.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingSend {
    pub(super) to: Rank,
    pub(super) slice: u32,
    pub(super) step: u32,
    /// The actions that are left.
    pub(super) next: u32,
    end: u32,
}

/// Memory that a device reads, until the completion of requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlight {
    pub(super) operation: u64,
    pub(super) to: Rank,
    /// The number of requests.
    number: u64,
    memory: (usize, usize),
}

impl InFlight {
    pub(super) fn is_confirmed(&self, links: &[Option<Link>]) -> bool {
        let link = links[self.to.index()].as_ref();
        link.is_none_or(|link| link.completed >= self.number)
    }
}

fn reads_source<P: SlotProtocol>(_: P) -> bool {
    P::READS_SOURCE
}

fn overlap(a: (usize, usize), b: (usize, usize)) -> bool {
    a.0 < b.1 && b.0 < a.1
}

/// How messages travel. Those that are not granted take a slot of a ring, or are put in a window.
pub(super) trait SlotProtocol: Copy {
    /// Whether a device reads what was sent until the requests complete.
    const READS_SOURCE: bool = false;

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

#[derive(Clone, Copy)]
pub(super) struct WindowPuts<'p>(pub(super) &'p Puts);

impl SlotProtocol for WindowPuts<'_> {
    const READS_SOURCE: bool = true;

    fn is_granted(self, _: usize) -> bool {
        false
    }

    /// The block of the plan stands for the pieces of the put.
    unsafe fn send(self, to: &mut Link, _from: *const u8, _len: usize) -> Result<bool, Failed> {
        to.put(self.0)
    }

    unsafe fn receive(self, from: &mut Link, into: *mut u8, _len: usize) -> Option<*mut u8> {
        self.0.has_arrived(from.peer).then_some(into)
    }
}

impl StrandRunner {
    /// Grants memory for messages of operations behind the running one. Returns whether there was
    /// progress.
    pub(super) fn grant_ahead(
        &mut self,
        first: u64,
        operations: &[ActiveOperation],
        links: &mut [Option<Link>],
    ) -> Result<bool, Failed> {
        self.grants = self.grants.max((self.next, Position::default()));
        let mut moved = false;
        while let Some(op) = operations.get((self.grants.0 - first) as usize) {
            if op.ready.has_granted && op.uses(self.channel, self.strand) {
                if self.grants_ahead() && op.ready.only_slice.is_some() {
                    moved |= self.grant(op, &Slices::default(), links)?;
                }
                if self.grants.1.slice < self.slices_of(op) {
                    break;
                }
            }
            self.grants = (self.grants.0 + 1, Position::default());
        }
        Ok(moved)
    }

    /// Whether messages of an operation are granted memory that does not run yet.
    fn grants_ahead(&self) -> bool {
        self.grants.0 > self.next || !self.running
    }

    /// Grants memory for messages at and ahead of execution. Returns whether there was progress.
    pub(super) fn grant(
        &mut self,
        op: &ActiveOperation,
        slices: &Slices,
        links: &mut [Option<Link>],
    ) -> Result<bool, Failed> {
        let mut moved = false;
        while let Some(slice) = slices.get(op, self.strand, self.grants.1.slice) {
            let Some(action) = slice.actions.get(self.grants.1.action as usize) else {
                self.grants.1 = self.grants.1.next_slice();
                continue;
            };
            let (from, into) = match action.work {
                Work::Recv { from, into } => (from, Some(into)),
                Work::RecvReduce { from, .. } => (from, None),
                _ => {
                    self.grants.1.action += 1;
                    continue;
                }
            };
            if op.transport.is_granted(action.len) {
                if !link(links, from)?.may_grant() {
                    break;
                }
                let Some((addr, rkey)) = self.granted_memory(op, (action, into), slices, links)? else {
                    break;
                };
                link(links, from)?.grant(addr, rkey, action.len as u32, action.rest);
                moved = true;
            }
            self.grants.1.action += 1;
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
    ) -> Result<Option<(u64, u32)>, Failed> {
        if action.len == 0 {
            return Ok(Some((0, 0)));
        }
        if let Some((segment, rail, offset)) = into.and_then(|into| self.registered(op, into)) {
            let strand = &op.ready.program.strands[self.strand as usize];
            let free_after = strand.instructions[action.step as usize].free_after;
            // No operation writes what others in flight access; scratch memory is all operations'.
            let free = if self.grants_ahead() {
                free_after.is_none() && into.is_some_and(|into| into.place == PlanMemory::Output)
            } else {
                self.has_passed(op, free_after, slices) && self.reader_of_target(op, action, slices, links).is_none()
            };
            let addr = segment.start().addr() as u64 + offset as u64;
            return Ok(free.then(|| (addr, segment.rkey(rail))));
        }
        let staging = &mut self.receive_staging;
        let number = staging.acquire(&self.domain, action.len)?;
        let rkey = staging.memory.as_ref().map(|memory| memory.rkey(0));
        Ok(number
            .zip(rkey)
            .map(|(number, rkey)| (staging.start(number).addr() as u64, rkey)))
    }

    /// Whether execution is behind this step, seen from the position of grants.
    fn has_passed(&self, op: &ActiveOperation, step: Option<StepRef>, slices: &Slices) -> bool {
        let Some(step) = step else { return true };
        let Some(slice) = self.grants.1.slice.checked_sub(step.slices_back) else {
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
        let in_flight = |send: &&InFlight| overlap(send.memory, target) && !send.is_confirmed(links);
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
        let sent = unsafe { protocol.send(link(links, to)?, source, action.len) }?;
        if sent && reads_source(protocol) {
            let number = link(links, to)?.requests();
            self.track(
                InFlight {
                    operation: self.next,
                    to,
                    number,
                    memory: (0, 0),
                },
                links,
            );
        }
        Ok(sent)
    }

    fn track(&mut self, send: InFlight, links: &[Option<Link>]) {
        if self.in_flight.len() == self.in_flight.capacity() {
            self.in_flight.retain(|send| !send.is_confirmed(links));
        }
        self.in_flight.push(send);
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
        let source = match self.source(op, from, len) {
            _ if len == 0 => None,
            Some(source) => Some((source, self.address(op, from))),
            None => self.staged_copy(op, from, len, links)?,
        };
        if source.is_none() && len > 0 {
            return Ok(false);
        }
        let start = source.as_ref().map_or(0, |(_, start)| start.addr());
        let message = source.map(|(source, _)| (source, len));
        let number = link(links, to)?.send_granted(message)?;
        let send = InFlight {
            operation: self.next,
            to,
            number,
            memory: (start, start + len),
        };
        self.track(send, links);
        Ok(true)
    }

    /// A copy of a message in the send staging buffer, and its address; `None` while no slot is
    /// free.
    fn staged_copy(
        &mut self,
        op: &ActiveOperation,
        from: MemoryRef,
        len: usize,
        links: &[Option<Link>],
    ) -> Result<Option<(BufferAlias, *mut u8)>, Failed> {
        let from = self.address(op, from).cast_const();
        let staging = &mut self.send_staging;
        let is_read = |start: *mut u8| {
            let mut sends = self.in_flight.iter();
            sends.any(|send| send.memory.0 == start.addr() && !send.is_confirmed(links))
        };
        while staging.released < staging.acquired && !is_read(staging.start(staging.released)) {
            staging.released += 1;
        }
        let Some(number) = staging.acquire(&self.domain, len)? else {
            return Ok(None);
        };
        let start = staging.start(number);
        // SAFETY: the message lies in its memory, which the operation owns and nothing writes; a
        // slot is as long, and its last message has been acknowledged.
        unsafe { core::ptr::copy_nonoverlapping(from, start, len) };
        let memory = staging.memory.as_ref();
        let copy = memory.and_then(|memory| memory.alias(0, staging.offset(number), len));
        Ok(copy.map(|copy| (copy, start)))
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
