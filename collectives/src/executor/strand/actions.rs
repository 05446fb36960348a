//! A slice of a program as *actions*: fragments of messages, and local work, with their places in
//! memory and their lengths.
//!
//! They are computed once: for all operations of one length that have one slice, else when a strand
//! runner comes to the slice.

use std::collections::VecDeque;

use crate::executor::layout::Layout;
use crate::executor::operation::{ActiveOperation, Transport};
use crate::executor::program::{CompiledProgram, Instruction, StrandProgram};
use crate::kernel::Function;
use crate::plan::{BlockForm, PlanMemory, Span, Step};
use crate::types::Rank;

#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryRef {
    pub(super) place: PlanMemory,
    /// Bytes from its start.
    pub(super) at: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    Send {
        to: Rank,
        from: MemoryRef,
    },
    Recv {
        from: Rank,
        into: MemoryRef,
    },
    RecvReduce {
        from: Rank,
        form: BlockForm,
        with: MemoryRef,
        into: MemoryRef,
    },
    /// The sources are operands of the slice: the first, and how many.
    Reduce {
        sources: (u32, u32),
        into: MemoryRef,
    },
    Copy {
        from: MemoryRef,
        into: MemoryRef,
    },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Action {
    pub(super) step: u32,
    pub(super) elements: usize,
    /// Bytes of the message, else of what is written.
    pub(super) len: usize,
    /// Bytes of the message from this fragment on.
    pub(super) rest: u64,
    pub(super) work: Work,
}

impl Action {
    fn is_message(&self) -> bool {
        !matches!(self.work, Work::Reduce { .. } | Work::Copy { .. })
    }
}

/// What the actions of a slice are made from.
#[derive(Clone, Copy)]
pub(in crate::executor) struct SliceOf<'a> {
    pub(in crate::executor) layout: &'a Layout,
    pub(in crate::executor) function: &'a Function,
    pub(in crate::executor) transport: Transport,
    pub(in crate::executor) slice: u32,
}

impl SliceOf<'_> {
    /// The elements of a piece of a span.
    fn piece(&self, span: Span, (block, blocks): (u32, u32)) -> (u64, u64) {
        let range = self
            .layout
            .element_range(span.place, span.first + block, blocks, self.slice);
        (range.offset, range.len)
    }

    /// The memory of a span `at` elements behind the start of a piece; any, of an empty message.
    fn place(&self, span: Span, piece: Option<(u32, u32)>, at: u64) -> MemoryRef {
        let elements = piece.map_or(0, |piece| self.piece(span, piece).0 + at);
        MemoryRef {
            place: span.place,
            at: elements as usize * self.function.bytes(span.place.form()),
        }
    }
}

#[derive(Default, Debug)]
pub(in crate::executor) struct SliceActions {
    pub(super) actions: Vec<Action>,
    operands: Vec<MemoryRef>,
}

impl SliceActions {
    /// A slice of all strands.
    pub(in crate::executor) fn of(program: &CompiledProgram, of: SliceOf<'_>) -> Box<[Self]> {
        let strand = |strand| {
            let mut slice = Self::default();
            slice.fill(strand, of);
            slice
        };
        program.strands.iter().map(strand).collect()
    }

    /// Whether there is a message for which the receiver grants memory.
    pub(in crate::executor) fn has_granted(&self, transport: Transport) -> bool {
        let granted = |action: &Action| action.is_message() && transport.is_granted(action.len);
        self.actions.iter().any(granted)
    }

    #[inline]
    pub(super) fn sources(&self, (first, count): (u32, u32)) -> &[MemoryRef] {
        &self.operands[first as usize..][..count as usize]
    }

    fn fill(&mut self, strand: &StrandProgram, of: SliceOf<'_>) {
        self.actions.clear();
        self.operands.clear();
        for (step, instruction) in (0..).zip(&strand.instructions) {
            let first = self.actions.len();
            self.add(step, instruction, of);
            let mut rest = 0;
            for action in self.actions[first..].iter_mut().rev() {
                rest += action.len as u64;
                action.rest = rest;
            }
        }
    }

    fn add(&mut self, step: u32, instruction: &Instruction, of: SliceOf<'_>) {
        let (form, span, most) = match (&instruction.step, instruction.step.message()) {
            (_, Some((_, form, span))) => (form, span, of.transport.fragment() / of.function.bytes(form)),
            (Step::Reduce { into, .. } | Step::Copy { into, .. }, None) => (into.place.form(), *into, usize::MAX),
            (_, None) => return,
        };
        let fragment = |slice: &mut Self, piece, at, elements: usize| {
            let place = |span: Span| of.place(span, piece, at);
            let work = slice.work(&instruction.step, place);
            slice.actions.push(Action {
                step,
                elements,
                len: elements * of.function.bytes(form),
                rest: 0,
                work,
            });
        };
        if span.blocks == 0 && instruction.step.message().is_some() {
            fragment(self, None, 0, 0);
        }
        for &piece in instruction.pieces.iter().filter(|_| span.blocks > 0) {
            let (mut at, all) = (0, of.piece(span, piece).1);
            while at < all {
                let elements = (most as u64).min(all - at);
                fragment(self, Some(piece), at, elements as usize);
                at += elements;
            }
        }
    }

    fn work(&mut self, step: &Step, place: impl Fn(Span) -> MemoryRef) -> Work {
        match step {
            Step::Send { to, span } => Work::Send {
                to: *to,
                from: place(*span),
            },
            Step::Recv { from, into } => Work::Recv {
                from: *from,
                into: place(*into),
            },
            Step::RecvReduce { from, form, with, into } => Work::RecvReduce {
                from: *from,
                form: *form,
                with: place(*with),
                into: place(*into),
            },
            Step::Reduce { sources, into } => {
                let first = self.operands.len() as u32;
                self.operands.extend(sources.iter().map(|source| place(*source)));
                Work::Reduce {
                    sources: (first, sources.len() as u32),
                    into: place(*into),
                }
            }
            Step::Copy { from, into } => Work::Copy {
                from: place(*from),
                into: place(*into),
            },
        }
    }
}

/// Slices ahead of execution whose messages are granted memory.
const AHEAD: u32 = 4;

/// The slices that a strand runner works on. Their memory is reused.
#[derive(Default)]
pub(super) struct Slices {
    /// The index of the first of them.
    first: u32,
    slices: VecDeque<SliceActions>,
    spare: Vec<SliceActions>,
}

impl Slices {
    pub(super) fn begin(&mut self, op: &ActiveOperation, place: (u32, u32)) {
        self.first = 0;
        self.spare.extend(self.slices.drain(..));
        self.advance(op, place, 0);
    }

    /// A slice by its index among those of the channel, if it has been computed.
    #[inline]
    pub(super) fn get<'a>(&'a self, op: &'a ActiveOperation, strand: u32, index: u32) -> Option<&'a SliceActions> {
        match &op.ready.only_slice {
            Some(strands) if index == 0 => strands.get(strand as usize),
            Some(_) => None,
            None => self.slices.get(index.checked_sub(self.first)? as usize),
        }
    }

    /// Forgets the slices before `oldest`, and computes those from it on, of this channel and
    /// strand.
    pub(super) fn advance(&mut self, op: &ActiveOperation, (channel, strand): (u32, u32), oldest: u32) {
        while self.first < oldest
            && let Some(slice) = self.slices.pop_front()
        {
            self.spare.push(slice);
            self.first += 1;
        }
        for index in self.first + self.slices.len() as u32..oldest + AHEAD {
            let number = channel + index * op.channels;
            if number >= op.ready.layout.extent.slices {
                break;
            }
            let mut slice = self.spare.pop().unwrap_or_default();
            let of = SliceOf {
                layout: &op.ready.layout,
                function: &op.function,
                transport: op.transport,
                slice: number,
            };
            slice.fill(&op.ready.program.strands[strand as usize], of);
            self.slices.push_back(slice);
        }
    }
}
