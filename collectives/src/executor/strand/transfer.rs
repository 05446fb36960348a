//! Transfers between ranks: grants ahead of receives, pending sends, and received messages.

use doorbell_verbs::BufferAlias;

use super::cursor::{self, MessageCursor};
use super::staging::STAGING_SLOTS;
use super::{DriveContext, NOT_SENT, PendingSend, StrandRunner, link};
use crate::executor::error::Failed;
use crate::executor::program::Instruction;
use crate::plan::{PlanMemory, Step};
use crate::types::Rank;

impl StrandRunner {
    pub(super) fn grant(&mut self, context: &mut DriveContext<'_>) -> Result<bool, Failed> {
        let op = context.op;
        let strand = &op.ready.program.strands[self.strand as usize];
        let mut moved = false;
        while self.grants.slice_index < self.slice_count(op) {
            let Some(&step) = strand.receives.get(self.receive) else {
                if strand.receives.is_empty() {
                    self.grants.slice_index = u32::MAX;
                    break;
                }
                self.receive = 0;
                self.grants.slice_index += 1;
                continue;
            };
            self.grants.step = step;
            let instruction = &strand.instructions[step as usize];
            let Some((from, form, span)) = instruction.step.message() else {
                break;
            };
            let slice = self.slice(op, self.grants.slice_index);
            let mut cursor = self.grant_cursor;
            let Some(fragment) = cursor::next_fragment(
                &op.ready.layout,
                op.fragment(form),
                instruction,
                span,
                slice,
                &mut cursor,
            ) else {
                self.receive += 1;
                self.grant_cursor = MessageCursor::default();
                continue;
            };
            let len = fragment.len as usize * op.function.bytes(form);
            if op.is_eager(len) {
                cursor::advance(&mut cursor, fragment);
                self.grant_cursor = cursor;
                continue;
            }
            let peer = link(context.links, from)?;
            if !peer.may_grant() {
                break;
            }
            let direct = match instruction.step {
                Step::Recv { into, .. } => self.registered(op, into.place),
                _ => None,
            };
            if let Some((segment, rail, offset)) = direct {
                if !self.has_passed(instruction.free_after, self.grants.slice_index)
                    || !self.is_free(
                        op,
                        instruction,
                        span,
                        Some(fragment),
                        self.grants.slice_index,
                        context.links,
                    )
                {
                    break;
                }
                let at =
                    offset + cursor::byte_offset(&op.ready.layout, &op.function, instruction, span, slice, fragment);
                let addr = segment.start().addr() as u64 + at as u64;
                let rkey = segment.rkey(rail);
                link(context.links, from)?.grant(addr, rkey, len as u32);
            } else {
                if self.receive_staging.acquired - self.receive_staging.released == STAGING_SLOTS {
                    break;
                }
                let addr = self.receive_staging.start(self.receive_staging.acquired).addr() as u64;
                let rkey = self.receive_staging.memory.as_ref().map_or(0, |memory| memory.rkey(0));
                peer.grant(addr, rkey, len as u32);
                self.receive_staging.acquired += 1;
            }
            cursor::advance(&mut cursor, fragment);
            self.grant_cursor = cursor;
            moved = true;
        }
        Ok(moved)
    }

    /// False if the send of this step in the previous slice has not left.
    pub(super) fn begin_send(&mut self, context: &mut DriveContext<'_>, to: Rank) -> Result<bool, Failed> {
        let step = self.execution.step as usize;
        if self.sent[step] == NOT_SENT {
            return Ok(false);
        }
        let mut send = PendingSend {
            at: self.execution,
            to,
            cursor: MessageCursor::default(),
            last: 0,
        };
        self.sent[step] = NOT_SENT;
        let waits = self.sends.iter().any(|before| before.to == to);
        if waits || !self.send(context, &mut send)?.1 {
            self.sends.push(send);
        }
        Ok(true)
    }

    /// Continues the sends in flight; those to one rank in order.
    pub(super) fn send_pending(&mut self, context: &mut DriveContext<'_>) -> Result<bool, Failed> {
        let mut moved = false;
        let mut index = 0;
        while index < self.sends.len() {
            let mut send = self.sends[index];
            if self.sends[..index].iter().any(|before| before.to == send.to) {
                index += 1;
                continue;
            }
            let (further, done) = self.send(context, &mut send)?;
            moved |= further;
            if done {
                self.sends.remove(index);
            } else {
                self.sends[index] = send;
                index += 1;
            }
        }
        Ok(moved)
    }

    /// Returns whether there was progress, and whether the message is complete.
    pub(super) fn send(
        &mut self,
        context: &mut DriveContext<'_>,
        send: &mut PendingSend,
    ) -> Result<(bool, bool), Failed> {
        let op = context.op;
        let instruction = &op.ready.program.strands[self.strand as usize].instructions[send.at.step as usize];
        let Some((_, form, span)) = instruction.step.message() else {
            return Ok((false, true));
        };
        let slice = self.slice(op, send.at.slice_index);
        let mut moved = false;
        while let Some(fragment) = cursor::next_fragment(
            &op.ready.layout,
            op.fragment(form),
            instruction,
            span,
            slice,
            &mut send.cursor,
        ) {
            let to = link(context.links, send.to)?;
            let len = fragment.len as usize * op.function.bytes(form);
            let at = cursor::byte_offset(&op.ready.layout, &op.function, instruction, span, slice, fragment);
            if let Some(lines) = op.lines {
                if !to.may_send_lines(lines) {
                    return Ok((moved, false));
                }
                let from = self.place_start(op, span.place).wrapping_add(at);
                // SAFETY: a fragment lies in its memory, which the operation owns; later steps of
                // this rank that write it wait for the send, and it is granted to no peer.
                unsafe { to.send_lines(lines, from, len) }?;
            } else if op.is_eager(len) {
                if !to.may_send_eager() {
                    return Ok((moved, false));
                }
                let from = self.place_start(op, span.place).wrapping_add(at);
                // SAFETY: as for LL.
                unsafe { to.send_eager(from, len) }?;
            } else {
                if !to.is_granted() || self.awaits_lengths_from(send.to) {
                    return Ok((moved, false));
                }
                let Some(source) = self.source(context, span.place, at, len, send.to) else {
                    return Ok((moved, false));
                };
                let number = link(context.links, send.to)?.send_granted(Some((source, len)))?;
                if self.registered(op, span.place).is_some() {
                    send.last = number;
                } else {
                    self.send_staging_use[((self.send_staging.acquired - 1) % STAGING_SLOTS) as usize] =
                        (send.to, number);
                }
            }
            cursor::advance(&mut send.cursor, fragment);
            moved = true;
        }
        self.sent[send.at.step as usize] = send.last;
        Ok((true, true))
    }

    /// The data itself, or a copy in the send staging buffer; `None` while no slot is free.
    pub(super) fn source(
        &mut self,
        context: &mut DriveContext<'_>,
        place: PlanMemory,
        at: usize,
        len: usize,
        to: Rank,
    ) -> Option<BufferAlias> {
        let op = context.op;
        if let Some((segment, rail, offset)) = self.registered(op, place) {
            return segment.alias(rail, offset + at, len);
        }
        while self.send_staging.released < self.send_staging.acquired {
            let (of, number) = self.send_staging_use[(self.send_staging.released % STAGING_SLOTS) as usize];
            if context.links[of.index()]
                .as_ref()
                .is_some_and(|link| link.completed < number)
            {
                break;
            }
            self.send_staging.released += 1;
        }
        if self.send_staging.acquired - self.send_staging.released == STAGING_SLOTS {
            return None;
        }
        let (number, from) = (self.send_staging.acquired, self.place_start(op, place).wrapping_add(at));
        // SAFETY: the message lies in its memory, which the operation owns and nothing writes; a
        // slot is as long as a fragment, and its last message has been acknowledged.
        unsafe { core::ptr::copy_nonoverlapping(from, self.send_staging.start(number), len) };
        let alias = self
            .send_staging
            .memory
            .as_ref()?
            .alias(0, self.send_staging.offset(number), len)?;
        self.send_staging_use[(number % STAGING_SLOTS) as usize] = (to, NOT_SENT);
        self.send_staging.acquired += 1;
        Some(alias)
    }

    pub(super) fn receive_message(
        &mut self,
        context: &mut DriveContext<'_>,
        instruction: &Instruction,
        slice: u32,
        moved: &mut bool,
    ) -> Result<bool, Failed> {
        let op = context.op;
        let Some((from, form, span)) = instruction.step.message() else {
            return Ok(true);
        };
        if self.awaits_lengths_from(from) {
            return Ok(false);
        }
        let mut cursor = self.cursor;
        while let Some(fragment) = cursor::next_fragment(
            &op.ready.layout,
            op.fragment(form),
            instruction,
            span,
            slice,
            &mut cursor,
        ) {
            let len = fragment.len as usize * op.function.bytes(form);
            let lands = match instruction.step {
                Step::Recv { into, .. } => {
                    op.lines.is_none() && !op.is_eager(len) && self.registered(op, into.place).is_some()
                }
                _ => false,
            };
            // Memory granted in place was free then.
            if !lands
                && !self.is_free(
                    op,
                    instruction,
                    span,
                    Some(fragment),
                    self.execution.slice_index,
                    context.links,
                )
            {
                return Ok(false);
            }
            let into = self.place_start(op, span.place).wrapping_add(cursor::byte_offset(
                &op.ready.layout,
                &op.function,
                instruction,
                span,
                slice,
                fragment,
            ));
            let peer = link(context.links, from)?;
            let received: *mut u8 = match op.lines {
                Some(lines) => {
                    let direct = matches!(instruction.step, Step::Recv { .. }) && len >= 4;
                    let target = if direct { into } else { self.lines.as_mut_ptr().cast() };
                    // SAFETY: the fragment lies in its memory, from which nothing is being sent; or
                    // in the line buffer, as a message writes four bytes at least.
                    if !unsafe { peer.receive_lines(lines, target, len) } {
                        return Ok(false);
                    }
                    target
                }
                None if op.is_eager(len) => match peer.receive_eager(len) {
                    Some(data) => data,
                    None => return Ok(false),
                },
                None if !peer.has_arrived() => return Ok(false),
                None => {
                    peer.receive_granted();
                    if lands {
                        into
                    } else {
                        self.receive_staging.start(self.receive_staging.released)
                    }
                }
            };
            if len > 0 {
                match &instruction.step {
                    // SAFETY: the fragment lies in its memory, which nothing else accesses now, and
                    // was received as a whole into disjoint memory.
                    Step::Recv { .. } if received != into => unsafe {
                        core::ptr::copy_nonoverlapping(received, into, len);
                    },
                    Step::RecvReduce { with, .. } => {
                        let with_at =
                            cursor::byte_offset(&op.ready.layout, &op.function, instruction, *with, slice, fragment);
                        let operand = self.place_start(op, with.place).wrapping_add(with_at);
                        let sources = [(form, received.cast_const()), (with.place.form(), operand.cast_const())];
                        // SAFETY: all are as long as the fragment; the two in memory of the
                        // operation are the same or disjoint, and not written by others now; the
                        // received data is complete.
                        unsafe {
                            op.function
                                .reduce(&sources, (span.place.form(), into), fragment.len as usize)
                        };
                    }
                    _ => {}
                }
                if op.lines.is_none() && !op.is_eager(len) && !lands {
                    self.receive_staging.released += 1;
                }
            }
            cursor::advance(&mut cursor, fragment);
            self.cursor = cursor;
            *moved = true;
        }
        Ok(true)
    }
}
