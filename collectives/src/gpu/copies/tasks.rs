//! The tasks of a rank for an operation, before streams are assigned.

use core::ops::Range;

use super::plan::{Message, Plan};
use super::script::{Location, StreamOp};
use crate::executor::layout::{cut_into_pieces, part_begin};
use crate::plan::{BlockForm, PlanMemory, Span, Step};
use crate::types::Rank;

pub(super) const ALIGN: u64 = 256;

/// Memory of a rank whose hazards it tracks itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum MemorySpace {
    Input,
    Output,
    Staging,
}

#[derive(Clone, Debug)]
pub(super) struct Access {
    pub(super) space: MemorySpace,
    bytes: Range<u64>,
    writes: bool,
}

impl Access {
    pub(super) fn conflicts(&self, other: &Self) -> bool {
        (self.writes || other.writes)
            && self.space == other.space
            && self.bytes.start < other.bytes.end
            && other.bytes.start < self.bytes.end
    }
}

#[derive(Clone, Debug)]
pub(super) enum TaskKind {
    Send { to: Rank, word: u32, needs_credit: bool },
    Receive { from: Rank, word: u32, needs_credit: bool },
    Work,
}

#[derive(Clone, Debug)]
pub(super) struct Task {
    /// Slice, strand, step, and index within the step: the plan's order.
    pub(super) place: (u64, u32, u32, u32),
    pub(super) depth: u32,
    pub(super) kind: TaskKind,
    pub(super) ops: Vec<StreamOp>,
    pub(super) accesses: Vec<Access>,
}

impl Plan {
    pub(super) fn unit(&self, form: BlockForm) -> u64 {
        match form {
            BlockForm::Element => self.params.data.bytes() as u64,
            BlockForm::Partial => self.params.data.accumulator().bytes() as u64,
        }
    }

    pub(super) fn partial_at(&self, rank: usize) -> u64 {
        (self.layouts[rank].scratch_len * self.unit(BlockForm::Element)).next_multiple_of(ALIGN)
    }

    /// The pieces of a span of `rank`: location in bytes, and elements.
    fn span(&self, rank: usize, span: Span, slice: u64) -> Vec<(PlanMemory, u64, u64)> {
        let layout = &self.layouts[rank];
        let Some(data) = self.contents[rank].of(span) else {
            return Vec::new();
        };
        let unit = self.unit(span.place.form());
        let each = cut_into_pieces(data, layout.joins());
        let run = |&(at, blocks): &(u32, u32)| {
            let run = layout.element_range(span.place, span.first + at, blocks, slice as u32);
            let base = match span.place {
                PlanMemory::Input | PlanMemory::Output => 0,
                PlanMemory::Scratch => self.base(slice),
                PlanMemory::Partial => self.base(slice) + self.partial_at(rank),
            };
            (span.place, base + run.offset * unit, run.len)
        };
        each.iter().map(run).collect()
    }

    fn base(&self, slice: u64) -> u64 {
        slice % self.staging_slots * self.staging_slot_bytes
    }

    pub(super) fn message_bytes(&self, message: Message, slice: u64) -> u64 {
        let Step::Send { span, .. } = self.sending(message) else {
            return 0;
        };
        let elements: u64 = self
            .span(message.from.index(), *span, slice)
            .iter()
            .map(|(_, _, len)| len)
            .sum();
        elements * self.unit(span.place.form())
    }

    fn target(&self, message: Message, slice: u64) -> Vec<(PlanMemory, u64)> {
        if let Some(staged) = message.staged {
            let mut next = self.base(slice) + staged;
            let Step::Send { span, .. } = self.sending(message) else {
                return Vec::new();
            };
            let unit = self.unit(span.place.form());
            let pieces = self.span(message.from.index(), *span, slice);
            let place = |(_, _, len): &(PlanMemory, u64, u64)| {
                let at = next;
                next += len * unit;
                (PlanMemory::Scratch, at)
            };
            return pieces.iter().map(place).collect();
        }
        match self.receiving(message) {
            Step::Recv { into, .. } => self
                .span(message.to.index(), *into, slice)
                .into_iter()
                .map(|(place, at, _)| (place, at))
                .collect(),
            _ => Vec::new(),
        }
    }

    fn access(&self, rank: usize, (place, at): (PlanMemory, u64), bytes: u64, writes: bool) -> Access {
        let (input, output) = self.shifts[rank];
        let (space, start) = match place {
            PlanMemory::Input if self.params.in_place => (MemorySpace::Output, at + input),
            PlanMemory::Input => (MemorySpace::Input, at),
            PlanMemory::Output => (MemorySpace::Output, at + output),
            PlanMemory::Scratch | PlanMemory::Partial => (MemorySpace::Staging, at),
        };
        Access {
            space,
            bytes: start..start + bytes,
            writes,
        }
    }

    pub(super) fn tasks(&self, rank: usize, slice: u64) -> Vec<Task> {
        let mut tasks = Vec::new();
        for (strand, steps) in self.programs[rank].strands.iter().enumerate() {
            for (at, step) in steps.iter().enumerate() {
                let depth = self.depths[rank][strand][at];
                let message = self.message_of_step[rank][strand][at].map(|id| self.messages[id as usize]);
                let mut task = Task {
                    place: (slice, strand as u32, at as u32, 0),
                    depth,
                    kind: TaskKind::Work,
                    ops: Vec::new(),
                    accesses: Vec::new(),
                };
                match (step, message) {
                    (Step::Send { span, .. }, Some(message)) => {
                        let unit = self.unit(span.place.form());
                        let (pieces, targets) = (self.span(rank, *span, slice), self.target(message, slice));
                        for part in 0..message.parts {
                            let mut task = task.clone();
                            for ((place, from, len), (into, to)) in pieces.iter().copied().zip(targets.iter().copied())
                            {
                                let cut = cut(len, part, message.parts);
                                let (skipped, bytes) = (cut.start * unit, (cut.end - cut.start) * unit);
                                task.copy(
                                    own_location((place, from + skipped)),
                                    peer_location(message.to, (into, to + skipped)),
                                    bytes,
                                );
                                task.accesses
                                    .push(self.access(rank, (place, from + skipped), bytes, false));
                            }
                            task.place.3 = part;
                            task.kind = TaskKind::Send {
                                to: message.to,
                                word: self.word(message, slice) + part,
                                needs_credit: self.needs_credit(message, slice),
                            };
                            tasks.extend(task.nonempty());
                        }
                    }
                    (Step::Recv { into, .. }, Some(message)) => {
                        self.receive(&mut tasks, &task, message, slice);
                        if message.staged.is_some() {
                            let unit = self.unit(into.place.form());
                            task.place.3 = message.parts;
                            let sources = self.target(message, slice);
                            for ((place, to, len), from) in self.span(rank, *into, slice).into_iter().zip(sources) {
                                task.copy(own_location(from), own_location((place, to)), len * unit);
                                task.accesses.push(self.access(rank, from, len * unit, false));
                                task.accesses.push(self.access(rank, (place, to), len * unit, true));
                            }
                            tasks.extend(task.nonempty());
                        }
                    }
                    (Step::RecvReduce { form, with, into, .. }, Some(message)) => {
                        self.receive(&mut tasks, &task, message, slice);
                        task.place.3 = message.parts;
                        let received = self
                            .target(message, slice)
                            .into_iter()
                            .map(|from| (from, *form))
                            .collect();
                        let sources = [received, self.operand(rank, *with, slice)];
                        self.reduce(rank, &mut task, &sources, (*into, slice), (0, 1));
                        tasks.extend(task.nonempty());
                    }
                    (Step::Reduce { sources, into }, _) => {
                        let sources: Vec<_> = sources
                            .iter()
                            .map(|source| self.operand(rank, *source, slice))
                            .collect();
                        let parts = self.params.tail_parts.max(1);
                        for part in 0..parts {
                            let mut task = task.clone();
                            task.place.3 = part;
                            self.reduce(rank, &mut task, &sources, (*into, slice), (part, parts));
                            tasks.extend(task.nonempty());
                        }
                    }
                    (Step::Copy { from, into }, _) => {
                        let unit = self.unit(into.place.form());
                        for ((source, at, _), (place, to, len)) in self
                            .span(rank, *from, slice)
                            .into_iter()
                            .zip(self.span(rank, *into, slice))
                        {
                            let (read, written) = (
                                self.access(rank, (source, at), len * unit, false),
                                self.access(rank, (place, to), len * unit, true),
                            );
                            if read.space == written.space && read.bytes == written.bytes {
                                continue;
                            }
                            task.copy(own_location((source, at)), own_location((place, to)), len * unit);
                            task.accesses.extend([read, written]);
                        }
                        tasks.extend(task.nonempty());
                    }
                    // A message without a sender: the plan checker excludes it.
                    _ => {}
                }
            }
        }
        tasks
    }

    fn receive(&self, tasks: &mut Vec<Task>, step: &Task, message: Message, slice: u64) {
        let Step::Send { span, .. } = self.sending(message) else {
            return;
        };
        let unit = self.unit(span.place.form());
        let (pieces, targets) = (
            self.span(message.from.index(), *span, slice),
            self.target(message, slice),
        );
        for part in 0..message.parts {
            let mut task = step.clone();
            for ((place, at), (_, _, len)) in targets.iter().copied().zip(&pieces) {
                let cut = cut(*len, part, message.parts);
                if !cut.is_empty() {
                    let bytes = (cut.end - cut.start) * unit;
                    task.accesses
                        .push(self.access(message.to.index(), (place, at + cut.start * unit), bytes, true));
                }
            }
            if task.accesses.is_empty() {
                continue;
            }
            task.place.3 = part;
            task.depth = self.depths[message.from.index()][message.strand as usize][message.send as usize];
            task.kind = TaskKind::Receive {
                from: message.from,
                word: self.word(message, slice) + part,
                needs_credit: self.needs_credit(message, slice),
            };
            tasks.push(task);
        }
    }

    fn operand(&self, rank: usize, span: Span, slice: u64) -> Vec<((PlanMemory, u64), BlockForm)> {
        self.span(rank, span, slice)
            .into_iter()
            .map(|(place, at, _)| ((place, at), place.form()))
            .collect()
    }

    fn reduce(
        &self,
        rank: usize,
        task: &mut Task,
        sources: &[Vec<((PlanMemory, u64), BlockForm)>],
        (into, slice): (Span, u64),
        (part, parts): (u32, u32),
    ) {
        for (at, (place, to, len)) in self.span(rank, into, slice).into_iter().enumerate() {
            let cut = cut(len, part, parts);
            if cut.is_empty() {
                continue;
            }
            let elements = cut.end - cut.start;
            let skip = |(place, at): (PlanMemory, u64), form: BlockForm| (place, at + cut.start * self.unit(form));
            let of_piece: Vec<_> = sources
                .iter()
                .filter_map(|source| source.get(at))
                .map(|(from, form)| (skip(*from, *form), *form))
                .collect();
            let to = skip((place, to), place.form());
            for (from, form) in &of_piece {
                task.accesses
                    .push(self.access(rank, *from, elements * self.unit(*form), false));
            }
            task.accesses
                .push(self.access(rank, to, elements * self.unit(place.form()), true));
            task.ops.push(StreamOp::Reduce {
                sources: of_piece
                    .into_iter()
                    .map(|(from, form)| (own_location(from), form))
                    .collect(),
                into: (own_location(to), place.form()),
                elements,
            });
        }
    }

    fn word(&self, message: Message, slice: u64) -> u32 {
        slice as u32 * self.counts[message.from.index()][message.to.index()] + message.number
    }

    /// Whether a message overwrites data of the same operation.
    fn needs_credit(&self, message: Message, slice: u64) -> bool {
        let is_staging = match (message.staged, self.receiving(message)) {
            (Some(_), _) => true,
            (None, Step::Recv { into, .. }) => matches!(into.place, PlanMemory::Scratch | PlanMemory::Partial),
            _ => false,
        };
        message.replaces || (is_staging && slice >= self.staging_slots)
    }
}

impl Task {
    fn copy(&mut self, from: Location, into: Location, bytes: u64) {
        if bytes > 0 {
            self.ops.push(StreamOp::Copy { from, into, bytes });
        }
    }

    fn nonempty(self) -> Option<Self> {
        (!self.ops.is_empty()).then_some(self)
    }

    pub(super) fn follows(&self, other: &Self) -> bool {
        other.place < self.place
            && self
                .accesses
                .iter()
                .any(|access| other.accesses.iter().any(|before| before.conflicts(access)))
    }
}

fn cut(len: u64, part: u32, parts: u32) -> Range<u64> {
    part_begin(len, parts, part)..part_begin(len, parts, part + 1)
}

fn own_location((place, at): (PlanMemory, u64)) -> Location {
    match place {
        PlanMemory::Input => Location::Input(at),
        PlanMemory::Output => Location::Output(at),
        PlanMemory::Scratch | PlanMemory::Partial => Location::Staging(at),
    }
}

fn peer_location(rank: Rank, (place, at): (PlanMemory, u64)) -> Location {
    match place {
        PlanMemory::Input | PlanMemory::Output => Location::TheirOutput(rank, at),
        PlanMemory::Scratch | PlanMemory::Partial => Location::TheirStaging(rank, at),
    }
}
