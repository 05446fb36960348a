//! The fast path of short operations: each message takes one slot, of LL, LL128 or eager messages,
//! and slots suffice for all. So a step completes at once or waits for its peer, and
//! everything is computed once for all operations of the same length.
//!
//! No cycle of ranks waits for slots. Of those that wait for one, consider a rank in the earliest
//! operation: its receiver has received all earlier operations, and holds back credits for less
//! than half a ring of these; this operation has at most the other half.

use super::cursor::{self, MessageCursor};
use super::{DriveResult, StrandRunner, link};
use crate::executor::error::Failed;
use crate::executor::layout::Layout;
use crate::executor::link::Link;
use crate::executor::operation::ActiveOperation;
use crate::executor::program::CompiledProgram;
use crate::kernel::Function;
use crate::plan::{BlockForm, PlanMemory, Span, Step};
use crate::protocol::{EAGER_SLOTS, LineProtocol};
use crate::types::Rank;

#[derive(Clone, Copy, Debug)]
struct MemoryRef {
    place: PlanMemory,
    at: usize,
}

#[derive(Debug)]
enum Action {
    Send {
        to: Rank,
        from: MemoryRef,
        len: usize,
    },
    Recv {
        from: Rank,
        into: MemoryRef,
        len: usize,
    },
    RecvReduce {
        from: Rank,
        form: BlockForm,
        len: usize,
        with: MemoryRef,
        into: MemoryRef,
        elements: usize,
    },
    Reduce {
        sources: Box<[MemoryRef]>,
        into: MemoryRef,
        elements: usize,
    },
    Copy {
        from: MemoryRef,
        into: MemoryRef,
        len: usize,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::executor) enum SlotTransport {
    LineProtocol(LineProtocol),
    /// Simple; no message exceeds the eager limit.
    Eager {
        /// Maximum bytes of an eager message, and of a fragment.
        eager: usize,
        fragment: usize,
    },
}

impl SlotTransport {
    /// Bytes into which messages are cut, bytes that a slot holds, and slots of a ring.
    fn slots(self) -> (usize, usize, u64) {
        match self {
            Self::LineProtocol(lines) => (lines.capacity(), lines.capacity(), lines.slots()),
            Self::Eager { eager, fragment } => (fragment, eager, EAGER_SLOTS),
        }
    }
}

#[derive(Debug, Default)]
pub(in crate::executor) struct FastPath {
    /// Each with the number of its step.
    actions: Box<[(u32, Action)]>,
}

impl FastPath {
    /// The fast paths of all strands, of one slice; `None` where one needs more slots than exist.
    pub(in crate::executor) fn of(
        program: &CompiledProgram,
        layout: &Layout,
        function: &Function,
        transport: SlotTransport,
    ) -> Option<Box<[Self]>> {
        (layout.extent.slices == 1).then_some(())?;
        let (cut, room, slots) = transport.slots();
        // Messages to one rank: together with those not yet credited they fill at most a ring.
        let messages = slots as usize / 2;
        let strand = |strand: &crate::executor::program::StrandProgram| {
            let mut actions = Vec::new();
            let mut sent: Vec<(Rank, usize)> = Vec::new();
            for (number, instruction) in (0..).zip(&strand.instructions) {
                let memory_ref = |span: Span, fragment| MemoryRef {
                    place: span.place,
                    at: cursor::byte_offset(layout, function, instruction, span, 0, fragment),
                };
                let (form, span) = match (instruction.step.message(), &instruction.step) {
                    (Some((_, form, span)), _) => (form, span),
                    (None, Step::Reduce { into, .. } | Step::Copy { into, .. }) => (into.place.form(), *into),
                    (None, _) => continue,
                };
                let of_message = instruction.step.message().is_some();
                let most = if of_message {
                    (cut / function.bytes(form)) as u64
                } else {
                    u64::MAX
                };
                if !of_message && span.blocks == 0 {
                    continue;
                }
                let mut cursor = MessageCursor::default();
                while let Some(fragment) = cursor::next_fragment(layout, most, instruction, span, 0, &mut cursor) {
                    let elements = fragment.len as usize;
                    let len = elements * function.bytes(form);
                    if of_message && len > room {
                        return None;
                    }
                    let next_action = match &instruction.step {
                        Step::Send { to, span } => {
                            let index = sent.iter().position(|(rank, _)| rank == to).unwrap_or(sent.len());
                            if index == sent.len() {
                                sent.push((*to, 0));
                            }
                            sent[index].1 += 1;
                            if sent[index].1 > messages {
                                return None;
                            }
                            Action::Send {
                                to: *to,
                                from: memory_ref(*span, fragment),
                                len,
                            }
                        }
                        Step::Recv { from, into } => Action::Recv {
                            from: *from,
                            into: memory_ref(*into, fragment),
                            len,
                        },
                        Step::RecvReduce { from, form, with, into } => Action::RecvReduce {
                            from: *from,
                            form: *form,
                            len,
                            with: memory_ref(*with, fragment),
                            into: memory_ref(*into, fragment),
                            elements,
                        },
                        Step::Reduce { sources, into } => Action::Reduce {
                            sources: sources.iter().map(|source| memory_ref(*source, fragment)).collect(),
                            into: memory_ref(*into, fragment),
                            elements,
                        },
                        Step::Copy { from, into } => Action::Copy {
                            from: memory_ref(*from, fragment),
                            into: memory_ref(*into, fragment),
                            len,
                        },
                    };
                    actions.push((number, next_action));
                    cursor::advance(&mut cursor, fragment);
                }
            }
            Some(Self {
                actions: actions.into(),
            })
        };
        program.strands.iter().map(strand).collect()
    }
}

trait SlotProtocol {
    /// Sends a message; false if it would block.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes, not written meanwhile.
    unsafe fn send(&self, to: &mut Link, from: *const u8, len: usize) -> Result<bool, Failed>;

    /// Receives a message. Returns its address, valid until something is sent to the peer; `None`
    /// if it has not arrived.
    ///
    /// # Safety
    /// `into` is valid for writes of `len` bytes (4, if that is 0), and not accessed by others.
    unsafe fn receive(&self, from: &mut Link, into: *mut u8, len: usize) -> Option<*mut u8>;
}

struct LineSlots(LineProtocol);

impl SlotProtocol for LineSlots {
    #[inline(always)]
    unsafe fn send(&self, to: &mut Link, from: *const u8, len: usize) -> Result<bool, Failed> {
        let may = to.may_send_lines(self.0);
        if may {
            // SAFETY: by contract.
            unsafe { to.send_lines(self.0, from, len) }?;
        }
        Ok(may)
    }

    #[inline(always)]
    unsafe fn receive(&self, from: &mut Link, into: *mut u8, len: usize) -> Option<*mut u8> {
        // SAFETY: by contract.
        unsafe { from.receive_lines(self.0, into, len) }.then_some(into)
    }
}

struct EagerSlots;

impl SlotProtocol for EagerSlots {
    #[inline(always)]
    unsafe fn send(&self, to: &mut Link, from: *const u8, len: usize) -> Result<bool, Failed> {
        let may = to.may_send_eager();
        if may {
            // SAFETY: by contract.
            unsafe { to.send_eager(from, len) }?;
        }
        Ok(may)
    }

    #[inline(always)]
    unsafe fn receive(&self, from: &mut Link, _into: *mut u8, len: usize) -> Option<*mut u8> {
        from.receive_eager(len)
    }
}

impl StrandRunner {
    pub(super) fn drive_fast_path(
        &mut self,
        op: &ActiveOperation,
        fast_path: &FastPath,
        links: &mut [Option<Link>],
    ) -> Result<DriveResult, Failed> {
        match op.lines {
            Some(lines) => self.drive_slots(op, fast_path, &LineSlots(lines), links),
            None => self.drive_slots(op, fast_path, &EagerSlots, links),
        }
    }

    #[inline(always)]
    fn drive_slots(
        &mut self,
        op: &ActiveOperation,
        fast_path: &FastPath,
        transport: &impl SlotProtocol,
        links: &mut [Option<Link>],
    ) -> Result<DriveResult, Failed> {
        let begun = self.next_action;
        while let Some((step, next_action)) = fast_path.actions.get(self.next_action) {
            self.execution.step = *step;
            let received: *mut u8 = self.lines.as_mut_ptr().cast();
            let at = |memory_ref: MemoryRef| self.place_start(op, memory_ref.place).wrapping_add(memory_ref.at);
            let operand = |memory_ref: MemoryRef| (memory_ref.place.form(), at(memory_ref).cast_const());
            match next_action {
                Action::Send { to, from, len } => {
                    // SAFETY: the message lies in its memory, which the operation owns; this rank
                    // writes there only in later steps.
                    if !unsafe { transport.send(link(links, *to)?, at(*from), *len) }? {
                        break;
                    }
                }
                Action::Recv { from, into, len } => {
                    let into = at(*into);
                    let target = if *len >= 4 { into } else { received };
                    // SAFETY: the message's target lies in its memory, whose earlier contents have
                    // been sent; or it is the buffer for a slot's lines, as short messages write
                    // four bytes at least.
                    let Some(come) = (unsafe { transport.receive(link(links, *from)?, target, *len) }) else {
                        break;
                    };
                    if come != into {
                        // SAFETY: as above; the line buffer and a slot are disjoint from it.
                        unsafe { core::ptr::copy_nonoverlapping(come, into, *len) };
                    }
                }
                Action::RecvReduce {
                    from,
                    form,
                    len,
                    with,
                    into,
                    elements,
                } => {
                    // SAFETY: the line buffer is as long as a slot.
                    let Some(come) = (unsafe { transport.receive(link(links, *from)?, received, *len) }) else {
                        break;
                    };
                    let sources = [(*form, come.cast_const()), operand(*with)];
                    // SAFETY: all are as long as the message; the two in memory of the operation
                    // are the same or disjoint, and not written by others now; the received data is
                    // complete.
                    unsafe { op.function.reduce(&sources, (into.place.form(), at(*into)), *elements) };
                }
                Action::Reduce {
                    sources,
                    into,
                    elements,
                } => {
                    let mut operands = core::mem::take(&mut self.operands);
                    operands.clear();
                    let operand = |memory_ref: &MemoryRef| {
                        let at = self.place_start(op, memory_ref.place).wrapping_add(memory_ref.at);
                        (memory_ref.place.form(), at.cast_const())
                    };
                    operands.extend(sources.iter().map(operand));
                    let into = (
                        into.place.form(),
                        self.place_start(op, into.place).wrapping_add(into.at),
                    );
                    // SAFETY: all hold data blocks of one length; they are the same or disjoint,
                    // and not written by others now.
                    unsafe { op.function.reduce(&operands, into, *elements) };
                    self.operands = operands;
                }
                Action::Copy { from, into, len } => {
                    let (from, into) = (at(*from), at(*into));
                    // In place they may be the same.
                    if from != into {
                        // SAFETY: both hold data blocks of one length, are disjoint, and not
                        // written by others now.
                        unsafe { core::ptr::copy_nonoverlapping(from, into, *len) };
                    }
                }
            }
            self.next_action += 1;
        }
        let done = self.next_action == fast_path.actions.len();
        if self.next_action != begun || self.control_writes_pending {
            self.control_writes_pending = false;
            for to in links.iter_mut().flatten() {
                to.flush_control_writes()?;
                // Otherwise the peer would wait for the credits in them, and this rank for the
                // peer's next message.
                self.control_writes_pending |= to.has_control_writes();
            }
        }
        Ok(match (done, self.next_action != begun) {
            (true, _) => {
                self.running = false;
                DriveResult::Done
            }
            (false, true) => DriveResult::Moved,
            (false, false) => DriveResult::Idle,
        })
    }
}
