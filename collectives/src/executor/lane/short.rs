//! Short operations: all of a strand's messages take a slot each, of lines or of what is eager and stored, and there are slots for all of them. Then a step is done at once or waits for the peer, nothing is granted, confirmed or cut, and all that is to be worked
//! out about it can be once, for as many operations as are of the same length.
//!
//! No ranks wait for each other's slots. Of those that wait for one, look at a rank that is in the first operation: whom it sends to is in the same one or a later one, so it has received all of the operations before; what it has not
//! given back is less than half a ring of what it has received, and of this operation there is not more than the other half.

use super::walk::{self, Walk};
use super::{Drive, Lane, link};
use crate::executor::code::{Code, message};
use crate::executor::error::Failed;
use crate::executor::layout::Layout;
use crate::executor::link::Link;
use crate::executor::operation::Running;
use crate::kernel::Function;
use crate::plan::{Form, Place, Span, Step};
use crate::protocol::{EAGER_SLOTS, Lines};
use crate::types::Rank;

/// Where something lies: a byte of a place.
#[derive(Clone, Copy, Debug)]
struct Spot {
    place: Place,
    at: usize,
}

/// What is to be done.
#[derive(Debug)]
enum Act {
    Send {
        to: Rank,
        from: Spot,
        len: usize,
    },
    Recv {
        from: Rank,
        into: Spot,
        len: usize,
    },
    RecvReduce {
        from: Rank,
        form: Form,
        len: usize,
        with: Spot,
        into: Spot,
        elements: usize,
    },
    Reduce {
        sources: Box<[Spot]>,
        into: Spot,
        elements: usize,
    },
    Copy {
        from: Spot,
        into: Spot,
        len: usize,
    },
}

/// What a message of a short operation goes by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::executor) enum By {
    /// Lines.
    Lines(Lines),
    /// Simple, stored into mailboxes that are mapped. Messages are cut as they are anyway, and none is longer than what is eager.
    Store {
        /// Bytes of what is eager, and of a part of what is longer, at most.
        eager: usize,
        fragment: usize,
    },
}

impl By {
    /// Bytes that messages are cut into, those that a slot takes, and slots of a ring.
    fn slots(self) -> (usize, usize, u64) {
        match self {
            Self::Lines(lines) => (lines.room(), lines.room(), lines.slots()),
            Self::Store { eager, fragment } => (fragment, eager, EAGER_SLOTS),
        }
    }
}

/// A strand's program for operations of one length.
#[derive(Debug, Default)]
pub(in crate::executor) struct Short {
    /// Each with the number of its step.
    acts: Box<[(u32, Act)]>,
}

impl Short {
    /// The programs of all strands of operations laid out like this, of one slice; `None` where some need more than there is room for.
    pub(in crate::executor) fn of(code: &Code, layout: &Layout, function: &Function, by: By) -> Option<Box<[Self]>> {
        (layout.extent.slices == 1).then_some(())?;
        let (cut, room, slots) = by.slots();
        // Messages to one rank: with those that are not given back yet, they fill a ring at most.
        let messages = slots as usize / 2;
        let strand = |strand: &crate::executor::code::Strand| {
            let mut acts = Vec::new();
            let mut sent: Vec<(Rank, usize)> = Vec::new();
            for (number, instruction) in (0..).zip(&strand.instructions) {
                let spot = |span: Span, fragment| Spot {
                    place: span.place,
                    at: walk::bytes_at(layout, function, instruction, span, 0, fragment),
                };
                let (form, span) = match (message(&instruction.step), &instruction.step) {
                    (Some((_, form, span)), _) => (form, span),
                    (None, Step::Reduce { into, .. } | Step::Copy { into, .. }) => (into.place.form(), *into),
                    (None, _) => continue,
                };
                let of_message = message(&instruction.step).is_some();
                let most = if of_message {
                    (cut / function.bytes(form)) as u64
                } else {
                    u64::MAX
                };
                if !of_message && span.blocks == 0 {
                    continue;
                }
                let mut walk = Walk::default();
                while let Some(fragment) = walk::next(layout, most, instruction, span, 0, &mut walk) {
                    let elements = fragment.len as usize;
                    let len = elements * function.bytes(form);
                    if of_message && len > room {
                        return None;
                    }
                    let act = match &instruction.step {
                        Step::Send { to, span } => {
                            let index = sent.iter().position(|(rank, _)| rank == to).unwrap_or(sent.len());
                            if index == sent.len() {
                                sent.push((*to, 0));
                            }
                            sent[index].1 += 1;
                            if sent[index].1 > messages {
                                return None;
                            }
                            Act::Send {
                                to: *to,
                                from: spot(*span, fragment),
                                len,
                            }
                        }
                        Step::Recv { from, into } => Act::Recv {
                            from: *from,
                            into: spot(*into, fragment),
                            len,
                        },
                        Step::RecvReduce { from, form, with, into } => Act::RecvReduce {
                            from: *from,
                            form: *form,
                            len,
                            with: spot(*with, fragment),
                            into: spot(*into, fragment),
                            elements,
                        },
                        Step::Reduce { sources, into } => Act::Reduce {
                            sources: sources.iter().map(|source| spot(*source, fragment)).collect(),
                            into: spot(*into, fragment),
                            elements,
                        },
                        Step::Copy { from, into } => Act::Copy {
                            from: spot(*from, fragment),
                            into: spot(*into, fragment),
                            len,
                        },
                    };
                    acts.push((number, act));
                    walk::pass(&mut walk, fragment);
                }
            }
            Some(Self { acts: acts.into() })
        };
        code.strands.iter().map(strand).collect()
    }
}

/// How messages go that take a slot each.
trait Carries {
    /// Sends one; false if it has to wait.
    ///
    /// # Safety
    /// `from` can be read for `len` bytes, which nobody writes meanwhile.
    unsafe fn send(&self, to: &mut Link, from: *const u8, len: usize) -> Result<bool, Failed>;

    /// Takes one: gives where it is, until something is sent to the peer; `None` if it is not there.
    ///
    /// # Safety
    /// `into` can be written for `len` bytes (4, if that is 0), which nobody else touches.
    unsafe fn receive(&self, from: &mut Link, into: *mut u8, len: usize) -> Option<*mut u8>;
}

struct ByLines(Lines);

impl Carries for ByLines {
    #[inline(always)]
    unsafe fn send(&self, to: &mut Link, from: *const u8, len: usize) -> Result<bool, Failed> {
        let may = to.may_send_lines(self.0);
        if may {
            // SAFETY: as by contract.
            unsafe { to.send_lines(self.0, from, len) }?;
        }
        Ok(may)
    }

    #[inline(always)]
    unsafe fn receive(&self, from: &mut Link, into: *mut u8, len: usize) -> Option<*mut u8> {
        // SAFETY: as by contract.
        unsafe { from.receive_lines(self.0, into, len) }.then_some(into)
    }
}

struct ByStores;

impl Carries for ByStores {
    #[inline(always)]
    unsafe fn send(&self, to: &mut Link, from: *const u8, len: usize) -> Result<bool, Failed> {
        let may = to.may_store();
        if may {
            // SAFETY: as by contract.
            unsafe { to.store(from, len) }?;
        } else if !to.is_mapped() {
            return Err(Failed::Refused {
                peer: to.peer,
                what: "its mailbox is not mapped any more".to_owned(),
            });
        }
        Ok(may)
    }

    #[inline(always)]
    unsafe fn receive(&self, from: &mut Link, _into: *mut u8, _len: usize) -> Option<*mut u8> {
        from.has_arrived().then(|| from.receive(true)).flatten()
    }
}

impl Lane {
    /// Goes on with a short operation as far as it comes.
    pub(super) fn drive_short(
        &mut self,
        op: &Running,
        short: &Short,
        links: &mut [Option<Link>],
    ) -> Result<Drive, Failed> {
        match op.lines {
            Some(lines) => self.drive_by(op, short, &ByLines(lines), links),
            None => self.drive_by(op, short, &ByStores, links),
        }
    }

    #[inline(always)]
    fn drive_by(
        &mut self,
        op: &Running,
        short: &Short,
        by: &impl Carries,
        links: &mut [Option<Link>],
    ) -> Result<Drive, Failed> {
        let begun = self.act;
        while let Some((step, act)) = short.acts.get(self.act) {
            self.execution.step = *step;
            let received: *mut u8 = self.lines.as_mut_ptr().cast();
            let at = |spot: Spot| self.place(op, spot.place).wrapping_add(spot.at);
            let operand = |spot: Spot| (spot.place.form(), at(spot).cast_const());
            match act {
                Act::Send { to, from, len } => {
                    // SAFETY: the message lies in its place, which the operation has; what this rank writes there comes later.
                    if !unsafe { by.send(link(links, *to)?, at(*from), *len) }? {
                        break;
                    }
                }
                Act::Recv { from, into, len } => {
                    let into = at(*into);
                    let target = if *len >= 4 { into } else { received };
                    // SAFETY: the message lies in its place, whose earlier contents have been sent; or in the memory for a slot's lines, which takes four bytes at least.
                    let Some(come) = (unsafe { by.receive(link(links, *from)?, target, *len) }) else {
                        break;
                    };
                    if come != into {
                        // SAFETY: as above; the memory for lines, and a slot, are apart.
                        unsafe { core::ptr::copy_nonoverlapping(come, into, *len) };
                    }
                }
                Act::RecvReduce {
                    from,
                    form,
                    len,
                    with,
                    into,
                    elements,
                } => {
                    // SAFETY: the memory for lines takes a slot's.
                    let Some(come) = (unsafe { by.receive(link(links, *from)?, received, *len) }) else {
                        break;
                    };
                    let sources = [(*form, come.cast_const()), operand(*with)];
                    // SAFETY: all are as long as the message; the two in places of the operation are the same or apart, and nobody else writes them now; what was received is complete.
                    unsafe { op.function.reduce(&sources, (into.place.form(), at(*into)), *elements) };
                }
                Act::Reduce {
                    sources,
                    into,
                    elements,
                } => {
                    let mut operands = core::mem::take(&mut self.operands);
                    operands.clear();
                    let operand = |spot: &Spot| {
                        let at = self.place(op, spot.place).wrapping_add(spot.at);
                        (spot.place.form(), at.cast_const())
                    };
                    operands.extend(sources.iter().map(operand));
                    let into = (into.place.form(), self.place(op, into.place).wrapping_add(into.at));
                    // SAFETY: all hold data blocks of one length; they are the same or apart, and nobody else writes them now.
                    unsafe { op.function.reduce(&operands, into, *elements) };
                    self.operands = operands;
                }
                Act::Copy { from, into, len } => {
                    let (from, into) = (at(*from), at(*into));
                    // In place they may be one.
                    if from != into {
                        // SAFETY: both hold data blocks of one length, are apart, and nobody else writes them now.
                        unsafe { core::ptr::copy_nonoverlapping(from, into, *len) };
                    }
                }
            }
            self.act += 1;
        }
        let done = self.act == short.acts.len();
        if self.act != begun || self.notes_wait {
            self.notes_wait = false;
            for to in links.iter_mut().flatten() {
                to.send_notes()?;
                // Else the peer would wait for the slots that they give back, and this rank for the peer's next message.
                self.notes_wait |= to.has_notes();
            }
        }
        Ok(match (done, self.act != begun) {
            (true, _) => {
                self.running = false;
                Drive::Done
            }
            (false, true) => Drive::Moved,
            (false, false) => Drive::Idle,
        })
    }
}
